"""Prompts without a text encoder: every prompt is a name, a target colour and an embedding derived from its number."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

COLOURS = {
    "a red barn": (0.9, -0.6, -0.6),
    "a green field": (-0.5, 0.8, -0.5),
    "a blue lake": (-0.7, -0.3, 0.9),
    "a yellow lamp": (0.8, 0.7, -0.8),
    "a violet door": (0.5, -0.7, 0.8),
    "a white wall": (0.9, 0.9, 0.9),
}


@dataclass(frozen=True)
class Prompt:
    """One prompt: `tokens` [1, L, D], `pooled` [1, P] and the colour [3] its picture should have."""

    text: str
    tokens: Tensor
    pooled: Tensor
    colour: Tensor


def prompt_at(number: int, width: int, device: torch.device, length: int = 16) -> Prompt:
    """The prompt with this number. Same number, same embedding, on every rank and in every run."""
    text = list(COLOURS)[number % len(COLOURS)]
    seeded = torch.Generator().manual_seed(7919 + number % len(COLOURS))
    tokens = torch.randn(1, length, width, generator=seeded)
    pooled = torch.randn(1, width, generator=seeded)
    return Prompt(text, tokens.to(device), pooled.to(device), torch.tensor(COLOURS[text], device=device))
