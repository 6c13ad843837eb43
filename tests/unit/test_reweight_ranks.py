"""Reweight on two ranks: scale first, reduce once, and recompute on all ranks or on none where the wrapper reduces."""

from typing import Any

import pytest
from support import ranks
from support.check import assert_same
from support.grpo import Hooks
from support.wrapped import UNITS, Side, pair, replicas_equal
from torch import Tensor

ENV = {
    "LEANGRPO_SCHEDULE": "reweight",
    "LEANGRPO_BUFFERS": "sample",
    "LEANGRPO_SYNC": "upstream",
    "LEANGRPO_BUDGET_GB": "unlimited",
}


def per_step(rank: int) -> Hooks:
    """On rank 1 one row's steps count unequally."""
    made = [0]

    def loss(value: Tensor) -> Tensor:
        made[0] += 1
        return value * (2.0 if rank == 1 and made[0] % 12 == 5 else 1.0)

    return Hooks(loss=loss)


def clipped(rank: int) -> Hooks:
    return Hooks(advantages=lambda a: a.clamp(max=0.5) if rank == 1 else a)


def other_inputs(rank: int) -> Hooks:
    return Hooks(update_latents=lambda latents, row, step: latents + 1e-3 * (rank == 0 and row == 2))


def late(rank: int) -> Hooks:
    """On rank 0 a reward never comes."""
    return Hooks(rewards_later=(0, 1, 3) if rank == 0 else None)


CASES: dict[str, dict[str, Any]] = {
    "sample": {},
    "two updates": {"config": {"accumulate": 2}},
    "checkpointing": {"checkpointing": True},
    "affine": {"env": {"LEANGRPO_BUFFERS": "affine"}},
    "late": {"env": {"LEANGRPO_SYNC": "late"}, "config": {"accumulate": 2}},
    "unequal steps on one rank": {"hooks": per_step, "audit": True},
    "clipped on one rank": {"hooks": clipped, "env": {"LEANGRPO_BUFFERS": "affine"}},
    "a late reward on one rank": {"hooks": late, "env": {"LEANGRPO_BUFFERS": "affine"}},
    "other inputs on one rank": {"hooks": other_inputs},
    "room for two": {"env": {"LEANGRPO_BUDGET_GB": "80e-6"}},
    "adapters": {"adapters": True},
}


def trainings(rank: int, world: int, kind: str, names: list[str]) -> list[tuple[Side, Side]]:
    found = []
    for name in names:
        options = dict(CASES[name])
        options["config"] = {"rollouts": 1} | options.get("config", {})
        options["env"] = (
            ENV | options.get("env", {}) | {"LEANGRPO_AUDIT": "every:1" if options.pop("audit", 0) else "off"}
        )
        found.append(pair(rank, world, kind, options))
    return found


def check(kind: str, names: list[str]) -> dict[str, list[Side]]:
    """Compares each case with the native training; returns the reweighted sides of each rank."""
    by_rank = ranks.run(trainings, 2, kind, names, seconds=30 * len(names))
    sides: dict[str, list[Side]] = {}
    for place, name in enumerate(names):
        for found in by_rank:
            lean, native = found[place]
            assert_same(lean.result, native.result, rtol=5e-6 if "affine" in str(CASES[name]) else 2e-6)
            sides.setdefault(name, []).append(lean)
        if kind == "ddp" or "none" in kind:
            assert replicas_equal([side.result for side in sides[name]]) == (kind != "none")
        assert all(side.window["kept"] for side in sides[name])
    return sides


def test_fsdp1() -> None:
    """Gradients are whole until they are scaled; then a backward that adds nothing reduces them once."""
    sides = check("fsdp", ["affine", "two updates", "unequal steps on one rank", "room for two"])
    assert [s.window["recomputed"] for s in sides["affine"]] == [0, 0]
    for side in sides["affine"]:
        assert side.collectives["reduce_scatter"] == UNITS
    for side in sides["two updates"]:  # the second one is native, of six steps
        assert side.collectives["reduce_scatter"] == UNITS + 6 * UNITS
    # Every rank makes the calls again that one rank needs.
    first, second = (side.window for side in sides["unequal steps on one rank"])
    assert (first["recomputed"], second["recomputed"]) == (0, 3)
    assert second["reasons"] == {"the loss weights a sample's steps unequally": 3}
    again = sides["unequal steps on one rank"]
    assert len({side.collectives["reduce_scatter"] for side in again}) == 1
    assert [s.window["kept"] for s in sides["room for two"]] == [6, 6]


def test_ddp() -> None:
    sides = check("ddp", ["sample", "clipped on one rank", "unequal steps on one rank"])
    assert [s.window["recomputed"] for s in sides["unequal steps on one rank"]] == [0, 3]


def both_kinds(rank: int, world: int) -> dict[str, tuple[Side, Side]]:
    return {kind: trainings(rank, world, kind, ["sample"])[0] for kind in ("fsdp-bf16", "fsdp2")}


def test_what_cannot_be_scaled_before_it_is_reduced_keeps_graphs() -> None:
    for rank, found in enumerate(ranks.run(both_kinds, 2)):
        for lean, native in found.values():
            assert_same(lean.result, native.result)
            assert lean.window["replayed"] == 12 and lean.window["peak_held_bytes"] > 0
            assert lean.said.count("from here on graphs are kept") == (rank == 0)


def alone(rank: int, world: int) -> dict[str, tuple[Side, Side]]:
    options = {"config": {"rollouts": 3, "accumulate": 2}, "env": ENV | {"LEANGRPO_AUDIT": "off"}}
    return {kind: pair(rank, world, kind, options) for kind in ("fsdp", "fsdp-orig")}


def test_fsdp1_on_one_rank() -> None:
    """Nothing is reduced, but with use_orig_params autograd leaves gradients where the weights do not show them."""
    (found,) = ranks.run(alone, 1)
    for kind, (lean, native) in found.items():
        assert_same(lean.result, native.result, rtol=2e-6)
        assert ("use_orig_params on one rank: from here on graphs are kept" in lean.said) == (kind == "fsdp-orig")
        assert lean.window["replayed"] > 0 and (lean.window["peak_held_bytes"] > 0) == (kind == "fsdp-orig")


@pytest.mark.matrix
@pytest.mark.parametrize("kind", ["none", "ddp", "fsdp", "fsdp-orig", "fsdp-grad-op", "fsdp-grad-op-orig", "fsdp-none"])
def test_every_wrapper(kind: str) -> None:
    frozen = "fsdp" in kind and "orig" not in kind  # FSDP1 needs the original weights where some of a unit are frozen
    without = ["late"] if kind == "none" else ["adapters"] if frozen else []
    check(kind, [name for name in CASES if name not in without])
