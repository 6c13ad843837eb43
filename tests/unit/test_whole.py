"""Batches that are trained as they were drawn, under FSDP1: kept calls of several rows, walked one by one."""

import functools
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from support import ranks
from support.batched import Network
from support.check import assert_same
from support.epoch import Config, train
from support.grpo import Block, Result
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from leangrpo_core import Lean, memory

EXACT = 1e-12  # float64: the two calls of a step are reduced apart
SELECTED = 2 * 3 * 3 * 2  # batches of the first update, rows, steps, calls of a step


def rank_job(rank: int, world: int, lean: bool, options: dict[str, Any]) -> tuple[Result, list[dict[str, Any]]]:
    torch.set_default_dtype(torch.float64)
    budget = options.get("budget", (1000, 1000))[rank]
    memory.Sizes.fits = lambda self, budget_bytes: budget  # in this forked process only
    config = Config(
        shuffled=False, whole=options.get("whole", True), useless=options.get("useless", ((), ()))[rank], rank=rank,
        rollouts=1,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        os.environ["LEANGRPO_REPORT_DIR"] = folder
        torch.manual_seed(0)
        net = FullyShardedDataParallel(
            Network(), auto_wrap_policy=ModuleWrapPolicy({Block}), device_id=torch.device("cpu"), use_orig_params=True
        )
        result = train(Lean() if lean else None, net, config)
        lines = Path(folder, f"rank{rank}.jsonl")
        return result, [json.loads(line) for line in lines.read_text().splitlines()] if lean else []


@functools.cache
def native(useless: tuple[tuple[int, ...], ...]) -> list[tuple[Result, list[dict[str, Any]]]]:
    return ranks.run(rank_job, 2, False, {"useless": useless})


def windows_of(options: dict[str, Any]) -> list[dict[str, Any]]:
    """Of each rank, once its gradients are the native ones."""
    ours = ranks.run(rank_job, 2, True, options)
    for (lean, _), (theirs, _) in zip(ours, native(options.get("useless", ((), ()))), strict=True):
        assert_same(lean, theirs, rtol=EXACT)
    return [window for _, (window,) in ours]


def test_all_of_the_first_update_is_replayed() -> None:
    for window in windows_of({}):
        assert (window["kept"], window["replayed"], window["recomputed"]) == (SELECTED, SELECTED, 0)
        assert window["calls"] == SELECTED // 3 and window["reasons"] == {}


def test_nothing_is_kept_where_batches_may_mix() -> None:
    for window in windows_of({"whole": False}):
        assert (window["kept"], window["recomputed"]) == (0, SELECTED)
        assert window["reasons"] == {"several rows in one call under FSDP1: set LEANGRPO_SYNC=late": SELECTED}


@pytest.mark.parametrize("budget", [(1000, 8), (2, 1000)])
def test_a_budget_that_ends_within_a_batch(budget: tuple[int, int]) -> None:
    """A call is held with all its rows or not at all, and every rank replays as many. Even where none has room, what a
    graph weighs is measured."""
    held = min(budget) // 3 * 3 * 2
    for window, room in zip(windows_of({"budget": budget}), budget, strict=True):
        assert (window["replayed"], window["recomputed"]) == (held, SELECTED - held)
        assert window["kept"] == min(room // 3 * 3 * 2, SELECTED) and window["graph_bytes"] > 0


def test_batches_that_are_not_as_drawn() -> None:
    """One rank leaves samples out all the same: both recompute, and it says why."""
    first, second = windows_of({"useless": ((0, 1, 2, 3), ())})
    assert (first["replayed"], second["replayed"]) == (0, 0)
    assert (first["recomputed"], second["recomputed"]) == (2 * 2 * 3 * 2, SELECTED)
    assert "not a batch as it was drawn" in first["reasons"]
