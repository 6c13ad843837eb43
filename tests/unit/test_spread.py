"""Sums per prompt group that are spread over the ranks: shared prompts under FSDP1, with LEANGRPO_BUFFERS=affine."""

import os
from typing import Any

import pytest
import torch
from support import parted, ranks
from support.parted import TRAINED, Run, Sizes, Trainer, check, job
from support.wrapped import UNITS
from torch import Tensor

from leangrpo_core import agree
from leangrpo_core.reweight.multiples import NO_MULTIPLE
from leangrpo_core.reweight.spread import SpreadBuffers, runs
from leangrpo_core.reweight.update import NO_LINE

AFFINE = {
    "LEANGRPO_LAYOUT": "shared", "LEANGRPO_SCHEDULE": "reweight", "LEANGRPO_BUFFERS": "affine", "LEANGRPO_AUDIT": "off",
}  # fmt: skip


class Clipped(Trainer):
    def advantages(self, advantages: Tensor) -> Tensor:
        return advantages.clamp(max=0.5)


class Equal(Trainer):
    """All of a group have the same reward."""

    def score(self, reward: Tensor) -> Tensor:
        return torch.zeros_like(reward)


class Far(Trainer):
    """A large mean, which eats up digits of the rewards, natively as well."""

    def score(self, reward: Tensor) -> Tensor:
        return (reward * 2**12).round() / 2**12 + 1000


class Unrewarded(Trainer):
    """On rank 0 one sample's reward never comes, on rank 1 none of the second part's."""

    samples = 0

    def unrewarded(self, row: int) -> bool:
        self.samples += 1
        return row == 1 if self.rank == 0 else 3 < self.samples <= 6


CASES = {"as it is": Trainer, "clipped": Clipped, "equal": Equal, "far": Far, "unrewarded": Unrewarded}


def sides(rank: int, world: int, kind: str, sizes: Sizes, names: list[str]) -> dict[str, tuple[Run, Run, list[float]]]:
    """By case: patched, native, and what the sums took of a whole gradient at most, after each exchange."""
    held: list[float] = []
    exchange = SpreadBuffers.exchange

    def measured(self: SpreadBuffers) -> None:
        exchange(self)
        groups = [grads for group in self.groups.values() for grads in (group.sums, group.products or [])]
        held.append(sum(grad.numel() for grads in groups for grad in grads if grad is not None))

    SpreadBuffers.exchange = measured
    found = {}
    for name in names:
        parted.Trainer = CASES[name]  # type: ignore[misc]
        native = job(rank, world, kind, sizes, None)
        held.clear()
        found[name] = job(rank, world, kind, sizes, AFFINE), native, list(held)
        for setting in AFFINE:
            os.environ.pop(setting)
    return found


def compared(world: int, kind: str, sizes: Sizes, names: list[str]) -> dict[str, list[tuple[Run, list[float]]]]:
    by_rank = ranks.run(sides, world, kind, sizes, names, seconds=60 * len(names))
    for name in names:
        check([found[name][0] for found in by_rank], [found[name][1] for found in by_rank])
    return {name: [(found[name][0], found[name][2]) for found in by_rank] for name in names}


def test_two_ranks() -> None:
    """Whatever the fit does not explain is recomputed, on both ranks."""
    sizes = Sizes(prompts=2, group=6, update=12, until=1)
    found = compared(2, "fsdp", sizes, list(CASES))
    for name, by_rank in found.items():
        for side, held in by_rank:
            windows, whole = side.windows, sum(grad.numel() for grad in side.gradients[0].values())
            assert len(windows) == 4 and all(window["kept"] == 3 * TRAINED for window in windows)
            assert max(held) <= 1.01 * whole  # two sums, half of each: FSDP1 pads
            if name in ("as it is", "far"):
                assert [(w["recomputed"], w["gradients"]) for w in windows] == [(0, 2)] * 4
                assert side.counted["all_to_all"] == 12 * UNITS and side.counted["reduce_scatter"] == 4 * UNITS
    clipped = [window for side, _ in found["clipped"] for window in side.windows]
    assert any(window["reasons"].get(NO_LINE) for window in clipped)
    assert any(0 < window["recomputed"] < 9 for window in clipped) and NO_MULTIPLE not in str(clipped)
    assert [w["gradients"] for side, _ in found["equal"] for w in side.windows] == [1.5] * 8
    assert all(window["recomputed"] == 0 for side, _ in found["unrewarded"] for window in side.windows)
    assert max(w["gradients"] for side, _ in found["unrewarded"] for w in side.windows) > 3


