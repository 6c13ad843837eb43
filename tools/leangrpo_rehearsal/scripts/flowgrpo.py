"""What the rehearsals of FlowGRPO's scripts share: the preset, prompts, the reward, the order of the samples."""

from __future__ import annotations

import functools
import json
import math
import sys
from pathlib import Path
from typing import Any

from leangrpo_rehearsal.base import Bound, Config, Context, Launch, Script
from leangrpo_rehearsal.importhook import after_import

PRELOAD = (
    "torch", "torch.distributed.fsdp", "accelerate", "accelerate.logging", "peft", "peft.tuners.lora", "absl.app",
    "ml_collections.config_flags", "transformers:CLIPTokenizer", "transformers:T5EncoderModel",
    "transformers:PreTrainedTokenizerFast", "transformers.integrations.deepspeed", "PIL.Image", "numpy",
)  # fmt: skip
CLIP_MAX = 5.0
_SWITCH = ("0", "1")
ALLOWED: dict[str, Any] = {
    "batch": int, "group": int, "inner_epochs": int, "repeat": int, "beta": float, "kl_reward": float,
    "learning_rate": float, "clip_range": float, "masked": _SWITCH, "lora": _SWITCH, "evaluate": _SWITCH,
    "guidance": _SWITCH, "order": ("held-first", "upstream"), "inputs": ("exact", "rounded"),
    "size": ("tiny", "mid", "large"), "sde_type": ("sde", "cps"), "window": _SWITCH, "offload": _SWITCH,
}  # fmt: skip
"""Values of the scripts' own options: a number of that kind, or one of these words."""
PROMPTS = ("cat on a mat", "red house", "old tree by the sea", "two dogs", "a bird", "blue car")
SAME = ("red house", "old tree by the sea", "blue car")
"""Prompts whose images all get the same reward where a rehearsal is `masked`."""
PRESET = """\
import importlib.util
import json
import os


def get_config():
    spec = importlib.util.spec_from_file_location("base", os.environ["REHEARSAL_BASE"])
    base = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(base)
    config = base.get_config()
    with config.unlocked():
        with open(os.environ["REHEARSAL_VALUES"]) as file:
            for path, value in json.load(file).items():
                part = config
                *groups, name = path.split(".")
                for group in groups:
                    part = part[group]
                part[name] = tuple(value) if isinstance(value, list) else value
    return config
"""


