"""DanceGRPO, `fastvideo/train_grpo_qwenimage.py`: FSDP1 with bf16 weights and reductions over fp32 master weights."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from leangrpo_rehearsal.base import Config, Context, Launch
from leangrpo_rehearsal.scripts.dancegrpo import (
    PRELOAD,
    TEXT_DIM,
    TEXT_TOKENS,
    DanceGRPO,
    settings,
    write_masks,
    write_prompts,
)
from leangrpo_rehearsal.scripts.tiny import save

PADDED = 3
"""Tokens of padding behind a prompt's own."""


class QwenImage(DanceGRPO):
    """Two blocks of width 32, a VAE with 16 latent channels, prompts of unequal length."""

    name = "qwenimage"
    path = "fastvideo/train_grpo_qwenimage.py"
    policy = ("diffusers:QwenImageTransformer2DModel",)
    preload = (*PRELOAD, "diffusers:QwenImageTransformer2DModel", "diffusers:AutoencoderKLQwenImage")

    def checkpoints(self, config: Config) -> bool:
        """Upstream's script checkpoints with and without the flag."""
        return True

    def prepare(self, workdir: Path, config: Config) -> None:
        """Transformer, VAE, prompts."""
        from diffusers import AutoencoderKLQwenImage, QwenImageTransformer2DModel

        transformer = QwenImageTransformer2DModel(
            patch_size=2, in_channels=64, out_channels=16, num_layers=2, attention_head_dim=16, num_attention_heads=2,
            joint_attention_dim=TEXT_DIM, axes_dims_rope=(4, 6, 6),
        )  # fmt: skip
        save(transformer, workdir / "model/transformer")
        vae = AutoencoderKLQwenImage(base_dim=4, z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=1)
        save(vae, workdir / "model/vae", scale=0.5)  # as it comes, all images are nearly the same grey
        write_prompts(workdir, config, {
            "prompt_embed": ("prompt_embed_path", (TEXT_TOKENS + PADDED, TEXT_DIM)),
            "prompt_attention_mask": ("prompt_attention_mask", (TEXT_TOKENS + PADDED,)),
            **self.images,
        })  # fmt: skip
        write_masks(workdir / "data", TEXT_TOKENS + PADDED, TEXT_TOKENS, **self.sizes)

    images: dict[str, tuple[str, tuple[int, ...]]] = {}  # noqa: RUF012 (never changed)
    """Further folders of the data set, as for `write_prompts`."""
    sizes: dict[str, int] = {}  # noqa: RUF012 (never changed)
    """Further numbers in each of its rows."""

    def launch(self, workdir: Path, config: Config) -> Launch:
        """As the launch file in `scripts/finetune`."""
        argv = [*self.launch_arguments(workdir, config), "--w", "32", "--selective_checkpointing", "1.0"]
        return Launch(argv + (["--use_ema", "--ema_decay", "0.995"] if config.ema else []), settings(config))

    def install(self, context: Context) -> None:
        """The reward, the lengths that newer versions of diffusers read off the prompt, and fp32 where rehearsed."""
        super().install(context)
        take_text_lengths()
        if context.config.precision == "fp32":
            context.after_import("fsdp_util_qwenimage", _in_float32)

    def not_tested(self, config: Config) -> list[str]:
        """In fp32 FSDP's own precision is another one."""
        found = super().not_tested(config)
        return [*found, "FSDP's bf16 weights and reductions"] if config.precision == "fp32" else found


def take_text_lengths() -> None:
    """Upstream's version of diffusers takes `txt_seq_lens`; newer ones know it from the prompt. Checks that it fits."""
    import inspect

    from diffusers import QwenImageTransformer2DModel

    original: Any = QwenImageTransformer2DModel.forward
    signature = inspect.signature(original)
    if "txt_seq_lens" in signature.parameters:
        return

    @functools.wraps(original)
    def forward(self: Any, *args: Any, txt_seq_lens: Any = None, **kwargs: Any) -> Any:
        if txt_seq_lens is not None and int(max(txt_seq_lens)) != kwargs["encoder_hidden_states"].shape[1]:
            raise ValueError(
                f"txt_seq_lens is {txt_seq_lens}, but the prompt is {kwargs['encoder_hidden_states'].shape}"
            )
        return original(self, *args, **kwargs)

    lengths = inspect.Parameter("txt_seq_lens", inspect.Parameter.KEYWORD_ONLY, default=None)
    forward.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[*signature.parameters.values(), lengths]
    )
    QwenImageTransformer2DModel.forward = forward  # type: ignore[method-assign]


def _in_float32(module: Any) -> None:
    """FSDP's weights, reductions and inputs in fp32 instead of bf16."""
    import torch

    single: Any = torch.float32
    module.MixedPrecision = functools.partial(_only, module.MixedPrecision, single)


def _only(precision: Any, dtype: Any, **kwargs: Any) -> Any:
    return precision(**dict.fromkeys(kwargs, dtype))


SCRIPT = QwenImage()
