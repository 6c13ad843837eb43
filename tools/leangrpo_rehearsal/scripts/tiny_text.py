"""Tokenizers and text encoders that know letters, as pipelines with CLIP and T5 load them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

CLIP_TOKENS, WIDTH = 77, 32
_LETTERS = [chr(code) for code in range(ord("a"), ord("z") + 1)]


def clip_tokenizer(words: Path, tokens: int = CLIP_TOKENS) -> Any:
    """Byte pairs without merges: each letter is a token. Its vocabulary is written to `words`."""
    from transformers import CLIPTokenizer

    vocabulary = ["<|startoftext|>", "<|endoftext|>", *_LETTERS, *(f"{letter}</w>" for letter in _LETTERS)]
    words.mkdir(exist_ok=True)
    (words / "vocab.json").write_text(json.dumps({word: number for number, word in enumerate(vocabulary)}))
    (words / "merges.txt").write_text("#version: 0.2\n")
    return CLIPTokenizer(str(words / "vocab.json"), str(words / "merges.txt"), model_max_length=tokens)


def clip_encoder(tokens: int = CLIP_TOKENS, projection: bool = False) -> Any:
    """Two layers of width 32; with `projection` its pooled output is projected to 32."""
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

    config = CLIPTextConfig(
        hidden_size=WIDTH, intermediate_size=37, num_attention_heads=4, num_hidden_layers=2, vocab_size=64,
        max_position_embeddings=tokens, bos_token_id=0, eos_token_id=1, pad_token_id=1, projection_dim=WIDTH,
    )  # fmt: skip
    return CLIPTextModelWithProjection(config) if projection else CLIPTextModel(config)


def t5_tokenizer(tokens: int = 512) -> Any:
    """Each word is unknown or a single letter, so different prompts have different lengths."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: number for number, word in enumerate(["<pad>", "</s>", "<unk>", *_LETTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>", model_max_length=tokens
    )


def t5_encoder(width: int = 2 * WIDTH) -> Any:
    """Two layers."""
    from transformers import T5Config, T5EncoderModel

    return T5EncoderModel(
        T5Config(vocab_size=64, d_model=width, d_kv=8, d_ff=37, num_layers=2, num_heads=4, is_encoder_decoder=False)
    )


def umt5_encoder(width: int = WIDTH) -> Any:
    """Two layers."""
    from transformers import UMT5Config, UMT5EncoderModel

    return UMT5EncoderModel(
        UMT5Config(vocab_size=64, d_model=width, d_kv=8, d_ff=37, num_layers=2, num_heads=4, is_encoder_decoder=False)
    )
