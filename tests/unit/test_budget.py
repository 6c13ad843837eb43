"""The budget of kept graphs: as set, or measured in the first window."""

import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from support.batched import Network
from support.grpo import Config, Policy, train

from leangrpo_core import Lean
from leangrpo_core.budget import Budget


class Cuda:
    """Memory figures of a device, in bytes, in place of torch.cuda's."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.free, self.reserved, self.peak, self.resets = 60e9, 20e9, 30e9, 0
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (self.free, 80e9))
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: self.reserved)
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: self.peak)
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", self.reset)

    def reset(self) -> None:
        self.resets += 1


def test_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """95 % of what this process could have, less the peak of the first window. Measured once."""
    cuda, budget = Cuda(monkeypatch), Budget(None)
    assert "measures memory" in budget.begin_window(print) and cuda.resets == 1
    assert budget.begin_window(print) == "" and budget.bytes == pytest.approx(0.95 * 80e9 - 30e9)
    cuda.peak = 79e9
    assert budget.begin_window(print) == "" and budget.bytes == pytest.approx(46e9) and cuda.resets == 1
    full = Budget(None)
    assert full.begin_window(print) and not full.begin_window(print) and full.bytes == 0.0


def test_nothing_is_measured_where_a_budget_is_set_or_there_is_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    without = Budget(None)
    assert without.begin_window(print) == "" and without.bytes == math.inf
    cuda = Cuda(monkeypatch)
    for value in (0.0, 5e9, math.inf):
        budget = Budget(value)
        assert budget.begin_window(print) == budget.begin_window(print) == "" and budget.bytes == value
    assert cuda.resets == 0


def test_the_first_window_keeps_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The second has the room that is left: here for five graphs and a half."""
    monkeypatch.setenv("LEANGRPO_REPORT_DIR", str(tmp_path))

    def windows() -> list[dict[str, Any]]:
        torch.manual_seed(0)
        net = Policy()
        (tmp_path / "rank0.jsonl").unlink(missing_ok=True)
        train(Lean(), net, torch.optim.AdamW(net.parameters()), Config())
        return [json.loads(line) for line in (tmp_path / "rank0.jsonl").read_text().splitlines()]

    one = windows()[0]["graph_bytes"]
    cuda = Cuda(monkeypatch)
    cuda.peak = 0.95 * 80e9 - 5.5 * one
    first, second = windows()
    assert (first["kept"], first["recomputed"]) == (0, 12) and any("measures" in text for text in first["reasons"])
    assert (second["kept"], second["replayed"], second["recomputed"]) == (5, 5, 7)


def two_calls_per_step(lean: Lean, net: Network) -> None:
    """A window of two rows with four steps, whose guidance is a network call of its own."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    sites = {"cond": torch.ones(1, 8), "uncond": torch.zeros(1, 8)}
    latents, time = torch.randn(2, 4, 1, 3, 8), torch.arange(4) / 10
    with lean.rollout(rows=2, steps=4, trained=4, window=2), torch.no_grad():
        for row, step in itertools.product(range(2), range(4)):
            for site, prompt in sites.items():
                lean.rollout_call(net, [row], step, latents[row, step], time[step], prompt, site=site)
    order = lean.step_order(2, 4)
    ids = lean.identity()
    for row, place in itertools.product(range(2), range(4)):
        step = order[row, place]
        at = [ids["lean_row"][row]], [step]
        outs = [
            lean.policy_call(net, *at, latents[row, step], time[step], prompt, site=site).sample
            for site, prompt in sites.items()
        ]
        (outs[1] + 3.0 * (outs[0] - outs[1])).square().mean().backward()
    lean.flush(net, optimizer)
    optimizer.zero_grad()


def test_both_calls_of_a_step_count(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Five graphs and a half are room for two steps of two calls, not for five."""

    def windows(budget_bytes: float) -> list[dict[str, Any]]:
        folder = tmp_path / str(budget_bytes)
        monkeypatch.setenv("LEANGRPO_REPORT_DIR", str(folder))
        monkeypatch.setenv("LEANGRPO_BUDGET_GB", f"{budget_bytes / 1e9:.9f}")
        torch.manual_seed(0)
        lean, net = Lean(), Network()
        for _ in range(2):
            two_calls_per_step(lean, net)
        return [json.loads(line) for line in (folder / "rank0.jsonl").read_text().splitlines()]

    free = windows(1e9)[1]
    assert (free["kept"], free["selected"], free["replayed"], free["recomputed"]) == (16, 16, 16, 0)
    room = 5.5 * free["graph_bytes"]
    first, second = windows(room)
    assert 4 <= first["kept"] <= 5 and first["peak_held_bytes"] <= room
    assert (second["kept"], second["calls"], second["replayed"], second["recomputed"]) == (4, 4, 4, 12)
    assert second["peak_held_bytes"] == 4 * free["graph_bytes"]
