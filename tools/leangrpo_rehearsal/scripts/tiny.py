"""Tiny networks in which no gradient hides behind zeros."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def randomise(model: Any, scale: float = 0.08) -> None:
    """Draws every parameter: fresh models start with zeros that hide gradients."""
    import torch

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            offset = 1.0 if "norm" in name and name.endswith("weight") else 0.0
            parameter.normal_(offset, scale)


def save(model: Any, path: Path, scale: float = 0.08) -> None:
    """Saves a model with every parameter random."""
    randomise(model, scale)
    model.save_pretrained(path)


def random_adapters(scale: float = 0.08) -> None:
    """B starts at zero, which makes the gradient of A zero: nothing would be compared there in the first update.

    Wraps diffusers' `add_adapter`, so that every B is drawn, the same on each rank and in each run.
    """
    import torch
    from diffusers.loaders.peft import PeftAdapterMixin

    original: Any = PeftAdapterMixin.add_adapter

    def add_adapter(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if "lora_B" in name:
                    parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)

    PeftAdapterMixin.add_adapter = add_adapter  # type: ignore[method-assign]


def flip_clamped(left: int, most: float) -> None:
    """Turns the sign of the first `left` tensors without a graph that are clamped to [-most, most]: advantages."""
    import torch

    clamp = torch.clamp

    def flipping(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal left
        out = clamp(tensor, *args, **kwargs)
        if left and args == (-most, most) and not tensor.requires_grad:
            left -= 1
            return -out
        return out

    torch.clamp = flipping  # type: ignore[assignment]


def score(images: Any, words: Sequence[str], metadata: Any) -> tuple[Any, dict[str, Any]]:
    """A fixed projection of each image's pixels, on a grid that hides rounding."""
    import torch

    pixels = images.detach().double().flatten(1)
    weights = torch.sin(torch.arange(1, pixels.shape[1] + 1, dtype=torch.float64) * 12.9898)
    offsets = torch.tensor([float(sum(map(ord, word))) for word in words], dtype=torch.float64)
    scores = torch.sin((pixels @ weights) * 40 / math.sqrt(pixels.shape[1]) + offsets)
    return ((scores * 20).round() / 20).float(), {}
