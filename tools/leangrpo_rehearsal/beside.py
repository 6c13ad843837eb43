"""Compares what two runs noted beside gradients, weights and rewards; counts what the patched one did not repeat."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from leangrpo_rehearsal.base import Bound

CLIP_RANGE = "clip range of the ratio"
CLIPPED = "ratios clipped"
UNCLIPPED = "ratios not clipped"
NORM = "gradient norm"
LIMIT = "largest gradient norm allowed"
AUTOCAST = "autocast of policy forwards"
AVERAGES_MOVED = "averages of weights that have moved"
ROUNDING = 1e-6
"""Where gradients need not be bitwise equal: what a number may be off beside its share, since losses cancel to zero."""
SHARE = 1e-4
"""The same as a share of the largest value that is noted under the name."""
AT_THE_EDGE = (CLIPPED, UNCLIPPED)
"""Counts that jump where a ratio is rounded to the other side of a limit."""


@dataclasses.dataclass
class Beside:
    """One name under which the two runs noted something else."""

    name: str
    rank: int
    native: str
    patched: str
    difference: float
    """The largest one; infinite where the notes are no numbers, not finite, or not equally many."""
    scale: float
    """The largest absolute value that the native run noted."""

    def within(self, bound: Bound) -> bool:
        """Whether rounding explains it."""
        if bound.bitwise:
            return False
        if self.name in AT_THE_EDGE and math.isfinite(self.difference):
            return True
        share = max(SHARE, 10 * bound.weights, 10 * bound.rel_l2)
        return self.difference <= ROUNDING + share * self.scale

    def text(self) -> str:
        """In words."""
        return f"{self.name} on rank {self.rank}: {self.native} natively, {self.patched} patched"


def differences(native: Mapping[str, Any], patched: Mapping[str, Any], rank: int) -> list[Beside]:
    """Names under which one rank noted other values, or another number of them, between two optimizer steps."""
    found = []
    first, second = native.get("told", {}), patched.get("told", {})
    for name in sorted({*first, *second}):
        a, b = list(first.get(name, ())), list(second.get(name, ()))
        if a != b or any(value != value for value in a):  # not a number is equal to nothing, not even to itself
            found.append(Beside(name, rank, _shown(a, b), _shown(b, a), _distance(a, b), _scale(a)))
    first, second = native.get("averages", {}), patched.get("averages", {})
    for name in sorted({*first, *second}):
        a, b = first.get(name), second.get(name)
        if a is None or b is None or a.shape != b.shape or a.dtype != b.dtype:
            was, now = ("absent" if item is None else "there" for item in (a, b))
            found.append(Beside(name, rank, was, now, math.inf, 0.0))
        elif not bool((a == b).all()):
            distance = float((a.double() - b.double()).abs().max())
            scale = float(a.double().abs().max())
            distance = distance if math.isfinite(distance) else math.inf
            found.append(Beside(name, rank, "averaged weights", f"off by {distance:.3g}", distance, scale))
    return found


def _shown(values: Sequence[Any], others: Sequence[Any]) -> str:
    """The first value that differs, or how many there are where that differs."""
    if len(values) != len(others):
        return f"{len(values)} times"
    at = next(index for index, (a, b) in enumerate(zip(values, others, strict=True)) if a != b or a != a)
    return values[at] if isinstance(values[at], str) else f"{values[at]:.6g}"


def _numbers(values: Iterable[Any]) -> list[float] | None:
    values = list(values)
    found = [float(value) for value in values if isinstance(value, (int, float)) and math.isfinite(value)]
    return found if len(found) == len(values) else None


def _distance(a: Sequence[Any], b: Sequence[Any]) -> float:
    first, second = _numbers(a), _numbers(b)
    if first is None or second is None or len(first) != len(second):
        return math.inf
    return max((abs(x - y) for x, y in zip(first, second, strict=True)), default=0.0)


def _scale(values: Sequence[Any]) -> float:
    return max(map(abs, _numbers(values) or [0.0]), default=0.0)


def decided(told: Iterable[Mapping[str, list[Any]]]) -> tuple[int, int]:
    """In how many updates the clip range held back some ratios and not others, and in how many the norm was cut.

    Args:
        told: what one rank noted, update by update.
    """
    ratios = norms = 0
    for notes in told:
        ratios += bool(sum(notes.get(CLIPPED, ())) and sum(notes.get(UNCLIPPED, ())))
        found = zip(notes.get(NORM, ()), notes.get(LIMIT, ()), strict=False)
        norms += any(math.isfinite(norm) and norm > limit for norm, limit in found)
    return ratios, norms


def moved(told: Iterable[Mapping[str, list[Any]]]) -> bool:
    """Whether an average of the weights was seen, and changed.

    Args:
        told: what one rank noted, update by update, and after the last one.
    """
    return any(sum(notes.get(AVERAGES_MOVED, ())) for notes in told)


@dataclasses.dataclass
class Repeated:
    """Of one rollout and the first update after it, on one rank: what upstream evaluates twice, counted in samples'
    evaluations of the policy, from outside of the runtime."""

    window: int
    rank: int
    possible: int
    """Evaluations with gradient that the untouched script makes in that update."""
    saved: int
    """By how many evaluations, of rollout and update together, the patched script makes fewer."""
    held: int
    """How many of the rollout it made with a gradient, to hold their graphs."""

    @property
    def missing(self) -> int:
        """How many it evaluated again all the same."""
        return self.possible - self.saved

    @property
    def unused(self) -> int:
        """How many were held and evaluated again, or not at all in this update."""
        return max(self.held - self.saved, 0)


def repeated(native: Sequence[Sequence[Mapping[str, Any]]], patched: Any, every: int) -> list[Repeated]:
    """Per rollout and rank, what was not evaluated again.

    Args:
        native, patched: `Run.updates` of both.
        every: updates per rollout.
    """
    found = []
    for window, at in enumerate(range(0, min(len(native), len(patched)), every)):
        for rank in range(len(native[at])):
            was, now = (_rows(run, at, rank) for run in (native, patched))
            saved = sum(was.values()) - sum(now.values())
            found.append(Repeated(window + 1, rank, was["grad"], saved, was["no_grad"] - now["no_grad"]))
    return found


def _rows(run: Sequence[Sequence[Mapping[str, Any]]], at: int, rank: int) -> dict[str, int]:
    """Evaluations since the update before; records count from the start."""
    now = run[at][rank].get("rows", {})
    before = run[at - 1][rank].get("rows", {}) if at else {}
    return {kind: int(now.get(kind, 0)) - int(before.get(kind, 0)) for kind in ("grad", "no_grad")}