class FlowGRPO(Script):
    """Base of the scripts that sample batches, filter and shuffle them, and train through accelerate."""

    preload = PRELOAD
    stubs = ("wandb", "imageio", "requests", "aiohttp", "openai", "pandas", "scipy", "bitsandbytes", "deepspeed")
    folders = ("prompts",)
    options = (
        "batch", "group", "beta", "masked", "lora", "inner_epochs", "evaluate", "order", "inputs", "learning_rate",
    )  # fmt: skip
    defaults = {"generations": 8, "steps": 4, "fraction": 0.8}  # noqa: RUF012 (never changed)
    replicated = True
    shuffled = True
    tolerance = 5e-6

    def trained(self, config: Config) -> int:
        """The first steps of each trajectory, or as many in a random window."""
        return int(config.steps * config.fraction)

    def supports(self, config: Config) -> str | None:
        """Options have values that they know; batches, groups and updates have to fit into each other."""
        return _odd_option(config) or self.misfit(config)

    def misfit(self, config: Config) -> str | None:
        """Why sizes and settings do not go together, or None."""
        batch, group = int(config.option("batch", "2")), int(config.option("group", "2"))
        batches = config.generations // batch
        if config.checkpointing:
            return "upstream's script has no switch for activation checkpointing"
        if config.ema and config.option("lora", "1") != "1":
            return "EMA is rehearsed with LoRA"
        if config.generations % batch:
            return f"batches of {batch} (option batch) do not divide {config.generations} samples"
        if config.ranks * batch % group:
            return f"groups of {group} (option group) do not divide the {config.ranks * batch} samples of a batch"
        trained = batches * int(config.option("inner_epochs", "1"))
        if trained % config.updates_per_rollout:
            return f"{config.updates_per_rollout} updates per rollout do not divide {trained} batches to train"
        if self.trained(config) < 1:
            return "no step is trained"
        return None

    def incomparable(self, config: Config) -> str | None:
        """Whether held samples come first depends on what `auto` chooses."""
        if config.schedule == "auto" and self.reordered(config):
            return "auto trains held samples first only where it holds some: add --option order=upstream"
        return None

    def pipeline(self, folder: Path, config: Config) -> None:
        """In a child: writes the tiny pipeline."""
        raise NotImplementedError

    def preset(self, config: Config) -> dict[str, Any]:
        """Entries of the preset that only this script has."""
        return {}

    def prepare(self, workdir: Path, config: Config) -> None:
        """Pipeline, prompts and the preset."""
        self.pipeline(workdir / "model", config)
        for split, prompts in (("train", PROMPTS), ("test", PROMPTS[:2])):
            (workdir / "prompts" / f"{split}.txt").write_text("\n".join(prompts) + "\n")
        (workdir / "preset.py").write_text(PRESET)

    def launch(self, workdir: Path, config: Config) -> Launch:
        """As upstream's launch files, with a preset of our own."""
        (workdir / "values.json").write_text(json.dumps(self._values(workdir, config)))
        env = {
            "ACCELERATE_USE_CPU": "true", "REHEARSAL_VALUES": str(workdir / "values.json"), "TQDM_DISABLE": "1",
            "LEANGRPO_ORDER": config.option("order", "held-first"),
            "LEANGRPO_INPUTS": config.option("inputs", "exact"),
        }  # fmt: skip
        return Launch(["--config", str(workdir / "preset.py")], env)

    def planned(self, workdir: Path, config: Config) -> list[str]:
        """Upstream's base config with the preset's entries as overrides."""
        values = self._values(workdir, config)
        return ["--config", "config/base.py", *(f"--config.{name}={value}" for name, value in values.items())]

    def _values(self, workdir: Path, config: Config) -> dict[str, Any]:
        batch = int(config.option("batch", "2"))
        batches = config.generations // batch
        return {
            "pretrained.model": str(workdir / "model"), "dataset": str(workdir / "prompts"), "seed": config.seed,
            "prompt_fn": "general_ocr", "save_dir": str(workdir / "saved"), "logdir": str(workdir / "logs"),
            "mixed_precision": "no" if config.precision == "fp32" else config.precision, "resolution": 32,
            "use_lora": config.option("lora", "1") == "1", "save_freq": 1000000, "num_epochs": config.rollouts + 3,
            "eval_freq": 1 if config.option("evaluate", "1") == "1" else 1000000,
            "sample.num_steps": config.steps, "sample.eval_num_steps": 2, "sample.train_batch_size": batch,
            "sample.num_batches_per_epoch": batches, "sample.test_batch_size": 2,
            "sample.num_image_per_prompt": int(config.option("group", "2")),
            "train.batch_size": batch, "train.gradient_accumulation_steps": batches // config.updates_per_rollout * int(
                config.option("inner_epochs", "1")
            ), "train.num_inner_epochs": int(config.option("inner_epochs", "1")),
            "train.timestep_fraction": config.fraction, "train.beta": float(config.option("beta", "0")),
            "train.learning_rate": float(config.option("learning_rate", "1e-3")), "train.ema": config.ema,
            "train.max_grad_norm": 0.1, **self.preset(config),
        }  # fmt: skip

    def install(self, context: Context) -> None:
        """Adapters without zeros, the reward, and the order in which a patched run would train the samples."""
        import os

        os.environ["REHEARSAL_BASE"] = str(context.tree / "config" / "base.py")
        _random_adapters()
        masked = context.config.option("masked", "0") == "1"

        def replace(module: Any) -> None:
            module.multi_score = lambda device, weights: _reward(context, masked)

        after_import("flow_grpo.rewards", replace)
        after_import("flow_grpo.ema", _averages)
        config = context.config
        if not context.patched and (self.reordered(config) or context.variant == "native-regrouped"):
            updates = max(config.updates_per_rollout // int(config.option("inner_epochs", "1")), 1)
            first = config.generations // updates if self.reordered(config) else config.generations
            _order(first, updates if context.variant == "native-regrouped" else 0)

    def reordered(self, config: Config) -> bool:
        """The patched run trains the samples of the first batches first, unless one update trains all of them."""
        first = config.schedule != "recompute" and config.option("order", "held-first") == "held-first"
        return first and self.shuffled and config.updates_per_rollout > int(config.option("inner_epochs", "1"))

    def stand_ins(self, config: Config) -> tuple[str, ...]:
        """Besides what others need, the order of the samples."""
        return (*super().stand_ins(config), *(["reordered"] if self.reordered(config) else []))

    def flip_advantage(self, context: Context) -> None:
        """Those of the first batch that has some: the script clamps them symmetrically right before the loss."""
        import torch

        clamp, left = torch.clamp, self.trained(context.config)

        def flipping(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            nonlocal left
            out = clamp(tensor, *args, **kwargs)
            if left and args == (-CLIP_MAX, CLIP_MAX) and not tensor.requires_grad and tensor.any():
                left -= 1
                return -out
            return out

        torch.clamp = flipping  # type: ignore[assignment]

    def bound(self, config: Config) -> Bound:
        """Rows of kept graphs are put together anew where samples are shuffled, and ranks average at the boundary."""
        plain = super().bound(config)
        unshuffled = not self.shuffled or self.nothing_to_replay(config)
        if config.schedule == "recompute" or (unshuffled and config.ranks == 1):
            return plain
        return Bound(bitwise=False, rel_l2=self.tolerance)

    def regrouped(self, config: Config) -> tuple[Config, str] | None:
        """In bf16 a batch's part of a gradient is rounded, so it matters which samples share a batch."""
        if config.precision == "fp32" or self.bound(config).bitwise or not self.shuffled:
            return None
        return config, "in other batches of the same size"

    def notes(self, config: Config) -> list[str]:
        """What was done to the native runs so that both train the same samples."""
        if not self.reordered(config):
            return []
        return [
            "the patched tree moves the samples whose graphs it holds to the front of upstream's random order; the "
            "native runs are given that order, too, by a stand-in (order=upstream compares with upstream's own)"
        ]

    def not_tested(self, config: Config) -> list[str]:
        """The reward is a stand-in; so are the sizes."""
        return [
            "upstream's rewards (a deterministic stand-in scored the images)",
            "fp16, the precision of most of upstream's presets, and its gradient scaler; DeepSpeed; accelerate's FSDP",
        ]


def _odd_option(config: Config) -> str | None:
    """An option whose value would not mean what it says, or None."""
    for name, value in config.options:
        allowed = ALLOWED.get(name)
        if isinstance(allowed, tuple):
            if value not in allowed:
                return f"option {name}={value}: allowed are {', '.join(allowed)}"
        elif allowed is not None:
            try:
                bad = not allowed(value) >= (1 if allowed is int else 0)
            except ValueError:
                bad = True
            if bad:
                return f"option {name}={value}: a {'whole number from 1' if allowed is int else 'number from 0'}"
    return None


def random_window(script: FlowGRPO, config: Config) -> dict[str, Any]:
    """Entries of the preset for scripts that add noise in a window of the steps and train those."""
    return {
        "sample.sde_window_size": script.trained(config), "sample.sde_window_range": [0, config.steps - 1],
        "sample.sde_type": config.option("sde_type", "sde"),
    }  # fmt: skip


def _order(window: int, regrouped: int) -> None:
    """Changes upstream's permutation of the samples: rows below `window` come first, as in a patched run.

    With `regrouped`, the number of updates, each of them has its samples one place further on, so in other batches.
    """
    import torch

    draw: Any = torch.randperm

    def randperm(count: int, *args: Any, **kwargs: Any) -> Any:
        drawn = draw(count, *args, **kwargs)
        caller = sys._getframe(1)
        known = caller.f_locals
        if caller.f_code.co_name != "main" or "device" not in kwargs or known.get("inner_epoch"):
            return drawn
        rows = torch.where(known["mask"])[0] if "mask" in known else torch.arange(count)
        early = rows[drawn] < window
        ordered = torch.cat([drawn[early], drawn[~early]])
        return torch.cat([part.roll(1) for part in ordered.chunk(regrouped)]) if regrouped else ordered

    torch.randperm = randperm  # type: ignore[assignment]


def _averages(module: Any) -> None:
    """Averages move with each update, where upstream moves them with each eighth.

    Upstream sets the weights aside with `.cpu()`, which copies them off a GPU only: here averages would stay.
    """
    made, swap = module.EMAModuleWrapper.__init__, module.EMAModuleWrapper.copy_ema_to

    @functools.wraps(made)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        self.update_step_interval = 1

    @functools.wraps(swap)
    def copy_ema_to(self: Any, parameters: Any, store_temp: bool = True) -> None:
        parameters = list(parameters)
        weights = [parameter.detach().clone() for parameter in parameters]
        swap(self, parameters, store_temp)
        if store_temp:
            self.temp_stored_parameters = weights

    module.EMAModuleWrapper.__init__ = init
    module.EMAModuleWrapper.copy_ema_to = copy_ema_to


def _random_adapters(scale: float = 0.05) -> None:
    """B starts at zero, which makes the gradient of A zero: nothing would be compared there in the first update."""
    import peft
    import torch

    make: Any = peft.get_peft_model

    def get_peft_model(*args: Any, **kwargs: Any) -> Any:
        model = make(*args, **kwargs)
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
        return model

    peft.get_peft_model = get_peft_model


def _reward(context: Context, masked: bool) -> Any:
    """A fixed projection of each image's pixels, on a grid that hides rounding; of some prompts no use at all."""
    import torch

    def score(images: Any, prompts: Any, *metadata: Any, only_strict: bool = True) -> Any:
        pixels = torch.as_tensor(images).detach().double().flatten(1)
        weights = torch.sin(torch.arange(1, pixels.shape[1] + 1, dtype=torch.float64) * 12.9898)
        found = torch.sin((pixels @ weights) * 40 / math.sqrt(pixels.shape[1]))
        found = (found * 20).round() / 20
        if masked:
            found[torch.tensor([prompt in SAME for prompt in prompts])] = 0.5
        if only_strict:
            context.recorder.note("rewards", found)
        return {"avg": found.float().numpy()}, {}

    return score
