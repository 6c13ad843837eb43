"""LEANGRPO_SYNC=late and group: one reduction per update, or prompt group, replayed or recomputed; never none."""

import gc
import os
from dataclasses import replace
from typing import Any

import pytest
import torch
from support import ranks
from support.check import assert_same
from support.grpo import Config, Hooks, Policy, Result, train
from support.wrapped import UNITS, Side, adapters_only, job, wrap
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from leangrpo_core import Lean, agree, fsdp1, guard, late, memory
from leangrpo_core.cutting import units_of
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


@pytest.mark.parametrize(("schedule", "sync"), [("retain", "late"), ("recompute", "late"), ("retain", "group")])
def test_one_averaging_per_update(schedule: str, sync: str, native: Any) -> None:
    """No communication in any backward. A group's graphs are walked before the boundary, so gradients differ there."""
    found = ranks.run(averaged, 2, schedule, sync)
    for (ours, same), (theirs, natively) in zip(found, native, strict=True):
        assert_same(ours, theirs, 1e-6)
        # A replayed update has no gradient yet, on any rank.
        assert natively == [True] * 4
        assert same == ([True, False] * 2 if (schedule, sync) == ("retain", "late") else [False] * 4)
    for a, b in zip(found[0][0].weights, found[1][0].weights, strict=True):
        assert all(torch.equal(a[name], b[name]) for name in a), "replicas differ"


# -- FSDP1 and FSDP2 --------------------------------------------------------------------------------------------------

ONE = {"rows": 2, "accumulate": 2, "group": 1, "trained": 2, "steps": 2, "rollouts": 1, "clip": 0.0}
TWO = ONE | {"rows": 8, "accumulate": 4, "group": 2, "steps": 3}  # updates
THREE = ONE | {"rows": 3, "accumulate": 3}  # groups


def sides(
    rank: int, world: int, kind: str, config: dict[str, Any], cases: list[dict[str, Any]]
) -> tuple[Side, list[Side]]:
    """The native training, then each case's, in float64 and one process: a fork costs more than a training."""
    torch.set_default_dtype(torch.float64)

    def options(case: dict[str, Any]) -> dict[str, Any]:
        more = {"config": config | case.get("config", {}), "env": {"LEANGRPO_AUDIT": "off"} | case.get("env", {})}
        return case | more

    native = job(rank, world, kind, False, options({}))
    return native, [job(rank, world, kind, case.get("lean", True), options(case)) for case in cases]


def env(schedule: str, sync: str, **more: str) -> dict[str, str]:
    return {"LEANGRPO_SCHEDULE": schedule, "LEANGRPO_SYNC": sync} | more


def alive(rank: int) -> Hooks:
    """Prints, before each flush, how many graphs of kept calls are held."""

    def count() -> int:
        return sum(type(item) is Kept and bool(item.outs) for item in gc.get_objects())

    before = count()  # left behind by tests of the process that this one was forked from
    return Hooks(before_flush=lambda net: print(f"{count() - before} graphs"))


@pytest.mark.parametrize(
    ("kind", "wide"),
    [
        ("fsdp-orig", False),
        ("fsdp2", False),
        *[pytest.param(k, True, marks=MATRIX) for k in ("fsdp", "fsdp-orig", "fsdp-grad-op", "fsdp-none", "fsdp2")],
    ],
)
def test_once_per_update_or_group(kind: str, wide: bool) -> None:
    """Updates of two groups; where it is `wide` there are two, the second one always recomputed, and audits, too."""
    config, updates = (TWO, 2) if wide else (ONE, 1)
    settings = [("retain", "group"), ("recompute", "late"), ("retain", "late"), ("recompute", "group")][
        : 4 if wide else 2
    ]
    cases = [{"env": env(*setting), "hooks": alive} for setting in settings]
    if wide:
        cases.append({"env": env("retain", "group", LEANGRPO_AUDIT="every:1")})
    kept = config["accumulate"] * 2
    for rank, (native, found) in enumerate(ranks.run(sides, 2, kind, config, cases)):
        for (schedule, sync), ours in zip(settings, found, strict=False):
            assert_same(ours.result, native.result, EXACT)
            if kind != "fsdp-none":
                per_update = {"group": 2, "late": 1}[sync]
                assert ours.collectives["reduce_scatter"] == UNITS * per_update * updates, (schedule, sync)
            if schedule == "retain":
                assert (ours.window["replayed"], ours.window["walks"]) == (kept, 2 if sync == "group" else 1)
                if not rank:  # those of the group before are free
                    assert f"{kept // 2 if sync == 'group' else kept} graphs" in ours.said
        if wide:
            assert_same(found[-1].result, native.result, EXACT)
            assert found[-1].window["audit_rel_l2"] < EXACT and found[-1].window["walks"] == 2


