"""DanceGRPO, `fastvideo/train_grpo_wan_2_1.py`: no wrapper, no gradient synchronisation, guidance in a doubled call."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from leangrpo_rehearsal.base import Config, Context, Launch
from leangrpo_rehearsal.scripts.dancegrpo import (
    PRELOAD,
    TEXT_DIM,
    TEXT_TOKENS,
    DanceGRPO,
    settings,
    write_prompts,
)
from leangrpo_rehearsal.scripts.tiny import save
from leangrpo_rehearsal.scripts.videos import videos_in_memory


class Wan(DanceGRPO):
    """Two blocks of width 32, a one-frame video."""

    name = "wan_2_1"
    path = "fastvideo/train_grpo_wan_2_1.py"
    policy = ("diffusers:WanTransformer3DModel",)
    synchronised = False
    preload = (*PRELOAD, "diffusers:WanTransformer3DModel", "diffusers:AutoencoderKLWan")
    needs = (("diffusers", "0.35"),)  # the VAE of 0.33 has no tiling, which the script switches on

    def supports(self, config: Config) -> str | None:
        """Upstream's script has no EMA."""
        return "upstream's wan_2_1 script has no EMA" if config.ema else super().supports(config)

    def prepare(self, workdir: Path, config: Config) -> None:
        """Transformer, VAE, prompts."""
        from diffusers import AutoencoderKLWan, WanTransformer3DModel

        transformer = WanTransformer3DModel(
            patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=16, in_channels=16, out_channels=16,
            text_dim=TEXT_DIM, freq_dim=32, ffn_dim=64, num_layers=2, rope_max_seq_len=32,
        )  # fmt: skip
        save(transformer, workdir / "model/transformer")
        vae = AutoencoderKLWan(base_dim=4, z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=1)
        vae.save_pretrained(workdir / "model/vae")
        write_prompts(workdir, config, {
            "prompt_embed": ("prompt_embed_path", (TEXT_TOKENS, TEXT_DIM)),
            "negative_prompt_embeds": ("negative_prompt_embeds_path", (TEXT_TOKENS, TEXT_DIM)),
        })  # fmt: skip

    def launch(self, workdir: Path, config: Config) -> Launch:
        """As `scripts/finetune/finetune_wan_2_1_grpo.sh`."""
        argv = [*self.launch_arguments(workdir, config), "--cfg_infer", config.option("guidance", "5.0")]
        return Launch(argv, settings(config))

    options = (*DanceGRPO.options, "guidance")

    def install(self, context: Context) -> None:
        """The reward, and videos that stay in memory."""
        super().install(context)
        videos_in_memory()
        if context.config.precision == "fp32":
            _inputs_in_float32()

    def known_reasons(self, config: Config) -> tuple[str, ...]:
        """The first latent is drawn in bf16 and kept in fp32, which without autocast are other inputs."""
        return () if config.precision == "bf16" else ("but for rounding: hidden_states",)

    def not_tested(self, config: Config) -> list[str]:
        """Video files are not written."""
        return [*super().not_tested(config), "writing and reading the video file (the first frame stayed in memory)"]


def _inputs_in_float32() -> None:
    """The script draws its first latents in bf16; without autocast nothing would cast them."""
    import functools

    import torch
    from diffusers import WanTransformer3DModel

    original = WanTransformer3DModel.forward

    def cast(value: Any) -> Any:
        return value.float() if isinstance(value, torch.Tensor) and value.dtype == torch.bfloat16 else value

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return original(self, *map(cast, args), **{name: cast(value) for name, value in kwargs.items()})

    WanTransformer3DModel.forward = forward  # type: ignore[method-assign]


SCRIPT = Wan()
