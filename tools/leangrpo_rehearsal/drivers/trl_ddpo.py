"""A user's training script for TRL's DDPOTrainer: a pipeline, a prompt function, a reward function, `train()`."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

from accelerate import PartialState
from transformers import HfArgumentParser

from leangrpo_rehearsal.scripts.tiny import score

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
