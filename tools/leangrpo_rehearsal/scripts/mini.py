"""mini, `mini_grpo/train.py`: the embedded trainer; FSDP1 on several ranks, evaluation between updates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from leangrpo_rehearsal.base import Config, Context, Launch, Script
from leangrpo_rehearsal.importhook import after_import

REWARDS = "mini_grpo.rewards"


class Mini(Script):
    """One double and two single blocks of width 64 (options `layers`, `width`). It makes its own model and data."""

    name = "train"
    path = "mini_grpo/train.py"
    policy = ("diffusers:FluxTransformer2DModel",)
    preload = ("torch", "torch.distributed.fsdp", "diffusers:FluxTransformer2DModel")
    options = ("eval_every", "learning_rate", "width", "layers")

    def supports(self, config: Config) -> str | None:
        """Updates per rollout have to divide the samples, which the trainer demands too."""
        if config.generations % config.updates_per_rollout:
            return f"{config.updates_per_rollout} updates per rollout do not divide {config.generations} generations"
        return None

    def launch(self, workdir: Path, config: Config) -> Launch:
        """As `scripts/train.sh`, smaller, and with an evaluation after every update."""
        values: dict[str, Any] = {
            "seed": config.seed, "rollouts": config.rollouts, "num_generations": config.generations,
            "gradient_accumulation_steps": config.accumulation, "sampling_steps": config.steps,
            "timestep_fraction": config.fraction, "learning_rate": config.option("learning_rate", "1e-3"),
            "eval_every": config.option("eval_every", "1"), "eval_steps": config.steps + 2, "eval_prompts": 1,
            "width": config.option("width", "64"), "layers": config.option("layers", "1"),
            "ema_decay": 0.9 if config.ema else 0.0,
        }  # fmt: skip
        argv = [text for name, value in values.items() for text in (f"--{name}", str(value))]
        switches = {"--bf16": config.precision == "bf16", "--gradient_checkpointing": config.checkpointing}
        return Launch(argv + [switch for switch, wanted in switches.items() if wanted])

    def install(self, context: Context) -> None:
        """Records every reward, those of evaluations included."""

        def record(module: Any) -> None:
            score = module.colour_reward

            def recorded(picture: Any, colour: Any) -> Any:
                reward = score(picture, colour)
                context.recorder.note("reward", reward)
                return reward

            module.colour_reward = recorded

        after_import(REWARDS, record)

    def flip_advantage(self, context: Context) -> None:
        """The first sample of the first rollout."""

        def flip(module: Any) -> None:
            standardise = module.group_advantages

            def flipped(rewards: Any, group: int) -> Any:
                advantages = standardise(rewards, group)
                advantages[0] = -advantages[0]
                module.group_advantages = standardise
                return advantages

            module.group_advantages = flipped

        after_import(REWARDS, flip)


SCRIPT = Mini()
