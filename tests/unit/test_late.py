"""LEANGRPO_SYNC=late under DDP: no communication in any backward, one averaging per update, replayed or not."""

import os
from typing import Any

import pytest
import torch
from support import ranks
from support.check import assert_same
from support.grpo import Config, Hooks, Policy, Result, train
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from leangrpo_core import Lean, agree, guard


def job(rank: int, world: int, schedule: str, sync: str) -> tuple[Result, list[bool]]:
    """One rank; the result, and per update whether gradients were the same on all ranks just before the flush."""
    os.environ |= {"LEANGRPO_SCHEDULE": schedule, "LEANGRPO_SYNC": sync}
    same: list[bool] = []

    def look(net: nn.Module) -> None:
        sums = agree.everyones(guard.checksum(p.grad for p in net.parameters() if p.grad is not None))
        same.append(sums[0] == sums[1])

    torch.manual_seed(0)
    net = DistributedDataParallel(Policy())
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    lean = Lean() if schedule else None
    return train(lean, net, optimizer, Config(rank=rank, accumulate=2), Hooks(before_flush=look)), same


@pytest.fixture(scope="module")
def native() -> Any:
    return ranks.run(job, 2, "", "upstream")


@pytest.mark.parametrize("schedule", ["retain", "recompute"])
def test_one_averaging_per_update(schedule: str, native: Any) -> None:
    late = ranks.run(job, 2, schedule, "late")
    for (ours, same), (theirs, natively) in zip(late, native, strict=True):
        assert_same(ours, theirs, 1e-6)
        # A replayed update has no gradient yet, on any rank.
        assert natively == [True] * 4 and same == ([True, False] * 2 if schedule == "retain" else [False] * 4)
    for a, b in zip(late[0][0].weights, late[1][0].weights, strict=True):
        assert all(torch.equal(a[name], b[name]) for name in a), "replicas differ"
