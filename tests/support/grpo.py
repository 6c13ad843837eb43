"""A GRPO trainer small enough to read at a glance, once as a native trainer writes it and once as a patched one calls.

`train(None, ...)` is the slow obvious way that every test of the runtime compares with.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from leangrpo_core import Lean
from leangrpo_core.guard import local

WIDTH = 24


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(WIDTH, 48), nn.Linear(48, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Policy(nn.Module):
    """Predicts a velocity [1, tokens, 8] from latents of that shape, a timestep [1] and a prompt [1, 8]."""

    def __init__(self, checkpointing: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(8, WIDTH), nn.Linear(WIDTH, 8)
        self.time, self.prompt = nn.Linear(1, WIDTH), nn.Linear(8, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.drop = nn.Dropout(dropout)
        self.checkpointing = checkpointing
        self.calls = {"grad": 0, "no_grad": 0}
        self.wrap: Callable[[Tensor], Any] = lambda out: (out,)

    def forward(self, latents: Tensor, timestep: Tensor, prompt: Tensor, scale: float = 1.0) -> Any:
        self.calls["grad" if torch.is_grad_enabled() else "no_grad"] += 1
        x = self.enter(latents) + self.time(timestep[:, None, None]) + self.prompt(prompt)[:, None]
        for block in self.blocks:
            # only in train mode, as older diffusers models do
            remember = self.checkpointing and self.training and torch.is_grad_enabled()
            x = checkpoint(block, x, use_reentrant=False) if remember else block(x)
        return self.wrap(self.leave(self.drop(x)) * scale)


@dataclass
class Config:
    """Rows per rollout, steps of a trajectory, trained steps, rows per update, rollouts; precision and seed.

    `group` rows share a prompt, for the runtime; `announced` is the rows per update that it is told, if not the truth.
    `chosen` are the steps that each row trains, in that order, where they are known before the rollout.
    `moved` is the order in which each rank trains its rows, perhaps not all, that is known only with their rewards.
    `leftover` is what becomes of gradients of rows that do not fill an update: `dropped` before the next rollout, or
    `dropped later`, after it, `zeroed` as the one, `zeroed later` as the other, or `used` in the next update.
    `one_autocast` puts a whole rollout under one autocast region, so that calls share cached weights.
    """

    rows: int = 4
    steps: int = 6
    trained: int = 3
    accumulate: int = 4
    group: int | None = None
    announced: int | None = None
    chosen: tuple[int, ...] | None = None
    moved: tuple[tuple[int, ...], ...] | None = None
    leftover: str = "dropped"
    rollouts: int = 2
    tokens: int = 4
    bf16: bool = False
    one_autocast: bool = False
    clip: float = 1.0
    rank: int = 0


@dataclass
class Hooks:
    """Where a test reaches into the trainer. Each default does nothing.

    `rewards_later` tells the runtime the rewards of these rows after the rollout, in this order, and no others.
    """

    reward: Callable[[Tensor, int], Tensor] = lambda reward, row: reward
    rewards_later: Sequence[int] | None = None
    rollout_output: Callable[[Tensor, int, int], Tensor] = lambda out, row, step: out
    update_output: Callable[[Tensor, int, int], Tensor] = lambda out, row, step: out
    update_latents: Callable[[Tensor, int, int], Tensor] = lambda latents, row, step: latents
    advantages: Callable[[Tensor], Tensor] = lambda advantages: advantages
    before_update: Callable[[nn.Module], None] = lambda net: None
    before_flush: Callable[[nn.Module], None] = lambda net: None
    after_rollout: Callable[[nn.Module], object] = lambda net: None
    after_flush: Callable[[nn.Module], object] = lambda net: None
    after_step: Callable[[nn.Module], object] = lambda net: None
    lean_in: Callable[[int], bool] = lambda rollout: True
    loss: Callable[[Tensor], Tensor] = lambda loss: loss
    backward: Callable[[Tensor], None] = lambda loss: loss.backward()
    steps_of: Callable[[Tensor], Tensor] = lambda order: order
    extra_calls: int = 0
    no_flush: bool = False
    rollout_context: Callable[[], Any] = nullcontext
    update_context: Callable[[], Any] = nullcontext
    policy: Callable[[nn.Module], nn.Module] = lambda net: net


@dataclass
class Result:
    """Per update: gradients before clipping and weights after the step, this rank's share, by name."""

    gradients: list[dict[str, Tensor | None]] = field(default_factory=list)
    weights: list[dict[str, Tensor]] = field(default_factory=list)
    calls: dict[str, int] = field(default_factory=dict)


def _log_prob(velocity: Tensor, latents: Tensor, following: Tensor, sigma: float) -> Tensor:
    mean = latents - 0.15 * velocity.to(latents.dtype)
    return (-((following - mean) ** 2) / (2 * sigma**2)).mean(dim=(1, 2))


def _sde_step(velocity: Tensor, latents: Tensor, noise: torch.Generator) -> tuple[Tensor, Tensor]:
    """The next latents, and the log-prob of having drawn them, [1]."""
    mean = latents - 0.15 * velocity.to(latents.dtype)
    following = mean + 0.3 * torch.randn(latents.shape, generator=noise)
    return following, _log_prob(velocity, latents, following.detach(), 0.3)


