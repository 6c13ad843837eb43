"""A trainer whose training step takes the prompts of its rank, natively and as a patched one: for layout and updates.

Noise and orders of steps belong to prompt and generation, so that runs which draw samples elsewhere draw the same ones.
"""

import argparse
import hashlib
import json
import math
import os
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from leangrpo_core import Lean
from leangrpo_core.guard import local

from .grpo import Policy
from .wrapped import counting, whole, wrap

STEPS, TRAINED = 5, 3
EXACT = 1e-12


@dataclass(frozen=True)
class Sizes:
    """Prompts per rank and rollout, generations of each, rows per update; updates after which a run ends."""

    prompts: int = 1
    group: int = 4
    update: int = 4
    until: int = 2


@dataclass
class Run:
    """Per update the whole gradient before clipping and this rank's weights; what was logged; the runtime's windows."""

    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    weights: list[dict[str, Tensor]] = field(default_factory=list)
    logged: list[list[float]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    calls: dict[str, int] = field(default_factory=dict)
    windows: list[dict[str, Any]] = field(default_factory=list)
    counted: dict[str, int] = field(default_factory=dict)


def _sde_step(velocity: Tensor, latents: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    mean = latents - 0.15 * velocity
    following = mean + 0.3 * noise
    return following, -((following.detach() - mean) ** 2).mean() / 0.18


def drawn(*what: Any, size: tuple[int, ...] = (1, 4, 8)) -> Tensor:
    """Noise that belongs to `what`."""
    seed = int.from_bytes(hashlib.sha256(repr(what).encode()).digest()[:6], "big")
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def prompts_of(rank: int, first: int, count: int) -> tuple[Tensor, list[str]]:
    """Embeddings [count, 8] and names of a rank's next prompts."""
    names = [f"{rank}.{number}" for number in range(first, first + count)]
    return torch.cat([drawn("prompt", name, size=(1, 8)) for name in names]), names


class Trainer:
    """`shared`: whether the runtime is asked for that layout, which tells what generation a slot draws."""

    def __init__(self, lean: Lean | None, net: nn.Module, rank: int, world: int, sizes: Sizes, shared: bool) -> None:
        self.lean, self.net, self.rank, self.sizes = lean, net, rank, sizes
        self.team = math.gcd(sizes.group, world, sizes.update) if shared and lean else 1
        self.optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
        self.run = Run()

    def train(self) -> Run:
        """Rollouts of `sizes.prompts` prompts per rank, until enough updates were made."""
        args = argparse.Namespace(group=self.sizes.group)
        number = 0
        while len(self.run.weights) < self.sizes.until:
            embeddings, names = prompts_of(self.rank, number, self.sizes.prompts)
            number += self.sizes.prompts
            first = ("first", self.rank, number)
            if self.lean is None:
                loss, norm = self.step(args, embeddings, names, first)
            else:
                loss, norm = self.lean.layout.train(
                    self.step, ["embeddings", "names"], (args, "group"), self.sizes.update,
                    args, embeddings, names, first,
                )  # fmt: skip
            self.run.losses.append(loss)
            self.run.norms.append(norm)
        return self.run

    def step(self, args: Any, embeddings: Tensor, names: list[str], first: Any) -> tuple[float, float]:
        lean = self.lean
        layout = lean.layout if lean else None
        layout.zero_grad(self.optimizer) if layout else self.optimizer.zero_grad()
        embeddings, names = embeddings.repeat_interleave(args.group, 0), [n for n in names for _ in range(args.group)]
        rows = len(names)
        start = drawn(*first)
        if lean is None:
            paths, scores, found = self._rollout(embeddings, names, args.group, start)
        else:
            with lean.rollout(rows=rows, steps=STEPS, trained=TRAINED, window=self.sizes.update, group=args.group):
                start = lean.layout.initial_noise(start, True)
                paths, scores, found = self._rollout(embeddings, names, args.group, start)
        rewards = torch.cat(found)
        everyones = layout.all_rewards(_gather, rewards) if layout else _gather(rewards)
        if layout.reports(self.rank == 0) if layout else self.rank == 0:
            self.run.logged.append(everyones.tolist())
        advantages = torch.empty_like(rewards)
        for begin in range(0, rows, args.group):
            own = rewards[begin : begin + args.group]
            group = layout.group(own) if layout else own
            advantages[begin : begin + args.group] = self.advantages((own - group.mean()) / (group.std() + 1e-8))
        generations = [self._generation(row, args.group) for row in range(rows)]
        order = torch.empty(rows, STEPS, dtype=torch.long) if lean is None else lean.step_order(rows, STEPS)
        for row in range(rows if lean is None else 0):
            order[row] = _order(names[row], generations[row])
        samples = [
            {"path": paths[r], "score": scores[r], "advantage": advantages[r], "prompt": embeddings[r : r + 1],
             "order": order[r]}
            for r in range(rows)
        ]  # fmt: skip
        if lean is not None:
            ids = lean.identity()
            for row, sample in enumerate(samples):
                sample |= {name: value[row : row + 1] for name, value in ids.items()}
        total, norm = 0.0, None
        for row, sample in layout.rows(samples) if layout else list(enumerate(samples)):
            total += self._train_row(sample)
            if layout.ends_update(row, self.sizes.update) if layout else (row + 1) % self.sizes.update == 0:
                norm = self._boundary()
        return total, layout.norm(lambda: norm.item()) if layout else norm.item()  # type: ignore[union-attr]

    def advantages(self, advantages: Tensor) -> Tensor:
        """What a test makes of them."""
        return advantages

    def score(self, reward: Tensor) -> Tensor:
        """What a test makes of a reward."""
        return reward

    def unrewarded(self, row: int) -> bool:
        """Whether the runtime is not told this row's reward."""
        return False

    def _generation(self, row: int, group: int) -> int:
        return row % group * self.team + self.rank % self.team

    def _rollout(
        self, embeddings: Tensor, names: list[str], group: int, start: Tensor
    ) -> tuple[list[Tensor], Tensor, list[Tensor]]:
        paths, scores, rewards = [], torch.empty(len(names), STEPS), []
        for row, name in enumerate(names):
            path = [start]
            for step in range(STEPS):
                velocity = self._velocity("rollout", row, step, path[-1], embeddings[row : row + 1])
                noise = drawn("noise", name, self._generation(row, group), step)
                with torch.no_grad():
                    args = velocity, path[-1], noise
                    latents, scores[row, step] = self.lean.scored(_sde_step, *args) if self.lean else _sde_step(*args)
                path.append(latents)
            paths.append(torch.stack(path))
            reward = self.score((path[-1].mean() + 0.1 * path[-1].square().mean())[None])
            if self.lean and not self.unrewarded(row):
                self.lean.rewarded(rewards.append, torch.tensor([row]), reward)
            else:
                rewards.append(reward)
        return paths, scores, rewards

    def _velocity(self, side: str, row: Any, step: Any, latents: Tensor, prompt: Tensor) -> Tensor:
        inputs = {"latents": latents, "timestep": torch.tensor([int(step) / 10]), "prompt": prompt}
        with torch.set_grad_enabled(side == "update"):
            if self.lean is None:
                return self.net(**inputs)[0]
            call: Any = self.lean.policy_call if side == "update" else self.lean.rollout_call
            return call(self.net, row if side == "update" else torch.tensor([row]), step, **inputs)[0]

    def _train_row(self, sample: dict[str, Any]) -> float:
        total = 0.0
        for turn in range(TRAINED):
            step = int(sample["order"][turn])
            latents, following = sample["path"][step], sample["path"][step + 1]
            velocity = self._velocity("update", sample.get("lean_row"), step, latents, sample["prompt"])
            score = -((following - latents + 0.15 * velocity) ** 2).mean() / 0.18
            ratio, advantage = torch.exp(score - sample["score"][step]), sample["advantage"]
            loss = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(0.999, 1.001))
            (loss / (self.sizes.update * TRAINED)).backward()
            total += loss.item()
        return total

    def _boundary(self) -> Tensor:
        net = self.net
        if self.lean is not None:
            self.lean.flush(net, self.optimizer)
        self.run.gradients.append(whole(net))
        norm = _clip(net, self.run.gradients[-1])
        self.optimizer.step()
        self.lean.layout.zero_grad(self.optimizer) if self.lean else self.optimizer.zero_grad()
        self.run.weights.append({name: local(p.detach()).clone() for name, p in net.named_parameters()})
        return norm


def _clip(net: nn.Module, gradients: dict[str, Tensor]) -> Tensor:
    """FSDP1's own does not take double precision; torch's does not see that a rank holds a part only."""
    if not hasattr(net, "clip_grad_norm_"):
        return nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    norm = torch.stack([grad.square().sum() for grad in gradients.values()]).sum().sqrt()
    for parameter in net.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_((1.0 / (norm + 1e-6)).clamp(max=1.0))
    return norm


def _order(name: str, generation: int) -> Tensor:
    return drawn("order", name, generation, size=(STEPS,)).argsort()


def _gather(rewards: Tensor) -> Tensor:
    if not dist.is_initialized():
        return rewards
    everyones = [torch.empty_like(rewards) for _ in range(dist.get_world_size())]
    dist.all_gather(everyones, rewards)
    return torch.cat(everyones)


def job(rank: int, world: int, kind: str, sizes: Sizes, env: dict[str, str] | None) -> Run:
    """One rank; natively without `env`. Orders of steps, which the runtime draws, belong to samples here, too.

    In double precision: samples add up in another order than natively, over other ranks.
    """
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    net = wrap(kind, Policy())
    torch.manual_seed(rank)
    os.environ |= env or {}
    shared = (env or {}).get("LEANGRPO_LAYOUT") == "shared"
    with tempfile.TemporaryDirectory() as folder:
        os.environ["LEANGRPO_REPORT_DIR"] = folder
        trainer = Trainer(Lean() if env is not None else None, net, rank, world, sizes, shared)
        if env is not None:
            _draw_orders(trainer)
        with counting() as counted:
            run = trainer.train()
        run.counted = dict(counted)
        file = Path(folder, f"rank{rank}.jsonl")
        run.windows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    run.calls = dict(cast(Policy, getattr(net, "module", net)).calls)
    return run


def _draw_orders(trainer: Trainer) -> None:
    """The runtime draws with torch.randperm, row by row, at the beginning of the rollout of a part."""
    coming: list[tuple[str, int]] = []
    randperm, step = torch.randperm, trainer.step

    def noting(args: Any, embeddings: Tensor, names: list[str], first: Any) -> tuple[float, float]:
        coming[:] = [(name, trainer._generation(row, args.group)) for name in names for row in range(args.group)]
        return step(args, embeddings, names, first)

    def draw(count: int, **how: Any) -> Tensor:
        return _order(*coming.pop(0)) if coming and count == STEPS else randperm(count, **how)

    trainer.step = noting  # type: ignore[method-assign]
    torch.randperm = draw  # type: ignore[assignment]


def both(rank: int, world: int, kind: str, sizes: Sizes, env: dict[str, str], natively: Sizes) -> tuple[Run, Run]:
    """The training with the runtime, and the native one, which runs first."""
    native = job(rank, world, kind, natively, None)
    return job(rank, world, kind, sizes, env), native


def check(ours: list[Run], native: list[Run], bound: float = EXACT) -> None:
    """Whole gradients before clipping, weights, losses, norms and what was logged."""
    for run, reference in zip(ours, native, strict=True):
        assert len(run.gradients) == len(reference.gradients)
        for update, (grads, expected) in enumerate(zip(run.gradients, reference.gradients, strict=True)):
            for name in expected:
                a, b = grads[name].double(), expected[name].double()
                distance = float((a - b).norm() / b.norm().clamp_min(1e-12))
                assert distance <= bound, (update, name, distance)
            for name, weight in reference.weights[update].items():
                torch.testing.assert_close(run.weights[update][name], weight, rtol=0, atol=bound)
        assert len(run.logged) == len(reference.logged)
        for rewards, expected in zip(run.logged, reference.logged, strict=True):
            torch.testing.assert_close(torch.tensor(rewards), torch.tensor(expected), rtol=0, atol=EXACT)
    # The sum of losses over the ranks; each rank has other samples than natively.
    for rollout in range(len(native[0].losses)):
        total = sum(run.losses[rollout] for run in ours)
        assert math.isclose(total, sum(run.losses[rollout] for run in native), rel_tol=EXACT, abs_tol=EXACT)
