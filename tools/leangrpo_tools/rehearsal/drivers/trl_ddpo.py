"""A user's training script for TRL's DDPOTrainer: a pipeline, a prompt function, a reward function, `train()`."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import torch
from accelerate import PartialState
from transformers import HfArgumentParser

WORDS = ("cat", "dog", "fish", "bird")


@dataclasses.dataclass
class Arguments:
    """What belongs to the pipeline and not to the trainer's configuration."""

    model: str
    lora: bool = True
    gradient_checkpointing: bool = False


def prompts(rank: int) -> Any:
    """A prompt function that goes through the words, on each rank from another one."""
    counter = itertools.count(rank)

    def draw() -> tuple[str, dict[str, Any]]:
        return WORDS[next(counter) % len(WORDS)], {}

    return draw


def score(images: torch.Tensor, words: tuple[str, ...], metadata: Any) -> tuple[torch.Tensor, dict[str, Any]]:
    """A fixed projection of each image's pixels, on a grid that hides rounding."""
    pixels = images.detach().double().flatten(1)
    weights = torch.sin(torch.arange(1, pixels.shape[1] + 1, dtype=torch.float64) * 12.9898)
    offsets = torch.tensor([float(sum(map(ord, word))) for word in words], dtype=torch.float64)
    scores = torch.sin((pixels @ weights) * 40 / math.sqrt(pixels.shape[1]) + offsets)
    return ((scores * 20).round() / 20).float(), {}


def main() -> None:
    """Trains as the command line says; the fields of DDPOConfig are its flags."""
    state = PartialState(cpu=True)  # TRL logs before it makes an accelerator, and that needs the state
    from trl import (  # pyright: ignore[reportMissingImports]
        DDPOConfig,
        DDPOTrainer,
        DefaultDDPOStableDiffusionPipeline,
    )

    parser: Any = HfArgumentParser((Arguments, DDPOConfig))  # type: ignore[arg-type]
    arguments, config = parser.parse_args_into_dataclasses()
    pipeline = DefaultDDPOStableDiffusionPipeline(arguments.model, use_lora=arguments.lora)
    if arguments.gradient_checkpointing:
        pipeline.unet.enable_gradient_checkpointing()
    DDPOTrainer(config, score, prompts(state.process_index), pipeline).train()


if __name__ == "__main__":
    main()
