"""A stand-in for the HPSv2 reward model: a deterministic score that differs between images."""

from __future__ import annotations

import math
from typing import Any

import torch

from leangrpo_rehearsal import stubs
from leangrpo_rehearsal.recorder import Recorder


def score(image: torch.Tensor, phase: float) -> torch.Tensor:
    """Scores an image by a fixed projection of its pixels, on a grid: float64, which autocast leaves alone.

    The grid makes the score insensitive to rounding: a pixel that differs by one level must not look like a different
    gradient.
    """
    pixels = image.detach().double().reshape(-1)
    weights = torch.sin(torch.arange(1, pixels.numel() + 1, dtype=torch.float64) * 12.9898)
    found = torch.sin((pixels * weights).sum() * 40 / math.sqrt(pixels.numel()) + phase)
    return (found * 20).round() / 20


def pixels_of(image: Any) -> torch.Tensor:
    """A PIL image as floats from 0 to 1, [height, width, 3]."""
    import numpy

    return torch.from_numpy(numpy.array(image.convert("RGB"))).float() / 255


class FakeReward(torch.nn.Module):
    """A model whose features make up the score."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def forward(self, image: torch.Tensor, text: torch.Tensor) -> dict[str, torch.Tensor]:
        found = score(image, text.double().sum().item())
        self.recorder.note("rewards", found)
        return {"image_features": found.reshape(1, 1), "text_features": torch.ones(1, 1, dtype=torch.float64)}

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        """Accepts the empty checkpoint."""
        return None


def install(recorder: Recorder) -> None:
    """Puts modules named as HPSv2's into `sys.modules`."""

    def create_model_and_transforms(*args: Any, **kwargs: Any) -> tuple[FakeReward, None, Any]:
        return FakeReward(recorder), None, pixels_of

    def get_tokenizer(*args: Any) -> Any:
        return lambda texts: torch.tensor([[ord(letter) % 7 for letter in text] for text in texts])

    for name in ("hpsv2", "hpsv2.src"):
        stubs.fake(name, __path__=[])
    stubs.fake(
        "hpsv2.src.open_clip",
        create_model_and_transforms=create_model_and_transforms,
        get_tokenizer=get_tokenizer,
    )
    stubs.fake("hpsv2.utils", root_path="", hps_version_map={})
