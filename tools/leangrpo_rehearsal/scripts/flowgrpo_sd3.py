"""FlowGRPO, `scripts/train_sd3.py`: guidance in one call, samples filtered and shuffled, KL to the reference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from leangrpo_rehearsal.base import Config
from leangrpo_rehearsal.scripts import tiny_text
from leangrpo_rehearsal.scripts.flowgrpo import PRELOAD, FlowGRPO
from leangrpo_rehearsal.scripts.tiny import randomise


class Sd3(FlowGRPO):
    """Two blocks of width 32 on latents of 8 by 8; `size mid` is 6 blocks of width 256."""

    name = "sd3"
    path = "scripts/train_sd3.py"
    policy = ("diffusers:SD3Transformer2DModel",)
    preload = (
        *PRELOAD, "diffusers:StableDiffusion3Pipeline", "diffusers:SD3Transformer2DModel", "diffusers:AutoencoderKL",
        "diffusers:FlowMatchEulerDiscreteScheduler", "transformers:CLIPTextModelWithProjection",
    )  # fmt: skip
    options = (*FlowGRPO.options, "guidance", "size")

    def preset(self, config: Config) -> dict[str, Any]:
        """With guidance in rollout and update unless it is switched off."""
        guided = config.option("guidance", "1") == "1"
        return {"train.cfg": guided, "sample.guidance_scale": 4.5 if guided else 1.0}

    def pipeline(self, folder: Path, config: Config) -> None:
        """SD3 with three text encoders."""
        from diffusers import (
            AutoencoderKL,
            FlowMatchEulerDiscreteScheduler,
            SD3Transformer2DModel,
            StableDiffusion3Pipeline,
        )

        heads, layers = {"tiny": (2, 2), "mid": (16, 6), "large": (24, 6)}[config.option("size", "tiny")]
        transformer = SD3Transformer2DModel(
            sample_size=8, patch_size=1, in_channels=4, num_layers=layers, attention_head_dim=16,
            num_attention_heads=heads, joint_attention_dim=64, caption_projection_dim=16 * heads,
            pooled_projection_dim=64, out_channels=4, pos_embed_max_size=8,
        )  # fmt: skip
        randomise(transformer, 0.08 if heads == 2 else 0.03)
        # diffusers annotates these as tuples of one.
        down: Any = ("DownEncoderBlock2D",) * 3
        up: Any = ("UpDecoderBlock2D",) * 3
        channels: Any = (8, 8, 8)
        vae = AutoencoderKL(
            down_block_types=down, up_block_types=up, block_out_channels=channels, latent_channels=4,
            norm_num_groups=2, sample_size=32, shift_factor=0.06, scaling_factor=1.5,
        )  # fmt: skip
        parts: dict[str, Any] = {
            "transformer": transformer, "vae": vae, "scheduler": FlowMatchEulerDiscreteScheduler(shift=3.0),
            "text_encoder": tiny_text.clip_encoder(projection=True),
            "text_encoder_2": tiny_text.clip_encoder(projection=True), "text_encoder_3": tiny_text.t5_encoder(),
            "tokenizer": tiny_text.clip_tokenizer(folder.parent / "words"),
            "tokenizer_2": tiny_text.clip_tokenizer(folder.parent / "words"), "tokenizer_3": tiny_text.t5_tokenizer(),
        }  # fmt: skip
        StableDiffusion3Pipeline(**parts).save_pretrained(folder)


SCRIPT = Sd3()