def drops_a_loss(rank: int) -> Hooks:
    """The last call of the update is made, but its loss is not walked."""
    calls = iter(range(100))

    def backward(loss: Tensor) -> None:
        if next(calls) != 5:
            loss.backward()

    return Hooks(backward=backward, after_flush=guard.parameters_of)


def few(rank: int) -> Hooks:
    memory.Sizes.fits = lambda self, budget_bytes: [5, 3][rank]  # in this forked process only
    return Hooks()


FEWER = {"env": env("recompute", "late"), "config": {"announced": 4}}
OVER = {"env": env("retain", "group"), "hooks": few}


@pytest.mark.parametrize("kind", ["fsdp-orig", "fsdp2"])
def test_fewer_calls_than_announced_and_a_budget(kind: str) -> None:
    """Reduced at the flush; a group, what is left of the next one in both kinds, a group."""
    for native, found in ranks.run(sides, 2, kind, THREE, [FEWER, OVER]):
        for ours, reductions in zip(found, (1, 4), strict=True):
            assert_same(ours.result, native.result, EXACT)
            assert ours.collectives["reduce_scatter"] == UNITS * reductions
        assert found[1].window["replayed"] == 3


@MATRIX
@pytest.mark.parametrize("kind", ["fsdp", "fsdp-orig", "fsdp-grad-op", "fsdp-none", "fsdp2"])
def test_other_calls_than_announced(kind: str) -> None:
    """More, fewer, a loss that is dropped, a part beyond the budget: each update is whole."""
    cases: list[dict[str, Any]] = [
        {"env": env("recompute", "late"), "config": {"announced": 2}},
        FEWER,
        {"env": env("retain", "late"), "hooks": few},
        OVER,
        {"lean": False, "hooks": drops_a_loss},
        {"env": env("recompute", "late"), "hooks": drops_a_loss},
    ]
    for native, found in ranks.run(sides, 2, kind, THREE, cases):
        more, fewer, over, by_group, other, dropped = found
        for ours in (more, fewer, over, by_group):
            assert_same(ours.result, native.result, EXACT)
        assert_same(dropped.result, other.result, EXACT)
        assert over.window["replayed"] == by_group.window["replayed"] == 3
        if kind != "fsdp-none":
            # After two rows, and what comes after them at the flush; at the flush; three kept graphs and three native
            # calls; as above; at the flush.
            expected = [UNITS * count for count in (2, 1, 2, 4, 1)]
            assert [side.collectives["reduce_scatter"] for side in (more, fewer, over, by_group, dropped)] == expected


def never_reduces(rank: int) -> Hooks:
    late._Call.walk_with_zeros = lambda self: None  # type: ignore[method-assign]  # in this forked process only
    return drops_a_loss(rank)


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        ("fsdp2", "LG612"),
        *[pytest.param(kind, "LG612", marks=MATRIX) for kind in ("fsdp", "fsdp-orig", "fsdp-grad-op")],
        pytest.param("fsdp-none", "LG609", marks=MATRIX),
    ],
)
def test_an_update_is_never_left_unreduced(kind: str, code: str) -> None:
    with pytest.raises(ranks.RankFailed) as caught:
        ranks.run(sides, 2, kind, THREE, [FEWER | {"hooks": never_reduces}])
    assert set(caught.value.errors) == {0, 1} and all(code in text for text in caught.value.errors.values())


@MATRIX
def test_a_step_without_flush_is_refused() -> None:
    with pytest.raises(ranks.RankFailed) as caught:
        ranks.run(
            sides, 2, "fsdp2", THREE, [FEWER | {"hooks": lambda rank: replace(drops_a_loss(rank), no_flush=True)}]
        )
    for text in caught.value.errors.values():
        assert "LG603" in text and "gradients that were not reduced" in text


# -- rows that do not fill an update ----------------------------------------------------------------------------------

