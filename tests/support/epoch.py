"""A trainer that samples batches, leaves out samples without an advantage, shuffles the rest and trains it in batches.

Two network calls per step, a reference forward, an evaluation between rollouts, and the rollout goes around the wrapper
through which the update goes. `train(None, ...)` is the native one.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from leangrpo_core import Lean

from .grpo import Result, _log_prob, _sde_step


@dataclass
class Config:
    """`window` batches per optimizer step; `useless` rows have the same reward as their group; `whole` as the runtime's
    argument."""

    batches: int = 4
    rows: int = 3
    steps: int = 4
    trained: int = 3
    window: int = 2
    inner_epochs: int = 1
    rollouts: int = 2
    shuffled: bool = True
    useless: tuple[int, ...] = ()
    reference: bool = False
    whole: bool = False
    rank: int = 0


@dataclass
class Hooks:
    """Where a test reaches into the trainer. Each default does nothing."""

    order: Callable[[Tensor, Tensor], Tensor] = lambda drawn, rows: drawn
    update_time: Callable[[Tensor], Tensor] = lambda time: time
    in_rollout: Callable[[int, int], None] = lambda batch, step: None


def first_batches_first(config: Config) -> Hooks:
    """The order of the samples in a patched run, the slow obvious way."""

    def order(drawn: Tensor, rows: Tensor) -> Tensor:
        early = [place for place in drawn.tolist() if rows[place] < config.window * config.rows]
        return torch.tensor(early + [place for place in drawn.tolist() if place not in early])

    return Hooks(order=order)


def train(
    lean: Lean | None, net: nn.Module, config: Config, hooks: Hooks | None = None, wrapped: nn.Module | None = None
) -> Result:
    """Trains `net`, through `wrapped` if there is one, and records what every update did."""
    hooks, result = hooks or Hooks(), Result()
    model = net if wrapped is None else wrapped
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    noise = torch.Generator().manual_seed(50 + config.rank)
    torch.manual_seed(3 + config.rank)

    @torch.no_grad()
    def sample(count: int, batch: int = 0) -> dict[str, Tensor]:
        prompts, latents = (torch.randn(count, *size, generator=noise) for size in ((8,), (3, 8)))
        paths, scores = [latents], []
        for step in range(config.steps):
            hooks.in_rollout(batch, step)
            time = torch.tensor(step / 10)
            inputs = latents, time, prompts
            if lean is None:
                with_, without = net(*inputs).sample, net(latents, time, -prompts).sample
            else:
                with_ = lean.rollout_call(net, lean.rows, step - 1, *inputs).sample
                without = lean.rollout_call(net, lean.rows, step - 1, latents, time, -prompts, site="uncond").sample
            velocity = without + 3.0 * (with_ - without)
            args = velocity, latents, noise
            latents, score = _sde_step(*args) if lean is None else lean.scored(_sde_step, *args)
            scores.append(score)
            paths.append(latents)
        path, last = torch.stack(paths, dim=1), config.trained + 1
        return {
            "prompts": prompts, "latents": path[:, 1:last], "next": path[:, 2 : last + 1],
            "scores": torch.stack(scores, 1)[:, 1:last],
            "time": (torch.arange(1, last) / 10).repeat(count, 1),
        }  # fmt: skip

    def score(samples: dict[str, Tensor], place: int) -> tuple[Tensor, Tensor]:
        latents, prompts = samples["latents"][:, place], samples["prompts"]
        time = hooks.update_time(samples["time"][:, place])
        if lean is None:
            with_, without = model(latents, time, prompts).sample, model(latents, time, -prompts).sample
        else:
            ids = samples["lean_row"], samples["lean_step"][:, place]
            with_ = lean.policy_call(model, *ids, latents, time, prompts).sample
            without = lean.policy_call(model, *ids, latents, time, -prompts, site="uncond").sample
        velocity = without + 3.0 * (with_ - without)
        return _log_prob(velocity, latents, samples["next"][:, place], 0.3), velocity

    done = 0
    for _ in range(config.rollouts):
        sample(2)  # an evaluation
        batches = []
        for batch in range(config.batches):
            opened = nullcontext() if lean is None else lean.rollout_batch(
                batch, batches=config.batches, rows=config.rows, steps=config.trained, window=config.window,
                model=model, whole=config.whole,
            )  # fmt: skip
            with opened:
                batches.append(sample(config.rows, batch))
        samples = {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}
        count = config.batches * config.rows
        if lean is not None:
            samples |= lean.identity("cpu")
        samples["row"] = torch.arange(count)
        rewards = samples["next"][:, -1].mean(dim=(1, 2))
        advantages = (rewards - rewards.mean()) / rewards.std()
        advantages[list(config.useless)] = 0
        samples["advantages"] = advantages
        mask = advantages != 0
        for row in config.useless:  # as many again as make equal batches
            if int(mask.sum()) % config.batches:
                mask[row] = True
        samples = {name: value[mask] for name, value in samples.items()}
        count = len(samples["row"])
        for epoch in range(config.inner_epochs):
            if config.shuffled:
                if lean is not None:
                    perm = lean.row_order(count, ids=samples["lean_row"])
                else:
                    perm = torch.randperm(count)
                    perm = perm if epoch else hooks.order(perm, samples["row"])
                samples = {name: value[perm] for name, value in samples.items()}
            for number in range(config.batches):
                size = count // config.batches
                part = {name: value[number * size : (number + 1) * size] for name, value in samples.items()}
                for place in range(config.trained):
                    done += place == 0
                    last = done % config.window == 0 and place == config.trained - 1
                    held_back = nullcontext() if last or wrapped is None else wrapped.no_sync()  # type: ignore[operator]
                    with held_back:
                        found, velocity = score(part, place)
                        loss = -(part["advantages"] * torch.exp(found - part["scores"][:, place])).mean()
                        if config.reference:
                            with torch.no_grad():
                                other = score(part, place)[1]
                            loss = loss + 0.1 * (velocity - 0.9 * other).square().mean()
                        (loss / config.window / config.trained).backward()
                    if last:
                        _step(lean, net, model, optimizer, result)
    kinds = [kind for kind, _ in net.calls]  # type: ignore[union-attr, arg-type]
    result.calls = {kind: kinds.count(kind) for kind in ("grad", "no_grad")}
    return result


def _step(lean: Lean | None, net: nn.Module, model: nn.Module, optimizer: Any, result: Result) -> None:
    if lean is not None:
        lean.flush(model, optimizer)
    named = list(net.named_parameters())
    result.gradients.append({n: None if p.grad is None else p.grad.detach().clone() for n, p in named})
    nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    result.weights.append({n: p.detach().clone() for n, p in named})
