"""A trainer with batches, guidance, permutations and inner epochs, native and as a patched one calls the runtime.

Rollout and update spell the network's call differently, as libraries do: a scalar timestep and a tuple in the rollout,
a timestep per row and a named result in the update. Noise comes from a generator of its own, as on a GPU.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from leangrpo_core import Lean

from .grpo import WIDTH, Block, Result, _log_prob, _sde_step


@dataclass
class Output:
    """A named result, as diffusers returns it."""

    sample: Tensor

    def to_tuple(self) -> tuple[Tensor]:
        return (self.sample,)


class Network(nn.Module):
    """Predicts a velocity [B, tokens, 8] from latents of that shape, a timestep [] or [B] and prompts [B, 8]."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(8, WIDTH), nn.Linear(WIDTH, 8)
        self.time, self.prompt = nn.Linear(1, WIDTH), nn.Linear(8, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.register_buffer("gain", torch.tensor([1.0]))  # DDP shares buffers in some forwards
        self.calls: list[tuple[str, int]] = []  # grad or no_grad, and how many samples

    def forward(
        self, latents: Tensor, timestep: Tensor, prompts: Tensor, scale: float = 1.0, return_dict: bool = True
    ) -> Any:
        self.calls.append(("grad" if torch.is_grad_enabled() else "no_grad", len(latents)))
        # Contiguous, as some libraries' networks make them: rounding depends on strides, too.
        time = self.time(timestep.expand(len(latents)).to(latents.dtype).contiguous()[:, None])
        x = self.enter(latents.contiguous()) + time[:, None] + self.prompt(prompts)[:, None]
        for block in self.blocks:
            x = block(x)
        out = self.leave(x) * scale * self.gain
        return Output(out) if return_dict else (out,)


@dataclass
class Config:
    """Sizes of a run; `fraction` of the steps is trained, `window` batches per optimizer step."""

    sample_batch: int = 4
    batches: int = 2
    train_batch: int = 4
    accumulate: int = 2
    inner_epochs: int = 1
    steps: int = 4
    trained: int = 4
    rollouts: int = 2
    guidance: bool = True
    train_guidance: bool = True
    shuffled: bool = True
    by_batch: bool = False  # each batch of the rollout is told to the runtime on its own
    rank: int = 0


@dataclass
class Hooks:
    """Where a test reaches into the trainer. Each default does nothing."""

    update_latents: Callable[[Tensor, Tensor], Tensor] = lambda latents, rows: latents
    update_context: Callable[[], Any] = nullcontext
    backward: Callable[[Tensor], None] = lambda loss: loss.backward()
    before_clip: Callable[[nn.Module], None] = lambda net: None
    update_net: Callable[[nn.Module], nn.Module] = lambda net: net


class Adapters(nn.Module):
    """Some layers of a network, the last one first. A call of it is one of the network, as in trainers of adapters."""

    def __init__(self, net: nn.Module, *names: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(net.get_submodule(name) for name in reversed(names))
        self._net = (net,)  # not a part of it

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._net[0](*args, **kwargs)


def train(
    lean: Lean | None, net: nn.Module, config: Config, hooks: Hooks | None = None, shell: nn.Module | None = None
) -> Result:
    """Trains `net` and records what every update did. `lean` None is the native trainer.

    With `shell`, perhaps inside DDP, the update goes through that, and its weights are the ones that are trained.
    """
    hooks, result = hooks or Hooks(), Result()
    trains = net if shell is None else shell
    optimizer = torch.optim.AdamW(trains.parameters(), lr=1e-2)
    noise = torch.Generator().manual_seed(50 + config.rank)
    torch.manual_seed(3 + config.rank)
    rows, copies = config.sample_batch * config.batches, 2 if config.guidance else 1
    nothing = torch.zeros(1, 8)

    def network(net: nn.Module, site: str, ids: tuple[Any, Any], *args: Any, **kwargs: Any) -> Any:
        if lean is None:
            return net(*args, **kwargs)
        return (lean.rollout_call if site == "rollout" else lean.policy_call)(net, *ids, *args, **kwargs)

    def rollout() -> dict[str, Tensor]:
        batches = [draw(batch) for batch in range(config.batches)]
        return {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}

    def draw(batch: int) -> dict[str, Tensor]:
        opened = nullcontext() if lean is None or not config.by_batch else lean.rollout_batch(
            batch, batches=config.batches, rows=config.sample_batch, of=config.steps, steps=config.trained,
            window=config.accumulate, batch_rows=config.train_batch, shuffled=config.shuffled, model=trains,
            calls=None if shell is None else net,
        )  # fmt: skip
        with opened:
            count = config.sample_batch
            prompts = torch.randn(count, 8, generator=noise)
            latents = torch.randn(count, 3, 8, generator=noise)
            paths, scores = [latents], []
            conditions = torch.cat([nothing.repeat(count, 1), prompts]) if config.guidance else prompts
            for step in range(config.steps):
                with torch.no_grad():
                    at = lean.rows if lean and config.by_batch else range(batch * count, (batch + 1) * count), step
                    inputs = torch.cat([latents] * copies), torch.tensor(step / 10), conditions
                    velocity = _guided(network(net, "rollout", at, *inputs, return_dict=False)[0], config.guidance)
                    args = velocity, latents, noise
                    latents, score = _sde_step(*args) if lean is None else lean.scored(_sde_step, *args)
                    scores.append(score)
                paths.append(latents)
            path = torch.stack(paths, dim=1)
            return {
                "prompts": prompts, "latents": path[:, :-1], "next": path[:, 1:], "scores": torch.stack(scores, 1),
                "time": (torch.arange(config.steps) / 10).repeat(count, 1),
            }  # fmt: skip

    for _ in range(config.rollouts):
        opened = nullcontext() if lean is None or config.by_batch else lean.rollout(
            rows=rows, steps=config.steps, trained=config.trained, window=config.train_batch * config.accumulate,
            batch=config.train_batch, shuffled=config.shuffled,
        )  # fmt: skip
        with opened:
            samples = rollout()
        final = samples["next"][:, -1]
        rewards = final.mean(dim=(1, 2)) + 0.1 * final.square().mean(dim=(1, 2))
        samples["advantages"] = (rewards - rewards.mean()) / (rewards.std() + 1e-8)
        for _ in range(config.inner_epochs):
            if config.shuffled:
                perm = torch.randperm(rows) if lean is None else lean.row_order(rows)
                samples = {name: value[perm] for name, value in samples.items()}
            if lean is None:
                order = torch.stack([torch.randperm(config.steps) for _ in range(rows)])
            else:
                order = lean.step_order(rows, config.steps)
            for name in ("latents", "next", "scores", "time"):
                samples[name] = samples[name][torch.arange(rows)[:, None], order]
            if lean is not None:
                samples |= lean.identity()
            _update(lean, trains, optimizer, config, hooks, samples, network, nothing, result)
    calls = getattr(net, "module", net).calls
    result.calls = {kind: sum(k == kind for k, _ in calls) for kind in ("grad", "no_grad")}  # type: ignore[union-attr]
    return result


def _update(
    lean: Lean | None, net: nn.Module, optimizer: Any, config: Config, hooks: Hooks, samples: dict[str, Tensor],
    network: Any, nothing: Tensor, result: Result,
) -> None:  # fmt: skip
    calls, guided = 0, config.guidance and config.train_guidance
    for first in range(0, len(samples["time"]), config.train_batch):
        batch = {name: value[first : first + config.train_batch] for name, value in samples.items()}
        prompts = batch["prompts"]
        conditions = torch.cat([nothing.repeat(len(prompts), 1), prompts]) if guided else prompts
        for place in range(config.trained):
            ids = batch.get("lean_row"), batch["lean_step"][:, place] if lean else None
            latents, time = batch["latents"][:, place], batch["time"][:, place]
            changed = hooks.update_latents(latents, torch.arange(first, first + len(prompts)))
            copies = 2 if guided else 1
            with hooks.update_context():
                out = network(
                    hooks.update_net(net), "policy", ids, torch.cat([changed] * copies), prompts=conditions,
                    timestep=torch.cat([time] * copies),
                ).sample  # fmt: skip
            score = _log_prob(_guided(out, guided), latents, batch["next"][:, place], 0.3)
            ratio = torch.exp(score - batch["scores"][:, place])
            loss = -(batch["advantages"] * ratio).mean() / (config.accumulate * config.trained)
            hooks.backward(loss)
            calls += 1
            if calls % (config.accumulate * config.trained) == 0:
                if lean is not None:
                    lean.flush(net, optimizer)
                hooks.before_clip(net)
                named = list(net.named_parameters())
                result.gradients.append({n: None if p.grad is None else p.grad.detach().clone() for n, p in named})
                nn.utils.clip_grad_norm_(net.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                result.weights.append({n: p.detach().clone() for n, p in named})


def _guided(out: Tensor, guidance: bool) -> Tensor:
    if not guidance:
        return out
    without, with_ = out.chunk(2)
    return without + 3.0 * (with_ - without)
