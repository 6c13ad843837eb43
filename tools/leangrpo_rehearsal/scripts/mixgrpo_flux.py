"""MixGRPO, `fastvideo/train_grpo_flux.py`: a sliding window of trained steps, three step functions, several rewards."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

from leangrpo_rehearsal import stubs
from leangrpo_rehearsal.base import Config, Context, Launch
from leangrpo_rehearsal.scripts.dancegrpo import load_in_float32
from leangrpo_rehearsal.scripts.dancegrpo_flux import Flux

CHOICES = {
    "strategy": ("part", "all"), "step": ("flow", "dance", "dpm"), "flash": ("0", "1"),
    "rewards": ("advantage_aggr", "reward_aggr", "one"), "rerange": ("null", "random", "balance"),
    "order": ("held-first", "upstream"),
}  # fmt: skip
"""Options with a fixed set of values, the default first."""
NUMBERS = {"kl": "0", "trimmed": "0", "group_size": "2", "frozen": "-1", "overlap": "1", "compress": "0.7"}
"""`group_size` steps are in the window, which moves on by `overlap` with each rollout."""


class MixFlux(Flux):
    """The tiny FLUX of DanceGRPO's rehearsal, scored by two stand-ins."""

    options = ("learning_rate", "same_noise", "prompts", "generations", *CHOICES, *NUMBERS)
    folders = ()

    def trained(self, config: Config) -> int:
        """The first rollout's; its window is whole (`supports`)."""
        if config.option("strategy", "part") == "part":
            return int(_number(config, "group_size"))
        frozen = int(_number(config, "frozen"))
        return frozen if frozen > 0 else super().trained(config)

    def supports(self, config: Config) -> str | None:
        """A window with no step in it stops upstream with an error."""
        if config.ema:
            return "this script keeps no EMA"
        for name, allowed in CHOICES.items():
            if config.option(name, allowed[0]) not in allowed:
                return f"{name} is {config.option(name, '')!r}; allowed: {', '.join(allowed)}"
        for name in NUMBERS:
            if not re.fullmatch(r"-?\d+(\.\d+)?", config.option(name, NUMBERS[name])):
                return f"{name} is {config.option(name, '')!r}; allowed: numbers"
        if config.option("step", "flow") == "dpm" and config.option("flash", "0") == "1":
            return "step=dpm is the DPM solver for all steps, flash=1 that for those after the window: give one of them"
        if config.option("step", "flow") == "dpm" and config.option("same_noise", "1") == "1":
            return "with step=dpm upstream draws the same noise for all samples and learns nothing: give same_noise=0"
        if config.option("strategy", "part") == "part":
            end, size = config.steps - 2, int(_number(config, "group_size"))
            last = int(_number(config, "overlap")) * (config.rollouts - 1)
            if not 1 <= size <= end or last >= end:
                return f"windows of {size} steps from step 0 to {last} do not fit before step {end}, upstream's limit"
        return super().supports(config)

    def launch(self, workdir: Path, config: Config) -> Launch:
        """As `scripts/finetune/finetune_flux_grpo_MixGRPO.sh`, or `..._Flash.sh`, with everything small."""
        argv = [word for word in self.launch_arguments(workdir, config) if word != "--use_hpsv2"]
        several = config.option("rewards", "advantage_aggr") != "one"
        aggregated = config.option("rewards", "advantage_aggr") if several else "reward_aggr"
        step, flash = config.option("step", "flow"), config.option("flash", "0") == "1"
        values: dict[str, Any] = {
            "training_strategy": config.option("strategy", "part"), "experiment_name": "tiny", "wandb_key": "none",
            "kl_coeff": _number(config, "kl"), "trimmed_ratio": _number(config, "trimmed"),
            "frozen_init_timesteps": int(_number(config, "frozen")),
            "group_size": int(_number(config, "group_size")), "iters_per_group": 1,
            "sample_strategy": "progressive", "prog_overlap_step": int(_number(config, "overlap")),
            "reward_model": "hpsv2_clip_score" if several else "hpsv2", "multi_reward_mix": aggregated,
            "hps_weight": 1.0, "clip_score_weight": 0.5,
            "dpm_algorithm_type": "dpmsolver++" if flash or step == "dpm" else "null",
            "dpm_apply_strategy": "all" if step == "dpm" else "post",
            "dpm_post_compress_ratio": _number(config, "compress"), "dpm_solver_order": 2,
            "dpm_solver_type": "midpoint", "advantage_rerange_strategy": config.option("rerange", "null"),
        }  # fmt: skip
        argv += [text for name, value in values.items() for text in (f"--{name}", str(value))]
        argv += ["--prog_overlap", "--roll_back"] + (["--flow_grpo_sampling"] if step == "flow" else [])
        return Launch(argv, {"LEANGRPO_ORDER": config.option("order", "held-first")})

    def install(self, context: Context) -> None:
        """The stand-ins for the reward models, and float32 weights where fp32 is rehearsed."""
        from leangrpo_rehearsal.scripts.mixgrpo_rewards import install

        install(context.recorder)
        # Upstream writes the run's id into a JSON file.
        wandb: Any = importlib.import_module("wandb")
        wandb.util = stubs.fake("wandb.util", generate_id=lambda: "tiny")
        if context.config.precision == "fp32":
            load_in_float32()

    def notes(self, config: Config) -> list[str]:
        """Which steps were trained, and the variant."""
        size, overlap = config.option("group_size", "2"), config.option("overlap", "1")
        trained = f"windows of {size} steps that move on by {overlap} per rollout, no fraction"
        if config.option("strategy", "part") == "all":
            trained = f"{self.trained(config)} drawn steps"
        chosen = ", ".join(f"{name} {config.option(name, allowed[0])}" for name, allowed in CHOICES.items())
        return [f"trained: {trained}; {chosen}"]

    def not_tested(self, config: Config) -> list[str]:
        """The rewards are always stand-ins here."""
        return [
            "upstream's reward models (deterministic stand-ins scored the images), and more than two of them, whose "
            "advantages it adds up in the order in which its threads finish"
        ]


def _number(config: Config, name: str) -> float:
    return float(config.option(name, NUMBERS[name]))


SCRIPT = MixFlux()
