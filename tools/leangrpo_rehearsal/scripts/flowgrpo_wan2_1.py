"""FlowGRPO, `scripts/train_wan2_1.py`: videos, guidance in two calls, several samples per prompt, KL reward."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from leangrpo_rehearsal.base import Config, Context
from leangrpo_rehearsal.scripts import tiny_text
from leangrpo_rehearsal.scripts.flowgrpo import PRELOAD, FlowGRPO
from leangrpo_rehearsal.scripts.tiny import randomise

FRAMES, CHANNELS = 5, 4
"""Frames of a video, and channels of its latents, which have 2 frames of 4 by 4."""


class Wan(FlowGRPO):
    """Two blocks of width 32. Upstream skips two epochs before the first rollout."""

    name = "wan2_1"
    path = "scripts/train_wan2_1.py"
    policy = ("diffusers:WanTransformer3DModel",)
    preload = (
        *PRELOAD, "diffusers:WanPipeline", "diffusers:WanTransformer3DModel", "diffusers:AutoencoderKLWan",
        "diffusers:UniPCMultistepScheduler", "transformers:UMT5EncoderModel",
    )  # fmt: skip
    options = (*FlowGRPO.options, "guidance", "repeat", "kl_reward")
    tolerance = 5e-5
    """Rows of other calls come together in the update, and guidance enlarges how differently a kernel then rounds."""

    def misfit(self, config: Config) -> str | None:
        """What upstream's script cannot do, besides the sizes."""
        batch, repeat = int(config.option("batch", "2")), int(config.option("repeat", "1"))
        kl_reward = float(config.option("kl_reward", "0")) > 0
        if kl_reward and config.option("guidance", "1") == "1" and batch > 1:
            return "upstream's KL reward fails with guidance for batches of more than one video; guidance 0 or batch 1"
        if kl_reward and config.option("lora", "1") != "1":
            return "upstream's KL reward needs LoRA: the reference is the network without its adapter"
        if config.generations % (batch * repeat):
            return f"{repeat} batches of {batch} for each draw of prompts do not divide {config.generations} samples"
        return super().misfit(config)

    def nothing_to_replay(self, config: Config) -> str:
        """Under bf16 the prompt's embedding has equal values in another precision, which does not count by default."""
        if config.precision == "fp32" or config.option("inputs", "exact") == "rounded":
            return ""
        return (
            "the rollout hands the network the prompt's embedding in fp32, the update in bf16 (inputs=rounded replays)"
        )

    def checkpoints(self, config: Config) -> bool:
        """Upstream always does."""
        return True

    def preset(self, config: Config) -> dict[str, Any]:
        """Sizes, and what only this script knows. Prompts are drawn once for `repeat` batches."""
        guided = config.option("guidance", "1") == "1"
        batch, repeat = int(config.option("batch", "2")), int(config.option("repeat", "1"))
        return {
            "height": 32, "width": 32, "frames": FRAMES, "train.cfg": guided,
            "sample.guidance_scale": 4.5 if guided else 1.0,
            "sample.kl_reward": float(config.option("kl_reward", "0")), "sample.sample_time_per_prompt": repeat,
            "sample.num_batches_per_epoch": config.generations // (batch * repeat),
        }  # fmt: skip

    def pipeline(self, folder: Path, config: Config) -> None:
        """Wan with a text encoder of two layers."""
        from diffusers import AutoencoderKLWan, UniPCMultistepScheduler, WanPipeline, WanTransformer3DModel

        transformer = WanTransformer3DModel(
            patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=16, in_channels=CHANNELS,
            out_channels=CHANNELS, text_dim=tiny_text.WIDTH, freq_dim=32, ffn_dim=64, num_layers=2, rope_max_seq_len=32,
        )  # fmt: skip
        randomise(transformer)
        vae = AutoencoderKLWan(
            base_dim=4, z_dim=CHANNELS, dim_mult=[1, 1, 1, 1], num_res_blocks=1, latents_mean=[0.0] * CHANNELS,
            latents_std=[1.0] * CHANNELS,
        )  # fmt: skip
        parts: dict[str, Any] = {
            "transformer": transformer, "vae": vae, "text_encoder": tiny_text.umt5_encoder(),
            "tokenizer": tiny_text.t5_tokenizer(),
            "scheduler": UniPCMultistepScheduler(
                prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
            ),
        }  # fmt: skip
        WanPipeline(**parts).save_pretrained(folder)

    def install(self, context: Context) -> None:
        """And videos that are not written."""
        super().install(context)
        video: Any = importlib.import_module("imageio")  # installed, or a stub
        video.mimsave = lambda *args, **kwargs: None

    def not_tested(self, config: Config) -> list[str]:
        """Nor are videos."""
        return [*super().not_tested(config), "writing videos"]


SCRIPT = Wan()
