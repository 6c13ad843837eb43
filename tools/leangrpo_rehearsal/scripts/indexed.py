"""Noise and step orders by prompt and generation, for runs that draw the same samples on other ranks or in other order.

Natively a rank draws all generations of its prompts, one prompt after the other. With LEANGRPO_LAYOUT=shared several
ranks draw a prompt's together. Each reads its random numbers from a generator of its own; to compare gradients, they
are drawn here by what they are for instead: prompt, generation, step. The order is worked out from the sizes alone, not
asked of the runtime.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from leangrpo_rehearsal.base import Config, Context

if TYPE_CHECKING:
    import torch

Sample = tuple[int, int, int]  # the rank whose prompt it is, number of the prompt on that rank, generation


def samples(rank: int, world: int, config: Config, patched: bool) -> Iterator[Sample]:
    """What a rank draws, one after the other, without end."""
    prompts = int(config.option("prompts", "1"))
    group = config.generations // prompts
    shared = patched and config.option("layout", "native") == "shared"
    team = math.gcd(group, world, config.accumulation) if shared else 1
    first = -(-config.accumulation // group)  # prompts that the first update trains, or a part of
    order = list(range(prompts))
    if patched and shared and config.option("updates", "faithful") == "faithful":
        order = [*order[first:], *order[:first]]
    rollout = 0
    while True:
        for prompt in order:
            for owner in range(team):
                for slot in range(group // team):
                    generation = slot * team + rank % team
                    yield rank // team * team + owner, rollout * prompts + prompt, generation
        rollout += 1


def install(context: Context, calls: int) -> None:
    """Replaces torch's draws in this process.

    Args:
        calls: how often the script draws a first latent per rollout of the patched configuration.
    """
    import torch

    config = context.config
    steps = config.steps
    noise = _Draws(samples(context.rank, context.world, config, context.patched), steps)
    orders = _Draws(samples(context.rank, context.world, config, context.patched), 1)
    started = 0
    randn, randn_like, randperm = torch.randn, torch.randn_like, torch.randperm

    def first_latent(*size: Any, **how: Any) -> Any:
        nonlocal started
        if not (size and isinstance(size[0], tuple) and "device" in how):
            return randn(*size, **how)
        generator = _generator("first", context.rank, started // calls)
        started += 1
        return randn(*size, **(how | {"generator": generator, "device": "cpu"}))

    def step_noise(tensor: Any, **how: Any) -> Any:
        generator = _generator("noise", *noise.next())
        return torch.empty_like(tensor).normal_(generator=generator) if not how else randn_like(tensor, **how)

    def order(count: int, **how: Any) -> Any:
        if how.get("generator") is not None or count != steps - 1:
            return randperm(count, **how)
        return randperm(count, generator=_generator("order", *orders.next()))

    torch.randn, torch.randn_like, torch.randperm = first_latent, step_noise, order  # type: ignore[assignment]


class _Draws:
    """Counts draws: so many for each sample."""

    def __init__(self, found: Iterator[Sample], each: int) -> None:
        self._found, self._each = found, each
        self._left = 0
        self._sample: Sample = (0, 0, 0)

    def next(self) -> tuple[int, ...]:
        """The sample that the next draw is for, and which of its draws it is."""
        if not self._left:
            self._sample, self._left = next(self._found), self._each
        self._left -= 1
        return (*self._sample, self._left)


def _generator(*what: Any) -> torch.Generator:
    import torch

    seed = hashlib.sha256(repr(what).encode()).digest()[:7]
    return torch.Generator().manual_seed(int.from_bytes(seed, "big"))


def calls_per_rollout(config: Config, world: int, patched: bool) -> int:
    """Training steps that the script makes per rollout of the patched configuration, each with a first latent."""
    prompts = int(config.option("prompts", "1"))
    if not patched:
        return config.updates_per_rollout if config.option("updates", "faithful") == "on-policy" else 1
    shared = config.option("layout", "native") == "shared"
    return prompts * (math.gcd(config.generations // prompts, world, config.accumulation) if shared else 1)
