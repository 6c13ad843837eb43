"""LEANGRPO_SYNC=late and group: one reduction per update, or prompt group, replayed or recomputed; never none."""

import gc
import itertools
import os
from typing import Any

import pytest
import torch
from support import ranks
from support.check import assert_same
from support.grpo import Config, Hooks, Policy, Result, train
from support.wrapped import UNITS, Side, job, replicas_equal, wrap
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from leangrpo_core import Lean, agree, fsdp1, guard, late, memory
from leangrpo_core.kept import Kept

EXACT = 1e-12
MATRIX = pytest.mark.matrix


def averaged(rank: int, world: int, schedule: str, sync: str) -> tuple[Result, list[bool]]:
    """One rank under DDP; the result, and per update whether gradients were the same on all ranks before the flush."""
    os.environ |= {"LEANGRPO_SCHEDULE": schedule, "LEANGRPO_SYNC": sync}
    same: list[bool] = []

    def look(net: nn.Module) -> None:
        sums = agree.everyones(guard.checksum(p.grad for p in net.parameters() if p.grad is not None))
        same.append(sums[0] == sums[1])

    torch.manual_seed(0)
    net = DistributedDataParallel(Policy())
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    lean = Lean() if schedule else None
    config = Config(rank=rank, accumulate=2, group=1)
    return train(lean, net, optimizer, config, Hooks(before_flush=look)), same


@pytest.fixture(scope="module")
def native() -> Any:
    return ranks.run(averaged, 2, "", "upstream")


@pytest.mark.parametrize(
    ("schedule", "sync"), [("retain", "late"), ("recompute", "late"), ("retain", "group"), ("recompute", "group")]
)
def test_one_averaging_per_update(schedule: str, sync: str, native: Any) -> None:
    """No communication in any backward. A group's graphs are walked before the boundary, so that gradients differ there;
    averaged twice they would be equal."""
    found = ranks.run(averaged, 2, schedule, sync)
    for (ours, same), (theirs, natively) in zip(found, native, strict=True):
        assert_same(ours, theirs, 1e-6)
        # A replayed update has no gradient yet, on any rank.
        assert natively == [True] * 4
        assert same == ([True, False] * 2 if (schedule, sync) == ("retain", "late") else [False] * 4)
    for a, b in zip(found[0][0].weights, found[1][0].weights, strict=True):
        assert all(torch.equal(a[name], b[name]) for name in a), "replicas differ"


# -- FSDP1 and FSDP2 --------------------------------------------------------------------------------------------------

TWO_GROUPS = {"rows": 8, "accumulate": 4, "group": 2, "trained": 2, "steps": 3, "rollouts": 1, "clip": 0.0}


def sides(rank: int, world: int, kind: str, cases: list[dict[str, Any]]) -> tuple[Side, list[Side]]:
    """The native training, then each case's, in float64 and one process: a fork costs more than a training."""
    torch.set_default_dtype(torch.float64)

    def options(case: dict[str, Any]) -> dict[str, Any]:
        return case | {"config": TWO_GROUPS | case.get("config", {}), "env": {"LEANGRPO_AUDIT": "off"} | case["env"]}

    native = job(rank, world, kind, False, options({"env": {}}))
    return native, [job(rank, world, kind, True, options(case)) for case in cases]


def env(schedule: str, sync: str, **more: str) -> dict[str, str]:
    return {"LEANGRPO_SCHEDULE": schedule, "LEANGRPO_SYNC": sync} | more


def alive(rank: int) -> Hooks:
    """Prints, before each flush, how many graphs of kept calls are held."""

    def count(net: nn.Module) -> None:
        held = [item for item in gc.get_objects() if type(item) is Kept and item.outs]
        print(f"{len(held)} graphs")

    return Hooks(before_flush=count)


@pytest.mark.parametrize("kind", ["fsdp-orig", "fsdp2", "fsdp-none", pytest.param("fsdp-grad-op", marks=MATRIX)])
def test_once_per_update_or_group(kind: str) -> None:
    """Two updates of two groups each: the first one replayed, unless recomputed, the second one recomputed."""
    settings = list(itertools.product(("retain", "recompute"), ("upstream", "group", "late")))
    cases = [{"env": env(*setting), "hooks": alive} for setting in settings]
    cases.append({"env": env("retain", "group", LEANGRPO_AUDIT="every:1")})
    for native, found in ranks.run(sides, 2, kind, cases):
        for (schedule, sync), ours in zip([*settings, ("retain", "audited")], found, strict=True):
            assert_same(ours.result, native.result, 0 if sync == "upstream" else EXACT)
            expected = {"upstream": 16, "group": 4, "late": 2}.get(sync)
            if expected and kind != "fsdp-none":
                assert ours.collectives["reduce_scatter"] == UNITS * expected, (schedule, sync)
            if schedule == "retain":
                assert ours.window["replayed"] == 8
                assert ours.window["walks"] == {"late": 1, "upstream": 1}.get(sync, 2)
            if "graphs" in ours.said:  # those of the group before are free
                assert f"{ {'retain': 4 if sync == 'group' else 8}.get(schedule, 0)} graphs" in ours.said
        assert found[-1].window["audit_rel_l2"] < EXACT


def drops_a_loss(rank: int) -> Hooks:
    """The last call of the first update is made, but its loss is not walked, natively neither."""
    calls = iter(range(100))

    def backward(loss: Tensor) -> None:
        if next(calls) != 7:
            loss.backward()

    return Hooks(backward=backward)


def few(rank: int) -> Hooks:
    memory.Sizes.fits = lambda self, budget_bytes: [5, 3][rank]  # in this forked process only
    return Hooks()


@pytest.mark.parametrize("kind", ["fsdp-orig", "fsdp2", pytest.param("fsdp", marks=MATRIX), pytest.param("fsdp-none", marks=MATRIX)])
def test_other_calls_than_announced(kind: str) -> None:
    """More, fewer, a loss that is dropped, a part beyond the budget: each update is whole, by one more reduction."""
    cases = [
        {"env": env("recompute", "late"), "config": {"announced": 3}},
        {"env": env("recompute", "late"), "config": {"announced": 6}},
        {"env": env("recompute", "group"), "config": {"announced": 6, "group": 5}},
        {"env": env("retain", "late"), "hooks": few},
        {"env": env("retain", "group"), "hooks": few},
    ]
    # In each of two updates: before the announced end and at the flush; at the flush; 5 rows, 3 rows ...
    # ... 3 kept calls, then 5 recomputed ones, then an update; 3, the rest of the group, a group, then two groups.
    reductions = [4, 2, 3, 3, 5]
    for native, found in ranks.run(sides, 2, kind, cases):
        for ours, expected in zip(found, reductions, strict=True):
            assert_same(ours.result, native.result, EXACT)
            if kind != "fsdp-none":
                assert ours.collectives["reduce_scatter"] == UNITS * expected
        assert [ours.window["replayed"] for ours in found[3:]] == [3, 3]


def dropped(rank: int, world: int, kind: str) -> tuple[Side, Side]:
    native, _ = sides(rank, world, kind, [])
    torch.set_default_dtype(torch.float64)
    options: dict[str, Any] = {"config": TWO_GROUPS, "env": env("recompute", "late"), "hooks": drops_a_loss}
    return job(rank, world, kind, True, options), job(rank, world, kind, False, options)