ALL = ONE | {"rows": 3, "trained": 1, "rollouts": 2}
SOME = ALL | {"rows": 4, "moved": ((3, 1, 0), (2, 3, 1))}  # one row less than the rollout announced
PART = ALL | {"rows": 8, "accumulate": 4, "group": 2, "moved": ((5, 1, 0, 2, 3, 4, 6),) * 2}  # a group, half of one
SETTINGS = {
    "all": (("retain", "late"), ALL),
    "some": (("recompute", "late"), SOME),
    "part": (("retain", "group"), PART),
    "small budget": (("retain", "late", "0.00003"), ALL | {"rows": 5, "accumulate": 3, "trained": 2}),
}
LEFTOVERS = ("dropped", "dropped later", "zeroed", "zeroed later", "used")


class Spare(Policy):
    """Has a weight that no call uses, so that it has no gradient. The first one: it stands for all."""

    def __init__(self, **how: Any) -> None:
        super().__init__(**how)
        self.spare = nn.Parameter(torch.ones(2))


def leftovers(rank: int, world: int, kind: str, cases: list[dict[str, Any]]) -> list[tuple[Side, Side]]:
    """Each training with the runtime, and natively."""
    torch.set_default_dtype(torch.float64)
    found, native = [], {}
    for case in cases:
        key = str(case["config"])
        policy = {"policy": Spare} if kind == "fsdp2" else {}
        native[key] = native.get(key) or job(rank, world, kind, False, {"config": case["config"]} | policy)
        found.append((job(rank, world, kind, True, case | policy), native[key]))
    return found


FEW = ["all dropped", "part dropped", "some zeroed later", "part used"]
EVERY = [f"{setting} {leftover}" for setting in SETTINGS for leftover in LEFTOVERS]


def left(name: str, rollouts: int = 2) -> dict[str, Any]:
    (setting,) = [known for known in SETTINGS if name.startswith(known)]
    (schedule, sync, *budget), config = SETTINGS[setting]
    more = {"LEANGRPO_AUDIT": "off", "LEANGRPO_BUDGET_GB": budget[0] if budget else "unlimited"}
    config = config | {"leftover": name.removeprefix(f"{setting} "), "rollouts": rollouts}
    return {"env": env(schedule, sync, **more), "config": config}


@pytest.mark.parametrize(
    ("kind", "names", "rollouts"),
    [
        ("fsdp", FEW, 2),
        ("fsdp2", [*FEW, "part zeroed"], 2),
        *[pytest.param(kind, EVERY, 3, marks=MATRIX) for kind in ("fsdp", "fsdp-orig", "fsdp2")],
    ],
)
def test_rows_that_do_not_fill_an_update(kind: str, names: list[str], rollouts: int) -> None:
    """Their gradients are upstream's: it drops them, before the next rollout or after it, or goes on from them."""
    cases = [left(name, rollouts) for name in names if kind == "fsdp2" or name != "part zeroed"]
    for pairs in ranks.run(leftovers, 2, kind, cases, seconds=200):
        for ours, native in pairs:
            assert len(native.result.gradients) >= 2
            assert_same(ours.result, native.result, 1e-9)  # updates of AdamW apart


def test_zeros_beside_what_a_group_has_reduced() -> None:
    """Under FSDP1 nothing tells whether upstream has written them, so that the reduced part must go, too."""
    with pytest.raises(ranks.RankFailed) as caught:
        ranks.run(leftovers, 2, "fsdp", [left("part zeroed")])
    assert set(caught.value.errors) == {0, 1} and all("LG610" in text for text in caught.value.errors.values())


def no_room(rank: int) -> Hooks:
    memory.free_bytes = lambda device: [1e9, 1e4][rank]  # in this forked process only
    return Hooks()


@pytest.mark.parametrize("kind", [pytest.param("fsdp-orig", marks=MATRIX), "fsdp2"])
def test_no_room_for_whole_gradients_on_one_rank(kind: str) -> None:
    """Then each rank reduces as upstream does."""
    case = {"env": env("recompute", "late"), "hooks": no_room}
    for rank, (native, (ours,)) in enumerate(ranks.run(sides, 2, kind, ONE, [case])):
        assert_same(ours.result, native.result)
        assert ours.collectives == native.collectives
        assert ("no room on another rank" in ours.said) == (rank == 0)


