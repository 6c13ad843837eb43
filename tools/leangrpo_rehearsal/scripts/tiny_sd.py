"""A tiny Stable Diffusion pipeline: latents of 8 by 8, a UNet of one level, a text encoder that knows letters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from leangrpo_rehearsal.scripts.tiny import randomise

TOKENS, WIDTH = 16, 32


def write(folder: Path, words: Path) -> None:
    """Writes the pipeline as `from_pretrained` reads it; the tokenizer's vocabulary goes to `words`."""
    from diffusers import AutoencoderKL, DDIMScheduler, StableDiffusionPipeline, UNet2DConditionModel
    from transformers import CLIPTextConfig, CLIPTextModel

    unet = UNet2DConditionModel(
        sample_size=8, down_block_types=("CrossAttnDownBlock2D",), up_block_types=("CrossAttnUpBlock2D",),
        block_out_channels=(32,), layers_per_block=1, cross_attention_dim=WIDTH, attention_head_dim=8,
        norm_num_groups=8,
    )  # fmt: skip
    randomise(unet)
    # diffusers annotates these as tuples of one.
    down: Any = ("DownEncoderBlock2D",) * 2
    up: Any = ("UpDecoderBlock2D",) * 2
    channels: Any = (16, 16)
    vae = AutoencoderKL(
        down_block_types=down, up_block_types=up, block_out_channels=channels, latent_channels=4, norm_num_groups=8
    )
    text = CLIPTextConfig(
        hidden_size=WIDTH, intermediate_size=37, num_attention_heads=4, num_hidden_layers=2, vocab_size=64,
        max_position_embeddings=TOKENS, bos_token_id=0, eos_token_id=1, pad_token_id=1,
    )  # fmt: skip
    scheduler = DDIMScheduler(
        beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", clip_sample=False,
        set_alpha_to_one=False, steps_offset=1,
    )  # fmt: skip
    parts: dict[str, Any] = {
        "unet": unet, "vae": vae, "text_encoder": CLIPTextModel(text), "tokenizer": _tokenizer(words),
        "scheduler": scheduler, "safety_checker": None, "feature_extractor": None,
    }  # fmt: skip
    StableDiffusionPipeline(**parts, requires_safety_checker=False).save_pretrained(folder)


def _tokenizer(folder: Path) -> Any:
    from transformers import CLIPTokenizer

    letters = [chr(code) for code in range(ord("a"), ord("z") + 1)]
    vocabulary = ["<|startoftext|>", "<|endoftext|>", *letters, *(f"{letter}</w>" for letter in letters)]
    folder.mkdir()
    (folder / "vocab.json").write_text(json.dumps({word: number for number, word in enumerate(vocabulary)}))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    return CLIPTokenizer(str(folder / "vocab.json"), str(folder / "merges.txt"), model_max_length=TOKENS)
