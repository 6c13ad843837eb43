"""TRL's `DDPOTrainer`: LoRA or full weights of a Stable Diffusion UNet, several samples in each network call."""

from __future__ import annotations

import dataclasses
import importlib.util
from pathlib import Path
from typing import Any

from leangrpo_rehearsal.base import Bound, Config, Context, Launch, Script
from leangrpo_rehearsal.importhook import after_import
from leangrpo_rehearsal.scripts import tiny_sd
from leangrpo_rehearsal.scripts.tiny import random_adapters

TRAINER = "trl.trainer.ddpo_trainer"


class Ddpo(Script):
    """The driver's training script, with the pipeline of `tiny_sd`."""

    name = "ddpo"
    path = "trl/trainer/ddpo_trainer.py"
    driver = "leangrpo_rehearsal.drivers.trl_ddpo"
    policy = ("diffusers:UNet2DConditionModel",)
    preload = (
        "torch", "torch.distributed.fsdp", "accelerate", "peft", "peft.tuners.lora", "transformers:HfArgumentParser",
        "transformers:CLIPTextModel", "transformers:CLIPTokenizer", "transformers:Trainer", "transformers.integrations",
        "diffusers:StableDiffusionPipeline", "diffusers:DDIMScheduler", "diffusers:UNet2DConditionModel",
        "diffusers:AutoencoderKL", "diffusers.loaders.peft",
    )  # fmt: skip
    stubs = ("pandas", "datasets")
    defaults = {"generations": 8, "fraction": 1.0}  # noqa: RUF012 (never changed)
    options = ("lora", "sample_batch", "train_batch", "inner_epochs", "prompt_stats", "train_cfg", "learning_rate")
    synchronised = False

    def trained(self, config: Config) -> int:
        """Every step can be trained, the last one too."""
        return int(config.steps * config.fraction)

    def supports(self, config: Config) -> str | None:
        """The batches have to fit into each other, which the trainer demands too."""
        if config.ema:
            return "upstream has no EMA"
        try:
            sample, train, epochs = batches(config)
        except ValueError as error:
            return f"batches and inner epochs are whole numbers from 1: {error}"
        updates = config.updates_per_rollout
        if config.generations % sample or sample % train:
            return f"train_batch {train} has to divide sample_batch {sample}, and that the {config.generations} samples"
        if updates % epochs or config.generations % (updates // epochs * train):
            return (
                f"{updates} updates per rollout do not divide the {config.generations} samples of each inner epoch "
                f"({epochs}) into batches of {train}"
            )
        return None

    def prepare(self, workdir: Path, config: Config) -> None:
        """The pipeline to train."""
        tiny_sd.write(workdir / "model", workdir / "words")

    def launch(self, workdir: Path, config: Config) -> Launch:
        """The driver's flags; those of `DDPOConfig` are upstream's defaults where nothing is said."""
        sample, train, epochs = batches(config)
        values: dict[str, Any] = {
            "model": workdir / "model", "lora": config.option("lora", "1"),
            "gradient_checkpointing": config.checkpointing, "seed": config.seed, "num_epochs": config.rollouts,
            "sample_num_steps": config.steps, "sample_batch_size": sample,
            "sample_num_batches_per_epoch": config.generations // sample, "train_batch_size": train,
            "train_gradient_accumulation_steps": window(config) // train, "train_num_inner_epochs": epochs,
            "train_timestep_fraction": config.fraction, "train_cfg": config.option("train_cfg", "1"),
            "train_learning_rate": config.option("learning_rate", "1e-3"),
            "mixed_precision": "no" if config.precision == "fp32" else config.precision,
            "per_prompt_stat_tracking": config.option("prompt_stats", "0"),
            "per_prompt_stat_tracking_min_count": 2, "save_freq": 1000000,
        }  # fmt: skip
        argv = [text for name, value in values.items() for text in (f"--{name}", str(value))]
        # accelerate takes any local rank for a distributed run, and would wrap the network on one rank too.
        return Launch(argv, {"LOCAL_RANK": "-1"} if config.ranks == 1 else {})

    def install(self, context: Context) -> None:
        """Upstream from the tree, adapters without zeros, permutations of their own, recorded rewards."""
        found = importlib.util.find_spec("trl")
        if found is None or found.origin is None or context.tree not in Path(found.origin).parents:
            raise ImportError(f"trl would be imported from {found and found.origin}, not from {context.tree}")
        random_adapters()
        permutations(context.config.seed + context.rank)

        def record(module: Any) -> None:
            compute = module.DDPOTrainer.compute_rewards

            def recorded(self: Any, *args: Any, **kwargs: Any) -> Any:
                rewards, metadata = compute(self, *args, **kwargs)
                for batch in rewards:
                    context.recorder.note("rewards", batch)
                return rewards, metadata

            module.DDPOTrainer.compute_rewards = recorded

        after_import(TRAINER, record)

    def flip_advantage(self, context: Context) -> None:
        """The first batch's largest one, in all steps of its sample."""
        left = self.trained(context.config)

        def flip(module: Any) -> None:
            calculate = module.DDPOTrainer.calculate_loss

            def flipped(self: Any, *args: Any, **kwargs: Any) -> Any:
                nonlocal left
                *head, advantages, embeds = args
                if left:
                    left -= 1
                    advantages = advantages.clone()
                    advantages[advantages.abs().argmax()] *= -1
                return calculate(self, *head, advantages, embeds, **kwargs)

            module.DDPOTrainer.calculate_loss = flipped

        after_import(TRAINER, flip)

    def incomparable(self, config: Config) -> str | None:
        """Whether permutations are drawn before the rollout depends on what `auto` chooses."""
        return "auto draws permutations first only where it may hold samples" if config.schedule == "auto" else None

    def bound(self, config: Config) -> Bound:
        """Rows of one kept graph are spread over batches of the update, so sums are rounded in another order."""
        if config.schedule == "recompute":
            return super().bound(config)
        return Bound(bitwise=False, rel_l2=1e-5)

    def regrouped(self, config: Config) -> tuple[Config, str] | None:
        """In bf16 a batch's part of a gradient is rounded, so it matters how large batches are."""
        sample, train, _ = batches(config)
        rows = window(config)
        sizes = [size for size in range(1, sample + 1) if sample % size == rows % size == 0 and size != train]
        if not sizes or config.precision == "fp32":
            return None
        options = dict(config.options) | {"train_batch": str(sizes[-1])}
        found = dataclasses.replace(config, options=tuple(options.items()))
        return found, f"in batches of {train} and of {sizes[-1]}"

    def notes(self, config: Config) -> list[str]:
        """What the stand-ins do to random numbers, and what upstream itself rounds."""
        return numbers_and_rounding(config)

    def not_tested(self, config: Config) -> list[str]:
        """The user's own parts, and TRL's other ways of running."""
        return [
            "a pipeline class of your own, and a calculate_loss that you override",
            "fp16 and its gradient scaler (upstream's default precision)",
            "per-prompt statistics over many rollouts, asynchronous rewards, saving and resuming",
        ]


def batches(config: Config) -> tuple[int, int, int]:
    """Samples per network call of the rollout and of the update, and inner epochs."""
    names = {"sample_batch": "4", "train_batch": "4", "inner_epochs": "1"}
    sample, train, epochs = (int(config.option(name, default)) for name, default in names.items())
    if min(sample, train, epochs) < 1:
        raise ValueError("less than 1")
    return sample, train, epochs


def window(config: Config) -> int:
    """Samples per rank that one optimizer update consumes; each inner epoch goes through all of them."""
    return config.generations * batches(config)[2] // config.updates_per_rollout


def numbers_and_rounding(config: Config) -> list[str]:
    """What a reader has to know of scripts whose permutations and noise come from one generator."""
    said = [
        "upstream draws its permutations after the rollout and the patched tree before it, from one generator on a "
        "GPU; here torch.randperm has a generator of its own, so that both runs draw the same"
    ]
    if config.precision != "fp32":
        said.append(
            "upstream scores the unrounded latent in the rollout and stores it rounded, so its own ratio is not 1 "
            "in the first update; the patched run does the same"
        )
    return said


def permutations(seed: int) -> None:
    """Gives `torch.randperm` a generator of its own. Both trees draw the same permutations in the same order."""
    import torch

    generator, draw = torch.Generator().manual_seed(seed), torch.randperm

    def randperm(*args: Any, **kwargs: Any) -> Any:
        return draw(*args, **({"generator": generator} | kwargs))

    torch.randperm = randperm  # type: ignore[assignment]


SCRIPT = Ddpo()
