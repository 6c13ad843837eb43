"""FlowGRPO, `scripts/train_qwenimage.py`: FSDP1 of its own around network and text encoder, guidance in one call."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

from leangrpo_rehearsal.base import Bound, Config, Context
from leangrpo_rehearsal.scripts import tiny_text
from leangrpo_rehearsal.scripts.dancegrpo_qwenimage import take_text_lengths
from leangrpo_rehearsal.scripts.flowgrpo import PRELOAD, FlowGRPO
from leangrpo_rehearsal.scripts.tiny import randomise

CHANNELS = 16


class QwenImage(FlowGRPO):
    """Two blocks of width 32 on latents of 4 by 4, which make 4 tokens; a text encoder of two layers."""

    name = "qwenimage"
    path = "scripts/train_qwenimage.py"
    kind = "QwenImagePipeline"
    policy = ("diffusers:QwenImageTransformer2DModel",)
    preload = (
        *PRELOAD, "diffusers:DiffusionPipeline", "diffusers:QwenImagePipeline", "diffusers:QwenImageTransformer2DModel",
        "diffusers:AutoencoderKLQwenImage", "diffusers:FlowMatchEulerDiscreteScheduler",
        "transformers:Qwen2_5_VLForConditionalGeneration",
    )  # fmt: skip
    options = (*FlowGRPO.options, "window", "offload")
    shuffled = False
    replicated = False

    def misfit(self, config: Config) -> str | None:
        """What upstream's script cannot do, besides the sizes."""
        if config.ema:
            return "upstream's script has no EMA"
        inner = int(config.option("inner_epochs", "1"))
        if config.updates_per_rollout % inner:
            return f"each of {inner} passes over the samples must end with an update"
        return super().misfit(dataclasses.replace(config, checkpointing=False))

    def trained(self, config: Config) -> int:
        """As many as in the random window, or all steps but the last."""
        return super().trained(config) if config.option("window", "1") == "1" else config.steps - 1

    def preset(self, config: Config) -> dict[str, Any]:
        """The window holds the trained steps; without one upstream trains all but the last."""
        windowed = config.option("window", "1") == "1"
        return {
            "sample.sde_window_size": self.trained(config) if windowed else 0,
            "sample.sde_window_range": [0, config.steps - 1], "sample.guidance_scale": 4.0,
            "activation_checkpointing": config.checkpointing,
            "fsdp_optimizer_offload": config.option("offload", "0") == "1",
        }  # fmt: skip

    def pipeline(self, folder: Path, config: Config) -> None:
        """The pipeline of `kind`."""
        import diffusers

        transformer = diffusers.QwenImageTransformer2DModel(
            patch_size=2, in_channels=4 * CHANNELS, out_channels=CHANNELS, num_layers=2, attention_head_dim=16,
            num_attention_heads=2, joint_attention_dim=tiny_text.WIDTH, axes_dims_rope=(4, 6, 6),
        )  # fmt: skip
        randomise(transformer)
        vae = diffusers.AutoencoderKLQwenImage(base_dim=4, z_dim=CHANNELS, dim_mult=[1, 1, 1, 1], num_res_blocks=1)
        randomise(vae, 0.5)  # as it comes, all images are nearly the same grey
        parts: dict[str, Any] = {
            "transformer": transformer, "vae": vae, "text_encoder": _text_encoder(),
            "tokenizer": tiny_text.t5_tokenizer(),
            "scheduler": diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True),
            **self.parts,
        }  # fmt: skip
        getattr(diffusers, self.kind)(**parts).save_pretrained(folder)

    parts: dict[str, Any] = {}  # noqa: RUF012 (never changed)
    """Further parts of the pipeline."""

    def install(self, context: Context) -> None:
        """What newer versions of diffusers and transformers do otherwise, and ranks with noise of their own."""
        super().install(context)
        take_text_lengths()
        _full_masks(self.kind)
        _whole_ids()
        _noise_by_rank(context.rank)

    def bound(self, config: Config) -> Bound:
        """FSDP reduces after each backward, as natively, so nothing is added up otherwise unless it is told to."""
        return super(FlowGRPO, self).bound(config)

    def not_tested(self, config: Config) -> list[str]:
        """FSDP's precision is the rehearsal's."""
        return ["upstream's rewards (a deterministic stand-in scored the images)", "fp16"]


def _text_encoder() -> Any:
    """Two layers of width 32, and a picture encoder that nothing asks."""
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    width = tiny_text.WIDTH
    text = {
        "hidden_size": width, "intermediate_size": 37, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 2, "vocab_size": 64, "max_position_embeddings": 1024,
        "rope_scaling": {"type": "default", "mrope_section": [2, 3, 3]},
    }  # fmt: skip
    seen = {
        "depth": 1, "hidden_size": width, "num_heads": 2, "intermediate_size": 37, "out_hidden_size": width,
        "patch_size": 14, "fullatt_block_indexes": [0],
    }  # fmt: skip
    kind: Any = Qwen2_5_VLConfig
    config = kind(text_config=text, vision_config=seen)
    if not hasattr(config, "vision_start_token_id"):  # transformers 4.56 reads it and has no default
        config.vision_start_token_id = 60
    return Qwen2_5_VLForConditionalGeneration(config)


def _full_masks(kind: str) -> None:
    """Newer versions of diffusers leave out a mask that masks nothing; upstream reads the prompts' lengths off it."""
    import diffusers
    import torch

    pipeline: Any = getattr(diffusers, kind)
    encode = pipeline.encode_prompt

    @functools.wraps(encode)
    def encode_prompt(self: Any, *args: Any, **kwargs: Any) -> Any:
        embeds, mask = encode(self, *args, **kwargs)
        return embeds, torch.ones(embeds.shape[:2], dtype=torch.long) if mask is None else mask

    pipeline.encode_prompt = encode_prompt


def _whole_ids() -> None:
    """Lets the tokenizer decode the floating-point ids that the script hands it, as transformers 4 does."""
    import numpy
    from transformers import PreTrainedTokenizerFast

    tokenizer: Any = PreTrainedTokenizerFast
    decode = tokenizer.batch_decode

    def batch_decode(self: Any, ids: Any, *args: Any, **kwargs: Any) -> Any:
        return decode(self, numpy.asarray(ids).astype(int), *args, **kwargs)

    tokenizer.batch_decode = batch_decode


def _noise_by_rank(rank: int) -> None:
    """The script seeds each GPU by its rank, if there is one."""
    import torch

    seed: Any = torch.manual_seed

    def manual_seed(value: int) -> Any:
        generator = seed(value)
        torch.cuda.manual_seed_all(value + rank)
        return generator

    torch.manual_seed = manual_seed


SCRIPT = QwenImage()
