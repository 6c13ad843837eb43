"""The budget of kept graphs: as set, or measured in the first window."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from support import ranks
from support.fsdp2 import param_group
from support.grpo import Config, Policy, train
from support.wrapped import job

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


def gathered_into_held_on(rank: int, world: int, options: dict[str, Any]) -> list[int]:
    """A graph's bytes and the peak of what is held, where what FSDP2 gathers into lives on, as gloo's threads make it
    do now and then."""
    gather, held = param_group.foreach_all_gather, []

    def held_on(*args: Any, **kwargs: Any) -> Any:
        result: Any = gather(*args, **kwargs)
        held.append(result.all_gather_output)
        return result

    if options["held"]:
        param_group.foreach_all_gather = held_on
    side = job(rank, world, "fsdp2", True, {"config": {"rollouts": 1}})
    assert bool(held) == options["held"]
    return [side.window["graph_bytes"], side.window["peak_held_bytes"]]


def test_what_fsdp2_gathers_into_is_no_part_of_a_graph() -> None:
    assert ranks.run(gathered_into_held_on, 2, {"held": True}) == ranks.run(gathered_into_held_on, 2, {"held": False})
