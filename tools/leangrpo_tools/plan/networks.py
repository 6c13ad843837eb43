"""Sizes of the networks that scripts train, as `patches/<Upstream>/plan.yaml` gives them."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Strict(BaseModel):
    """Data that is read from a file: unknown names and values of another kind are errors."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Model(Strict):
    """Sizes of the network that a script trains, for bytes by formula. Counts; `width` and tokens as in its blocks."""

    parameters: float
    patch: int
    """Pixels along each side of what becomes one token."""
    text_tokens: int
    """Text tokens that go through the blocks beside the image's."""
    largest_unit: float = 0.0
    """Parameters of the largest unit that is sharded on its own."""
    root_parameters: float = 0.0
    """Parameters outside all blocks."""
    blocks: int = 0
    width: int = 0
    image_token_bytes: float = 0.0
    """Without checkpointing: what autograd saves per image token and input."""
    text_token_bytes: float = 0.0
    call_bytes: float = 0.0
    """The same per call, whatever its size: 16-bit copies of frozen weights."""
    end_image_bytes: float = 0.0
    """With checkpointing: what is saved per image token outside all blocks, where that is known; per text token and per
    call the next two."""
    end_text_bytes: float = 0.0
    end_call_bytes: float = 0.0
    frames_per_latent: int = 1
    image_token_flops: float = 0.0
    """Floating-point operations of a forward per image token, attention's products of tokens left out."""
    text_token_flops: float = 0.0
    stored_bytes: int = 4
    """Of a weight, its gradient and each of its moments, on the rank that owns it."""


class Made(Strict):
    """A network of FLUX's kind that a launch file sizes, `layers` double blocks and twice as many single ones."""

    width: str
    """The flag of its width; the next is that of its layers, the one after a switch for 16-bit autocast."""
    layers: str
    sixteen_bit: str
    head: int
    channels: int
    image_tokens: int
    text_tokens: int
