"""Steps in an order of their own for each sample: of samples chosen by their rewards, and of samples drawn in batches.

The trainer is DanceGRPO's for HunyuanVideo (`best_of`) and for Stable Diffusion (`of`), once natively and once patched.
"""

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from support.check import assert_same
from support.grpo import Policy, Result
from torch import Tensor, nn

from leangrpo_core import Lean

STEPS, TRAINED, ROLLOUTS = 5, 3, 2
EXACT = 1e-12  # float64: rows of a batch lie in other batches than in the rollout
pytestmark = pytest.mark.usefixtures("in_float64")


@dataclass
class Case:
    """`rows` samples in batches of `batch`, of which `best` are trained, `update` per update.

    `before`: natively, too, the orders of steps are drawn before the rollout, for all samples.
    """

    rows: int = 6
    best: int = 4
    update: int = 2
    batch: int = 1
    before: bool = False


def train(lean: Lean | None, case: Case) -> Result:
    torch.manual_seed(0)
    net, noise = Policy(), torch.Generator().manual_seed(1)
    optimizer, result = torch.optim.AdamW(net.parameters(), lr=1e-3), Result()
    for rollout in range(ROLLOUTS):
        torch.manual_seed(10 + rollout)
        orders = _drawn(case.rows) if case.before and lean is None else None
        prompts = torch.randn(case.rows, 8, generator=noise)
        samples = _rollout(lean, net, case, prompts, noise)
        rewards = samples["path"][:, -1].mean(dim=(1, 2))
        samples |= {
            "prompt": prompts,
            "advantage": (rewards - rewards.mean()) / rewards.std(),
            "row": torch.arange(case.rows),
        }
        if lean is not None:
            samples |= lean.drawn()
        if case.best != case.rows:
            ranked = rewards.argsort()
            chosen = torch.cat([ranked[-case.best // 2 :], ranked[: case.best // 2]])
            samples = {name: value[chosen] for name, value in samples.items()}
        if lean is not None:
            ids = samples["lean_row"] if case.batch == 1 else None
            order = lean.step_order(case.best, STEPS, ids=ids)
            samples |= lean.identity()
        else:
            order = _drawn(case.best) if orders is None else orders[samples["row"]]
        for first in range(0, case.best, case.batch):
            part = {name: value[first : first + case.batch] for name, value in samples.items()}
            for turn in range(TRAINED):
                _loss(lean, net, part, order[first : first + case.batch, turn], turn).backward()
            if (first + case.batch) % case.update == 0:
                _step(lean, net, optimizer, result)
    result.calls = dict(net.calls)
    return result


def _drawn(rows: int) -> Tensor:
    return torch.stack([torch.randperm(STEPS) for _ in range(rows)])


def _rollout(
    lean: Lean | None, net: nn.Module, case: Case, prompts: Tensor, noise: torch.Generator
) -> dict[str, Tensor]:
    paths, scores = [], []

    def draw(first: int, opened: Any) -> None:
        rows = range(first, first + case.batch)
        latents = torch.randn(case.batch, 2, 8, generator=noise)
        path, score = [latents], []
        with opened, torch.no_grad():
            for step in range(STEPS):
                inputs: dict[str, Any] = {"latents": path[-1], "timestep": torch.full((case.batch,), step / 10)}
                inputs["prompt"] = prompts[list(rows)]
                velocity = (net(**inputs) if lean is None else lean.rollout_call(net, rows, step, **inputs))[0]
                mean = path[-1] - 0.15 * velocity
                path.append(mean + 0.3 * torch.randn(mean.shape, generator=noise))
                score.append(_log_prob(mean, path[-1]))
        paths.append(torch.stack(path, dim=1))
        scores.append(torch.stack(score, dim=1))

    if lean is None or case.batch > 1:
        for first in range(0, case.rows, case.batch):
            opened = nullcontext() if lean is None else lean.rollout_batch(
                first // case.batch, batches=case.rows // case.batch, rows=case.batch, steps=TRAINED,
                window=case.update // case.batch, model=net, of=STEPS,
            )  # fmt: skip
            draw(first, opened)
    else:
        best_of = case.best if case.best != case.rows else None
        with lean.rollout(rows=case.rows, steps=STEPS, trained=TRAINED, window=case.update, best_of=best_of):
            for first in range(case.rows):
                draw(first, nullcontext())
    return {"path": torch.cat(paths), "score": torch.cat(scores)}


def _log_prob(mean: Tensor, following: Tensor) -> Tensor:
    return -((following - mean) ** 2).mean(dim=(1, 2)) / 0.18


def _loss(lean: Lean | None, net: nn.Module, part: dict[str, Tensor], steps: Tensor, turn: int) -> Tensor:
    rows = torch.arange(len(steps))
    latents, following = part["path"][rows, steps], part["path"][rows, steps + 1]
    inputs: dict[str, Any] = {"latents": latents, "timestep": steps / 10, "prompt": part["prompt"]}
    if lean is None:
        velocity = net(**inputs)[0]
    else:
        velocity = lean.policy_call(net, part["lean_row"], part["lean_step"][:, turn], **inputs)[0]
    ratio = torch.exp(_log_prob(latents - 0.15 * velocity, following) - part["score"][rows, steps])
    return -(part["advantage"] * ratio).mean() / TRAINED


def _step(lean: Lean | None, net: nn.Module, optimizer: Any, result: Result) -> None:
    if lean is not None:
        lean.flush(net, optimizer)
    result.gradients.append({n: None if p.grad is None else p.grad.clone() for n, p in net.named_parameters()})
    optimizer.step()
    optimizer.zero_grad()
    result.weights.append({n: p.detach().clone() for n, p in net.named_parameters()})


def test_chosen_samples_are_replayed_if_the_graphs_of_all_are_held(
    monkeypatch: pytest.MonkeyPatch, windows: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LEANGRPO_ORDER", "upstream")
    native, lean = train(None, Case(before=True)), train(Lean(), Case())
    assert_same(lean, native)
    for window in windows():
        assert (window["kept"], window["replayed"], window["recomputed"]) == (6 * TRAINED, 2 * TRAINED, 0)
    assert "to replay 6 calls, the graphs of all 18 are held" in capsys.readouterr().out


@pytest.mark.parametrize("schedule", ["retain", "recompute"])
def test_chosen_samples_are_upstreams_by_default(
    schedule: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is kept, no random number is drawn in another order."""
    monkeypatch.setenv("LEANGRPO_SCHEDULE", schedule)
    native, lean = train(None, Case()), train(Lean(), Case())
    assert_same(lean, native)
    assert lean.calls == native.calls
    said = capsys.readouterr().out.count("the graphs of all 18 would have to be held")
    assert said == (1 if schedule == "retain" else 0)


def test_where_all_samples_are_trained_nothing_is_chosen(windows: Any) -> None:
    native, lean = train(None, Case(rows=4)), train(Lean(), Case(rows=4))
    assert_same(lean, native)
    assert [(window["kept"], window["replayed"]) for window in windows()] == [(2 * TRAINED, 2 * TRAINED)] * ROLLOUTS


@pytest.mark.parametrize("schedule", ["retain", "recompute"])
def test_batches_with_an_order_of_steps_for_each_sample(
    schedule: str, monkeypatch: pytest.MonkeyPatch, windows: Any
) -> None:
    monkeypatch.setenv("LEANGRPO_SCHEDULE", schedule)
    case = Case(rows=8, best=8, update=4, batch=2)
    native, lean = train(None, case), train(Lean(), case)
    assert_same(lean, native, rtol=0 if schedule == "recompute" else EXACT)
    if schedule == "recompute":
        assert lean.calls == native.calls
        return
    assert [(window["replayed"], window["recomputed"]) for window in windows()] == [(4 * TRAINED, 0)] * ROLLOUTS
