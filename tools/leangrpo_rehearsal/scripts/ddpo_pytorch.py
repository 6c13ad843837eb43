"""ddpo-pytorch, `scripts/train.py`: Stable Diffusion through accelerate, several samples in each network call."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from leangrpo_rehearsal.base import Config, Context, Launch, Script
from leangrpo_rehearsal.importhook import after_import
from leangrpo_rehearsal.scripts import trl_ddpo
from leangrpo_rehearsal.scripts.dancegrpo_sd import StableDiffusion
from leangrpo_rehearsal.scripts.flowgrpo import CLIP_MAX, PRESET
from leangrpo_rehearsal.scripts.tiny import flip_clamped, score


class Train(trl_ddpo.Ddpo):
    """The pipeline of `tiny_sd`; sizes, options and bounds as for TRL's trainer, which was made from this code."""

    name = "train"
    path = "scripts/train.py"
    driver = ""
    preload = (*StableDiffusion.preload, "diffusers.models.attention_processor", "diffusers.utils.torch_utils")
    stubs = ("torchvision", "inflect", "bitsandbytes")
    synchronised = True
    replicated = True

    def supports(self, config: Config) -> str | None:
        """As TRL's."""
        if config.checkpointing:
            return "upstream's script has no switch for activation checkpointing"
        return super().supports(config)

    def prepare(self, workdir: Path, config: Config) -> None:
        """The pipeline to train, and the configuration file."""
        super().prepare(workdir, config)
        (workdir / "preset.py").write_text(PRESET)

    def launch(self, workdir: Path, config: Config) -> Launch:
        """Upstream's configuration file with everything small."""
        sample, train, epochs = trl_ddpo.batches(config)
        statistics = {"buffer_size": 16, "min_count": 2} if config.option("prompt_stats", "0") == "1" else None
        values: dict[str, Any] = {
            "pretrained.model": str(workdir / "model"), "seed": config.seed, "num_epochs": config.rollouts,
            "logdir": str(workdir / "logs"), "save_freq": 1000000, "use_lora": config.option("lora", "1") == "1",
            "mixed_precision": "no" if config.precision == "fp32" else config.precision,
            "prompt_fn": "simple_animals", "per_prompt_stat_tracking": statistics,
            "sample.num_steps": config.steps, "sample.batch_size": sample,
            "sample.num_batches_per_epoch": config.generations // sample, "train.batch_size": train,
            "train.gradient_accumulation_steps": trl_ddpo.window(config) // train, "train.num_inner_epochs": epochs,
            "train.timestep_fraction": config.fraction, "train.cfg": config.option("train_cfg", "1") == "1",
            "train.learning_rate": float(config.option("learning_rate", "1e-3")),
        }  # fmt: skip
        (workdir / "values.json").write_text(json.dumps(values))
        env = {"ACCELERATE_USE_CPU": "true", "REHEARSAL_VALUES": str(workdir / "values.json"), "TQDM_DISABLE": "1"}
        return Launch(["--config", str(workdir / "preset.py")], env)

    def install(self, context: Context) -> None:
        """What newer diffusers lacks, permutations of their own, recorded rewards."""
        from leangrpo_rehearsal.scripts import old_diffusers

        os.environ["REHEARSAL_BASE"] = str(context.tree / "config/base.py")
        old_diffusers.install()
        trl_ddpo.permutations(context.config.seed + context.rank)
        if context.config.precision != "fp32":
            _images_in_float32()

        def replace(module: Any) -> None:
            module.jpeg_compressibility = lambda: _reward(context)

        after_import("ddpo_pytorch.rewards", replace)

    def flip_advantage(self, context: Context) -> None:
        """Those of the first batch: the script clamps them symmetrically right before the loss."""
        flip_clamped(self.trained(context.config), CLIP_MAX)

    def nothing_to_replay(self, config: Config) -> str:
        """Without guidance in the update, or where accelerate's autocast reaches the update only."""
        if config.option("train_cfg", "1") != "1":
            return "the rollout uses guidance and the update does not"
        if config.precision != "fp32" and config.option("lora", "1") == "1":
            return "with LoRA, accelerate puts autocast around the update's calls and not around the rollout's"
        return ""

    def notes(self, config: Config) -> list[str]:
        """Also the stand-in for adapters."""
        said = super().notes(config)
        if config.option("lora", "1") == "1":
            said.append(
                "diffusers no longer has LoRAAttnProcessor: a stand-in with the same four adapters takes its place"
            )
        if config.precision == "bf16":
            said.append("upstream logs images through numpy, which has no bf16: a stand-in brings them to fp32")
        return said

    def not_tested(self, config: Config) -> list[str]:
        """Upstream's rewards, and its default precision."""
        return [
            "upstream's rewards (a deterministic stand-in scored the images)",
            "fp16 and its gradient scaler (upstream's default precision)",
            "per-prompt statistics over many rollouts, saving and resuming",
        ]


def _reward(context: Context) -> Any:
    """In place of the size of a JPEG file; float64, as that is."""

    def scored(images: Any, prompts: Any, metadata: Any) -> tuple[Any, dict[str, Any]]:
        rewards, found = score(images, prompts, metadata)
        context.recorder.note("rewards", rewards)
        return rewards.double().numpy(), found

    return scored


def _images_in_float32() -> None:
    from diffusers.image_processor import VaeImageProcessor

    original: Any = VaeImageProcessor.postprocess

    def postprocess(self: Any, *args: Any, **kwargs: Any) -> Any:
        return original(self, *args, **kwargs).float()

    VaeImageProcessor.postprocess = postprocess  # type: ignore[method-assign]


SCRIPT: Script = Train()