def under_no_sync(rank: int, world: int) -> list[Tensor]:
    """Upstream accumulates by itself: the last of three calls is outside `no_sync`. Natively, and with the runtime."""
    os.environ |= env("recompute", "late")
    found = []
    for lean in (None, Lean()):
        torch.manual_seed(0)
        net = wrap("fsdp", Policy())
        assert isinstance(net, FullyShardedDataParallel)
        if lean is not None:
            with lean.rollout(rows=3, steps=1, trained=1, window=2):
                pass
        for row, scale in enumerate((1.0, 2.0, 3.0)):
            inputs = torch.full((1, 4, 8), scale + rank), torch.zeros(1), torch.ones(1, 8)
            with net.no_sync() if row < 2 else torch.enable_grad():
                out = net(*inputs) if lean is None else lean.policy_call(net, [row], [0], *inputs)
                out[0].square().sum().backward()
            assert fsdp1.reduces(net)
        if lean is not None:
            lean.flush(net, None)
        found.append(torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None]))
    return found


def test_upstreams_own_accumulation_is_left_alone() -> None:
    for native, ours in ranks.run(under_no_sync, 2):
        assert native.any() and torch.equal(native, ours)


def whole_gradients(rank: int, world: int, kind: str, adapters: bool) -> tuple[int, int]:
    """Bytes of gradients after a backward that reduces nothing; and the estimate."""
    net = wrap(kind, adapters_only(Policy()) if adapters else Policy())
    if isinstance(net, FullyShardedDataParallel):
        with net.no_sync():
            net(torch.ones(1, 4, 8), torch.zeros(1), torch.ones(1, 8))[0].sum().backward()
        grads = [unit._handle.flat_param.grad for unit in FullyShardedDataParallel.fsdp_modules(net) if unit._handle]
    else:
        net.set_requires_gradient_sync(False)  # type: ignore[operator]
        net(torch.ones(1, 4, 8), torch.zeros(1), torch.ones(1, 8))[0].sum().backward()
        groups = [group for unit in units_of(net) for group in unit._get_fsdp_state()._fsdp_param_groups]  # type: ignore[operator]
        grads = [getattr(p._unsharded_param, "grad", None) for group in groups for p in group.fsdp_params]
    shards = world if kind.startswith("fsdp-") and "none" not in kind else 1
    return sum(grad.numel() * grad.element_size() for grad in grads if grad is not None), memory.gradient_bytes(
        net, shards
    )


@pytest.mark.parametrize(
    ("kind", "adapters"),
    [
        ("fsdp-orig", True),
        pytest.param("fsdp-orig", False, marks=MATRIX),
        pytest.param("fsdp-none-orig", True, marks=MATRIX),
        pytest.param("fsdp2", True, marks=MATRIX),
    ],
)
def test_bytes_of_whole_gradients(kind: str, adapters: bool) -> None:
    """FSDP1 has one gradient per unit, frozen weights in it included."""
    for found, estimated in ranks.run(whole_gradients, 2, kind, adapters):
        assert estimated == pytest.approx(found, rel=0.01)


@MATRIX
@pytest.mark.parametrize("sync", ["group", "late"])
@pytest.mark.parametrize("kind", ["fsdp", "fsdp-orig", "fsdp2"])
def test_lean_and_native_windows_in_turn(kind: str, sync: str) -> None:
    """Ten rollouts on the same objects; native ones do not know the runtime."""
    config = ONE | {"rollouts": 10, "steps": 3}
    case = {"env": env("retain", sync), "hooks": lambda rank: Hooks(lean_in=lambda rollout: rollout % 2 == 0)}
    for native, (ours,) in ranks.run(sides, 2, kind, config, [case]):
        assert_same(ours.result, native.result, 1e-9)  # ten steps of AdamW apart
        assert [window["replayed"] for window in ours.windows] == [4] * 5


@MATRIX
@pytest.mark.parametrize("kind", ["fsdp", "fsdp-grad-op-orig", "fsdp-none"])
def test_reentrant_checkpointing(kind: str) -> None:
    """Each nested backward frees its unit: one graph after the other, reduced with the last of a group."""
    case = {"env": env("retain", "group"), "reentrant": True}
    for native, (ours,) in ranks.run(sides, 2, kind, TWO, [case]):
        assert_same(ours.result, native.result, EXACT)
        assert ours.window["replayed"] == 8 and ours.window["flush"] == "joint"
        if kind != "fsdp-none":
            assert ours.collectives["reduce_scatter"] == UNITS * 4
