"""DanceGRPO, `fastvideo/train_grpo_hunyuan.py`: two advantages, and the best of all samples chosen by their rewards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from leangrpo_rehearsal.base import Config, Context, Launch
from leangrpo_rehearsal.scripts.hunyuan import Hunyuan


class HunyuanVideo(Hunyuan):
    """`generations` samples are trained per rollout; `drawn` are drawn, of which they are chosen."""

    name = "hunyuan"
    path = "fastvideo/train_grpo_hunyuan.py"
    advantages = 2
    options = ("learning_rate", "same_noise", "drawn", "order")
    shown = (("order", "upstream"),)
    unknown = ("--num_latent_t",)
    unknown_flags = ("--init_same_noise",)

    def supports(self, config: Config) -> str | None:
        """An even number is chosen: the best and the worst."""
        drawn = config.option("drawn", "6")
        if not drawn.isdecimal() or int(drawn) < config.generations or config.generations % 2:
            return f"drawn is {drawn}: at least as many as the generations, {config.generations}, an even number"
        if config.option("order", "held-first") not in ("held-first", "upstream"):
            return "order is held-first or upstream"
        return super().supports(config)

    def launch(self, workdir: Path, config: Config) -> Launch:
        """As `scripts/finetune/finetune_hunyuan_grpo.sh`."""
        argv = [*self.video_arguments(workdir, config), "--bestofn", str(config.generations), "--mq_coef", "0.5"]
        argv[argv.index("--num_generations") + 1] = str(_drawn(config))
        argv += ["--use_same_noise"] if config.option("same_noise", "1") == "1" else []
        return Launch(argv, {"LEANGRPO_ORDER": config.option("order", "held-first")})

    def nothing_to_replay(self, config: Config) -> str:
        """By default nothing is kept where the samples are chosen afterwards."""
        if _drawn(config) == config.generations or _holds_all(config):
            return ""
        return f"{config.generations} of {_drawn(config)} samples are trained, chosen by their rewards"

    def stand_ins(self, config: Config) -> tuple[str, ...]:
        """Native runs train the steps in the order that the patched run draws before its rollout."""
        return (*super().stand_ins(config), *(["ordered"] if _ordered(config) else []))

    def notes(self, config: Config) -> list[str]:
        """What the native runs were given."""
        if not _ordered(config):
            return []
        return [
            "the patched tree draws an order of steps for each sample before the rollout, upstream for the chosen ones "
            "after it: both runs were given the same by a stand-in"
        ]

    def install(self, context: Context) -> None:
        """The same orders in both runs where they are drawn for other samples."""
        super().install(context)
        if _ordered(context.config):
            _orders_by_sample(context)


def _drawn(config: Config) -> int:
    return int(config.option("drawn", "6"))


def _holds_all(config: Config) -> bool:
    """Whether all graphs are held. Gradients in their place never are: most would be made for nothing."""
    return config.option("order", "held-first") == "upstream" and config.schedule not in ("recompute", "reweight")


def _ordered(config: Config) -> bool:
    return _holds_all(config) and _drawn(config) != config.generations


def _orders_by_sample(context: Context) -> None:
    """Orders of steps are drawn by rollout and sample. Which samples upstream has chosen is read off its sort."""
    import torch

    config = context.config
    randperm, argsort = torch.randperm, torch.argsort
    asked, chosen = 0, torch.arange(0)

    def sort(scores: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal chosen
        order = argsort(scores, *args, **kwargs)
        chosen = torch.cat([order[-(config.generations // 2) :], order[: config.generations // 2]])
        return order

    def draw(count: int, **how: Any) -> Any:
        nonlocal asked, chosen
        if how.get("device") is not None and count == len(chosen):
            shuffled = randperm(count, **how)
            chosen = chosen[shuffled]
            return shuffled
        if any(value is not None for value in how.values()) or count != config.steps - 1:
            return randperm(count, **how)
        each = _drawn(config) if context.patched else config.generations
        rollout, place = divmod(asked, each)
        asked += 1
        sample = place if context.patched else int(chosen[place])
        return randperm(count, generator=torch.Generator().manual_seed(1000 * rollout + sample))

    torch.argsort, torch.randperm = sort, draw  # type: ignore[assignment]


SCRIPT = HunyuanVideo()
