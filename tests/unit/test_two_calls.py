"""Guidance as a second network call of each step: both are kept or none, within the budget, on as many ranks."""

import itertools
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from support import ranks
from support.batched import Network
from support.wrapped import wrap
from torch import Tensor, nn

from leangrpo_core import Lean
from leangrpo_core.window import Key, Window

ROWS, STEPS = 2, 4
SITES = {"cond": torch.ones(1, 8), "uncond": torch.zeros(1, 8)}


def train(lean: Lean | None, net: nn.Module, updates: int = 1, seed: int = 0) -> list[Tensor | None]:
    """Gradients of the last of some updates, of which each trains all steps of two rows. `lean` None is native."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    torch.manual_seed(seed)
    latents, time = torch.randn(ROWS, STEPS, 1, 3, 8), torch.arange(STEPS) / 10
    gradients: list[Tensor | None] = []
    for _ in range(updates):
        optimizer.zero_grad()
        at: Any = {}
        if lean is not None:
            with lean.rollout(rows=ROWS, steps=STEPS, trained=STEPS, window=ROWS), torch.no_grad():
                for row, step in itertools.product(range(ROWS), range(STEPS)):
                    for site, prompt in SITES.items():
                        lean.rollout_call(net, [row], step, latents[row, step], time[step], prompt, site=site)
            order = lean.step_order(ROWS, STEPS)
            rows = lean.identity()["lean_row"]
            at = {(row, int(step)): ([rows[row]], [step]) for row in range(ROWS) for step in order[row]}
        for row, step in at or itertools.product(range(ROWS), range(STEPS)):
            calls = [(latents[row, step], time[step], prompt) for prompt in SITES.values()]
            if lean is None:
                with_, without = (net(*call).sample for call in calls)
            else:
                with_, without = (
                    lean.policy_call(net, *at[row, step], *call, site=site).sample
                    for site, call in zip(SITES, calls, strict=True)
                )
            (without + 3.0 * (with_ - without)).square().mean().backward()
        if lean is not None:
            lean.flush(net, optimizer)
        gradients = [None if p.grad is None else p.grad.detach().clone() for p in net.parameters()]
    return gradients


def windows_of(folder: Path, rank: int = 0) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / f"rank{rank}.jsonl").read_text().splitlines()]


def test_both_calls_of_a_step_count(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Five graphs and a half are room for two steps of two calls, not for five."""

    def windows(budget_bytes: float) -> list[dict[str, Any]]:
        folder = tmp_path / str(budget_bytes)
        monkeypatch.setenv("LEANGRPO_REPORT_DIR", str(folder))
        monkeypatch.setenv("LEANGRPO_BUDGET_GB", f"{budget_bytes / 1e9:.9f}")
        torch.manual_seed(0)
        train(Lean(), Network(), updates=2)
        return windows_of(folder)

    free = windows(1e9)[1]
    assert (free["kept"], free["selected"], free["replayed"], free["recomputed"]) == (16, 16, 16, 0)
    room = 5.5 * free["graph_bytes"]
    first, second = windows(room)
    assert 4 <= first["kept"] <= 5 and first["peak_held_bytes"] <= room
    assert (second["kept"], second["calls"], second["replayed"], second["recomputed"]) == (4, 4, 4, 12)
    assert second["peak_held_bytes"] == 4 * free["graph_bytes"]


def job(rank: int, world: int, kind: str) -> tuple[list[Any], list[Any], list[dict[str, Any]]]:
    os.environ["LEANGRPO_SYNC"] = "late"
    with tempfile.TemporaryDirectory() as folder:
        os.environ["LEANGRPO_REPORT_DIR"] = folder
        torch.manual_seed(0)
        net = wrap(kind, Network())  # type: ignore[arg-type]
        native = train(None, net, seed=rank)
        ours = train(Lean(), net, updates=2, seed=rank)
        return native, ours, windows_of(Path(folder), rank)


@pytest.mark.filterwarnings("ignore")
def test_ranks_agree_on_steps_and_not_on_calls() -> None:
    """In one joint backward a step of which only one call is replayed cannot be."""
    for native, ours, windows in ranks.run(job, 2, "fsdp-orig"):
        assert [(w["kept"], w["replayed"], w["recomputed"], w["flush"]) for w in windows] == [(16, 16, 0, "joint")] * 2
        assert any(gradient is not None for gradient in native)
        for a, b in zip(native, ours, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_a_step_of_which_one_call_is_held_ends_the_prefix() -> None:
    window = Window(1, 0, {(0, 0): 0, (0, 1): 1, (1, 0): 2}, sites=set(SITES))
    held = [(0, 0, "cond"), (0, 0, "uncond"), (0, 1, "cond"), (1, 0, "cond"), (1, 0, "uncond")]
    assert [_prefix(window, held[:count]) for count in range(6)] == [0, 0, 1, 1, 1, 1]
    assert _prefix(window, [*held, (0, 1, "uncond")]) == 3


def _prefix(window: Window, held: list[Key]) -> int:
    window.held = dict.fromkeys(held)  # type: ignore[assignment]
    return window.prefix()