FOUR = [("fsdp", Sizes(group=6, update=6, until=2)), ("fsdp", Sizes(group=4, update=4, prompts=2, until=4))]


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("kind", "sizes"), [*FOUR, *((kind, FOUR[0][1]) for kind in ("fsdp-orig", "fsdp-grad-op", "fsdp-none"))]
)
def test_four_ranks(kind: str, sizes: Sizes) -> None:
    """Pairs of ranks serve a prompt, so sums of two prompts are spread over all four; or all four serve one."""
    for side, _ in compared(4, kind, sizes, ["as it is"])["as it is"]:
        teams = 2 if sizes.group == 6 else 1
        assert all(w["recomputed"] == 0 for w in side.windows if w["kept"])
        assert max(w["gradients"] for w in side.windows) == 1 + 2 * teams / 4


@pytest.mark.parametrize(
    ("size", "ranks_", "expected"), [(8, 4, [2, 2, 2, 2]), (5, 4, [2, 2, 1, 0]), (1, 3, [1, 0, 0])]
)
def test_every_place_has_one_owner(size: int, ranks_: int, expected: list[int]) -> None:
    assert runs(size, ranks_) == expected and sum(runs(size, ranks_)) == size


def unequal(rank: int, world: int) -> dict[str, Any]:
    """Three ranks of which the second has no gradient in the first turn and the third none at all of one weight."""
    weights = [torch.zeros(3), torch.zeros(2)]
    buffers = SpreadBuffers(group=2, base=10, team=3, weights=weights)
    for row in (10, 11):
        gradient = buffers.of(row, 2)
        gradient[:] = [torch.arange(5.0) + 10 * rank + row, None if rank == 2 else torch.ones(1) * (rank + 1) * row]
        buffers.complete([row])
        if (rank, row) != (1, 10):
            buffers.reward(row, float(rank + row))
    buffers.exchange()
    lines = dict.fromkeys(buffers.groups, (2.0, 0.5))
    left, rewards = sorted(buffers.single), dict(buffers.groups[0, 0].rewards)
    total = buffers.take({row: 3.0 for row in left}, lines)
    return {"left": left, "rewards": rewards, "total": total, "shares": buffers.shares, "live": buffers.live,
            "alone": alone()}  # fmt: skip


def alone() -> dict[Any, float]:
    """Each rank serves prompts of its own: the reference of each group's rewards."""
    buffers = SpreadBuffers(group=1, base=0, team=1, weights=[torch.zeros(1)])
    for row in (0, 1):
        buffers.of(row, 1)[:] = [torch.ones(3)]
        buffers.complete([row])
        buffers.reward(row, float(10 * agree.rank() + row))
    buffers.exchange()
    return {number: group.reference for number, group in buffers.groups.items()}


def test_ranks_that_have_other_numbers_of_samples() -> None:
    by_rank = ranks.run(unequal, 3)
    samples = {(rank, row): float(rank + row) for rank in range(3) for row in (10, 11) if (rank, row) != (1, 10)}
    first = samples[0, 10]
    assert all(found["rewards"] == {name: r - first for name, r in samples.items()} for found in by_rank)
    assert [found["left"] for found in by_rank] == [[], [10], []]
    assert all(found["live"] == 0 for found in by_rank)
    assert all(found["alone"] == {(r, n): 10 * r + n for r in range(3) for n in range(2)} for found in by_rank)
    weights = {name: 2.0 + 0.5 * (r - first) for name, r in samples.items()}
    expected = [
        sum(w * (torch.arange(5.0) + 10 * rank + row) for (rank, row), w in weights.items()),
        sum(w * (rank + 1) * row * torch.ones(1) for (rank, row), w in weights.items() if rank != 2),
    ]
    for place, whole in enumerate(expected):
        shares = torch.cat([found["shares"][place] for found in by_rank])
        torch.testing.assert_close(shares, whole, rtol=1e-6, atol=0)
    total = by_rank[1]["total"]
    torch.testing.assert_close(total[0], 3.0 * (torch.arange(5.0) + 20), rtol=1e-6, atol=0)
    assert by_rank[0]["total"] == by_rank[2]["total"] == []


def test_a_gradient_that_is_not_finite_stays_out() -> None:
    """It is recomputed, or stopped at, as natively; sums that others share must not have it."""
    (found,) = ranks.run(not_finite, 1)
    assert found == ([4], {(0, 3)})


def not_finite(rank: int, world: int) -> Any:
    buffers = SpreadBuffers(group=2, base=3, team=1, weights=[torch.zeros(2)])
    for row in (3, 4):
        buffers.of(row, 1)[:] = [torch.tensor([1.0, float("nan") if row == 4 else 1.0])]
        buffers.complete([row])
        buffers.reward(row, 1.0)
    buffers.exchange()
    return list(buffers.single), set(buffers.groups[0, 0].rewards)
