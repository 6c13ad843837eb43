"""DanceGRPO, `fastvideo/train_grpo_sd.py`: Stable Diffusion through accelerate, batches, a configuration file."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from leangrpo_rehearsal.base import Bound, Config, Context, Launch
from leangrpo_rehearsal.scripts import tiny_sd
from leangrpo_rehearsal.scripts.dancegrpo import DanceGRPO
from leangrpo_rehearsal.scripts.flowgrpo import PRELOAD, PRESET, PROMPTS

STUBS = ("torchvision", "wandb", "hpsv3", "bitsandbytes", "pandas", "datasets", "trl", "liger_kernel", "flash_attn")


class StableDiffusion(DanceGRPO):
    """The pipeline of `tiny_sd`, full weights; `batch` samples in each network call."""

    name = "sd"
    path = "fastvideo/train_grpo_sd.py"
    policy = ("diffusers:UNet2DConditionModel",)
    preload = (*PRELOAD, "transformers:CLIPTextModel", "diffusers:StableDiffusionPipeline", "diffusers:DDIMScheduler",
               "diffusers.loaders:AttnProcsLayers")  # fmt: skip
    stubs = STUBS
    folders = ("assets", "images_same")
    options = ("learning_rate", "batch", "train_cfg", "inner_epochs")
    defaults = {"generations": 8}  # noqa: RUF012 (never changed)
    replicated = True

    def supports(self, config: Config) -> str | None:
        """Batches fit into updates; in low precision they hold one sample."""
        batch = config.option("batch", "2")
        if batch not in ("1", "2"):
            return f"batch is {batch}: one sample, or two"
        if config.precision != "fp32" and batch != "1":
            return "in bf16 only batches of one sample are compared (--option batch=1): kernels round by their number"
        if config.ema or config.checkpointing:
            return "upstream's sd script has neither EMA nor activation checkpointing"
        epochs = config.option("inner_epochs", "1")
        if not epochs.isdecimal() or config.updates_per_rollout % max(int(epochs), 1):
            return f"inner_epochs is {epochs}: a number that divides the updates per rollout"
        if config.generations % 4 or config.generations % (config.updates_per_rollout // int(epochs) * int(batch)):
            return f"groups of four and batches of {batch} have to divide the samples of an update"
        return super().supports(config)

    def prepare(self, workdir: Path, config: Config) -> None:
        """Pipeline, prompts and the configuration file."""
        tiny_sd.write(workdir / "data/stable-diffusion-v1-4", workdir / "words")
        wanted = config.generations // 4 * config.ranks * config.rollouts
        prompts = [PROMPTS[index % len(PROMPTS)] for index in range(wanted)]
        (workdir / "assets/prompts.txt").write_text("\n".join(prompts) + "\n")
        (workdir / "preset.py").write_text(PRESET)

    def launch(self, workdir: Path, config: Config) -> Launch:
        """As `scripts/finetune/finetune_sd_grpo.sh`, with a configuration of our own."""
        batch, epochs = int(config.option("batch", "2")), int(config.option("inner_epochs", "1"))
        values: dict[str, Any] = {
            "seed": config.seed, "num_epochs": config.rollouts, "save_freq": 1000000, "logdir": str(workdir / "logs"),
            "mixed_precision": "no" if config.precision == "fp32" else config.precision, "reward_fn": "hpsv2",
            "num_generations": 4, "sample.num_steps": config.steps, "sample.batch_size": config.generations // 4,
            "train.batch_size": batch, "train.num_inner_epochs": epochs,
            "train.gradient_accumulation_steps": config.generations * epochs // config.updates_per_rollout // batch,
            "train.learning_rate": float(config.option("learning_rate", "1e-3")), "train.max_grad_norm": 0.1,
            "train.cfg": config.option("train_cfg", "1") == "1", "train.timestep_fraction": config.fraction,
        }  # fmt: skip
        (workdir / "values.json").write_text(json.dumps(values))
        env = {"ACCELERATE_USE_CPU": "true", "REHEARSAL_VALUES": str(workdir / "values.json"), "TQDM_DISABLE": "1"}
        return Launch(["--config", str(workdir / "preset.py")], env)

    def install(self, context: Context) -> None:
        """Also small latents, and permutations of their own."""
        os.environ["REHEARSAL_BASE"] = str(context.tree / "fastvideo/config_sd/base.py")
        from leangrpo_rehearsal.scripts.trl_ddpo import permutations

        super().install(context)
        permutations(context.config.seed + context.rank)
        _small_latents(context.config.precision == "fp32")

    def bound(self, config: Config) -> Bound:
        """Each sample of a batch is at a step of its own, so rows of kept graphs are put together anew; ranks average
        once per update."""
        plain = super().bound(config)
        if config.schedule == "recompute" or (config.ranks == 1 and config.option("batch", "2") == "1"):
            return plain
        return Bound(bitwise=False, rel_l2=1e-5)

    def nothing_to_replay(self, config: Config) -> str:
        """Without guidance in the update."""
        return "" if config.option("train_cfg", "1") == "1" else "the rollout uses guidance and the update does not"

    def notes(self, config: Config) -> list[str]:
        """What upstream rounds, and what the stand-in does to random numbers."""
        from leangrpo_rehearsal.scripts.trl_ddpo import numbers_and_rounding

        return numbers_and_rounding(config)


def _small_latents(single: bool) -> None:
    """Upstream draws the first latent with 64 by 64 places, in bf16; the tiny network has 8 by 8, and in fp32 nothing
    would cast them."""
    import torch

    randn: Any = torch.randn

    def small(*size: Any, **how: Any) -> Any:
        if size != ((1, 4, 64, 64),):
            return randn(*size, **how)
        return randn((1, 4, 8, 8), **(how | ({"dtype": torch.float32} if single else {})))

    torch.randn = small  # type: ignore[assignment]


SCRIPT = StableDiffusion()
