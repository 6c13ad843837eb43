"""Updates that are counted through from rollout to rollout: what is free of recomputation on average."""

from __future__ import annotations

import math

import pytest

from leangrpo_tools.plan import facts
from leangrpo_tools.plan.choice import Case
from leangrpo_tools.plan.cost import Rollout


def stepped(batches: int, step: int) -> float:
    """The slow way: batches before the first update of each rollout, over whole cycles."""
    done, free = 0, []
    rollouts = step // math.gcd(batches, step)
    for _ in range(rollouts):
        first = next((n for n in range(1, batches + 1) if (done + n) % step == 0), batches)
        free.append(first)
        done += batches
    return sum(free) / rollouts


@pytest.mark.parametrize(("batches", "step"), [(5, 2), (5, 3), (7, 4), (6, 4), (6, 3), (4, 4), (9, 2), (8, 5)])
@pytest.mark.parametrize("rows", [1, 3])
def test_the_average_over_a_cycle(batches: int, step: int, rows: int) -> None:
    size = Rollout(batches * rows, batches * rows, 10, 9, step * rows, 2.2, batch=rows, counted_on=True)
    assert size.free == pytest.approx(rows * stepped(batches, step)) and size.replayed == step * rows
    assert size.ratio == pytest.approx(size.cost(0) / size.cost(size.free)) == size.ratio_with(size.graphs)
    assert size.forwards(False)["no_grad"] - size.forwards(True)["no_grad"] == round(9 * size.free)


def test_five_batches_and_updates_of_two() -> None:
    size = Rollout(5, 5, 10, 9, 2, 2.2, counted_on=True)
    assert size.free / size.trained == 0.3
    assert Rollout(5, 5, 10, 9, 2, 2.2).free / 5 == 0.4  # counted from each rollout's start


def test_settings_that_a_script_needs_are_among_its_exports() -> None:
    assert facts.load("flowGRPO").scripts["wan2_1"].rounded_inputs
    case = Case(Rollout(4, 4, 10, 9, 2, 2.2), 2, "ddp", inputs="rounded")
    lines = {choice.schedule: choice.exports() for choice in case.choices()}
    assert "export LEANGRPO_INPUTS=rounded" in lines["retain"] and "export LEANGRPO_INPUTS=rounded" in lines["reweight"]
    assert not any("INPUTS" in line for line in lines["recompute"])
