"""DanceGRPO, `fastvideo/train_grpo_flux.py`: FSDP1, optional EMA, several updates per rollout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from leangrpo_rehearsal.base import Config, Launch
from leangrpo_rehearsal.scripts.dancegrpo import (
    PRELOAD,
    TEXT_DIM,
    TEXT_TOKENS,
    DanceGRPO,
    settings,
    write_prompts,
)
from leangrpo_rehearsal.scripts.tiny import save


class Flux(DanceGRPO):
    """Two double and three single blocks of width 32 (option `width`: a multiple of 16), a VAE with 16 channels."""

    name = "flux"
    path = "fastvideo/train_grpo_flux.py"
    policy = ("diffusers:FluxTransformer2DModel",)
    preload = (*PRELOAD, "diffusers:FluxTransformer2DModel", "diffusers:AutoencoderKL")
    options = (*DanceGRPO.options, "width")
    skipped_batches = 0

    def prepare(self, workdir: Path, config: Config) -> None:
        """Transformer, VAE, prompts."""
        from diffusers import AutoencoderKL, FluxTransformer2DModel

        transformer = FluxTransformer2DModel(
            patch_size=1, in_channels=64, num_layers=2, num_single_layers=3, attention_head_dim=16,
            num_attention_heads=int(config.option("width", "32")) // 16, joint_attention_dim=TEXT_DIM,
            pooled_projection_dim=TEXT_DIM, guidance_embeds=True, axes_dims_rope=(4, 6, 6),
        )  # fmt: skip
        save(transformer, workdir / "model/transformer")
        # diffusers annotates these as tuples of one.
        down: Any = ("DownEncoderBlock2D",) * 4
        up: Any = ("UpDecoderBlock2D",) * 4
        channels: Any = (4, 4, 4, 4)
        vae = AutoencoderKL(
            in_channels=3, out_channels=3, down_block_types=down, up_block_types=up, block_out_channels=channels,
            layers_per_block=1, latent_channels=16, norm_num_groups=2, sample_size=1024,  # so it decodes in one tile
        )  # fmt: skip
        vae.save_pretrained(workdir / "model/vae")
        write_prompts(workdir, config, {
            "prompt_embed": ("prompt_embed_path", (TEXT_TOKENS, TEXT_DIM)),
            "pooled_prompt_embeds": ("pooled_prompt_embeds_path", (TEXT_DIM,)),
            "text_ids": ("text_ids", (3,)),
        }, self.skipped_batches)  # fmt: skip

    def launch(self, workdir: Path, config: Config) -> Launch:
        """As `scripts/finetune/finetune_flux_grpo_8gpus.sh`."""
        argv = self.launch_arguments(workdir, config)
        return Launch(argv + (["--use_ema", "--ema_decay", "0.995"] if config.ema else []), settings(config))


SCRIPT = Flux()