def train(runtime: Lean | None, net: nn.Module, optimizer: Any, config: Config, hooks: Hooks | None = None) -> Result:
    """Trains `net` and records what every update did. `runtime` None is the native trainer."""
    hooks = hooks or Hooks()
    noise = torch.Generator().manual_seed(100 + config.rank)  # the device's generator, as on a GPU
    torch.manual_seed(7 + config.rank)
    result, policy = Result(), cast(Policy, getattr(net, "module", net))
    autocast = lambda: torch.autocast("cpu", torch.bfloat16, enabled=config.bf16)  # noqa: E731
    drop = lambda: optimizer.zero_grad(set_to_none="zeroed" not in config.leftover)  # noqa: E731
    trained = 0  # rows of the update
    for number in range(config.rollouts):
        lean = runtime if hooks.lean_in(number) else None
        if config.leftover in ("dropped", "zeroed"):
            drop()
        prompts = torch.randn(config.rows, 8, generator=noise)
        paths = torch.empty(config.rows, config.steps + 1, 1, config.tokens, 8)
        scores = torch.empty(config.rows, config.steps)
        scored: list[Tensor] = []

        def rollout(
            lean: Lean | None = lean, paths: Tensor = paths, scores: Tensor = scores, prompts: Tensor = prompts,
            scored: list[Tensor] = scored,
        ) -> None:  # fmt: skip
            for row in range(config.rows):
                latents = torch.randn(1, config.tokens, 8, generator=noise)
                paths[row, 0] = latents
                for step in range(config.steps):
                    net.eval()
                    timestep, prompt = torch.tensor([step / 10]), prompts[row : row + 1]
                    inputs: dict[str, Any] = {"latents": latents, "timestep": timestep, "prompt": prompt}
                    with torch.no_grad(), hooks.rollout_context(), autocast():
                        if lean is None:
                            velocity = net(**inputs)[0]
                        else:
                            velocity = lean.rollout_call(net, torch.tensor([row]), step, **inputs)[0]
                            for _ in range(hooks.extra_calls):
                                lean.rollout_call(net, torch.tensor([row]), step, **inputs)
                        velocity = hooks.rollout_output(velocity, row, step)
                    args = velocity, latents, noise
                    latents, scores[row, step] = _sde_step(*args) if lean is None else lean.scored(_sde_step, *args)
                    paths[row, step + 1] = latents
                last = paths[row : row + 1, -1]
                reward = last.mean(dim=(1, 2, 3)) + 0.1 * last.square().mean(dim=(1, 2, 3))
                reward = hooks.reward(reward, row)
                if lean is None or hooks.rewards_later is not None:
                    scored.append(reward)
                else:
                    lean.rewarded(scored.append, torch.tensor([row]), reward)
            for row in hooks.rewards_later or ():
                if lean is not None:
                    lean.rewarded(lambda reward: None, [row], scored[row])

        window: dict[str, Any] = {
            "rows": config.rows,
            "steps": config.steps,
            "trained": config.trained,
            "window": config.announced or config.accumulate,
            "group": config.group,
            "chosen": config.chosen,
            "moved": config.moved is not None,
        }
        with torch.autocast("cpu", torch.bfloat16, enabled=config.one_autocast):
            if lean is None:
                rollout()
            else:
                with lean.rollout(**window):
                    rollout()
        hooks.after_rollout(net)
        if "later" in config.leftover:
            drop()
        trained = trained if config.leftover == "used" else 0
        rewards = torch.cat(scored)
        advantages = hooks.advantages((rewards - rewards.mean()) / (rewards.std() + 1e-8))
        if config.chosen is not None:
            order = torch.arange(config.steps).repeat(config.rows, 1)
        elif lean is None:
            order = torch.stack([torch.randperm(config.steps) for _ in range(config.rows)])
        else:
            order = lean.step_order(config.rows, config.steps)
        ids: dict[str, Tensor] = lean.identity() if lean else {}
        order = hooks.steps_of(order)
        hooks.before_update(net)
        rows = config.moved[config.rank] if config.moved else range(config.rows)
        for row in rows:
            trained += 1
            for place in config.chosen or range(config.trained):
                step = int(order[row, place])
                net.train()
                inputs: dict[str, Any] = {
                    "latents": hooks.update_latents(paths[row, step], row, step),
                    "timestep": torch.tensor([step / 10]),
                    "prompt": prompts[row : row + 1],
                }
                with hooks.update_context(), autocast():
                    if lean is None:
                        velocity = hooks.policy(net)(**inputs)[0]
                    else:
                        velocity = lean.policy_call(
                            hooks.policy(net), ids["lean_row"][row : row + 1], order[row, place], **inputs
                        )[0]
                    velocity = hooks.update_output(velocity, row, step)
                ratio = torch.exp(_log_prob(velocity, paths[row, step], paths[row, step + 1], 0.3) - scores[row, step])
                loss = torch.maximum(-advantages[row] * ratio, -advantages[row] * ratio.clamp(0.999, 1.001)).mean()
                hooks.backward(hooks.loss(loss / (config.accumulate * config.trained)))
            if trained == config.accumulate:
                trained = 0
                hooks.before_flush(net)
                if lean is not None and not hooks.no_flush:
                    lean.flush(net, optimizer)
                hooks.after_flush(net)
                # After a backward FSDP1 natively may not list frozen ones.
                named = [(n, p) for n, p in net.named_parameters() if p.requires_grad or p.grad is not None]
                result.gradients.append(
                    {n: None if p.grad is None else local(p.grad.detach()).clone() for n, p in named}
                )
                clip = getattr(net, "clip_grad_norm_", None)
                if config.clip:  # FSDP1's does not take float64
                    clip(config.clip) if clip else nn.utils.clip_grad_norm_(net.parameters(), config.clip)
                optimizer.step()
                optimizer.zero_grad()
                result.weights.append({n: local(p.detach()).clone() for n, p in net.named_parameters()})
                hooks.after_step(net)
    result.calls = dict(policy.calls)
    return result
