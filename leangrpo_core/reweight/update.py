"""LEANGRPO_SCHEDULE=reweight, the update's side: what each buffer is multiplied by, and what must be recomputed.

Upstream's loss has left the true cotangent v of each call at its leaf. A sample for which v = c u at all its calls
counts c times its buffer. Every other is recomputed natively with v; where its gradient is already part of a group's
sums, and so counted s times, with v - s u.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .. import agree, sync
from ..errors import LeanError
from ..replay import Replay
from ..rows import join
from ..window import Window
from . import locally
from .buffers import finite
from .multiples import NO_MULTIPLE, NOT_FINITE, SPREAD, certainty, coefficient, fit, measure
from .rollout import Part, Reweight

NOT_TRAINED = "not all kept steps of a sample were trained"
NO_LINE = "a sample's weight is not affine in its reward"
FAR = "a reward is so far from its group's others that sums would round their weights away"
WORTH = 32.0
"""By how much the terms of a group's sums may be larger than its weights, which loses as many units of rounding."""


class Point(NamedTuple):
    """What a group's fit needs of a sample; see `Verdict`."""

    c: float
    certainty: float
    reason: str
    trained: bool
    whole: bool


@dataclass
class Verdict:
    """A sample: its c, and why that does not say all, or nothing."""

    parts: list[Part]
    c: float = 0.0
    certainty: float = 0.0
    reason: str = ""

    @property
    def trained(self) -> bool:
        return any(part.trained for part in self.parts)

    @property
    def whole(self) -> bool:
        return all(part.trained for part in self.parts)

    @property
    def point(self) -> Point:
        return Point(self.c, self.certainty, self.reason, self.trained, self.whole)


@dataclass
class Plan:
    """What to do.

    Attributes:
        weights: c of samples with a gradient of their own.
        lines: a and b of groups, by number.
        again: samples to recompute, with how often the buffers count them already, and why.
    """

    weights: dict[int, float] = field(default_factory=dict)
    lines: dict[Any, tuple[float, float]] = field(default_factory=dict)
    again: dict[int, tuple[float, str]] = field(default_factory=dict)


def settle(window: Window, wrapper: sync.Wrapper, net: nn.Module, replays: Sequence[Replay]) -> None:
    """At the boundary: adds the gradient of what was replayed to the weights' `.grad`.

    Raises:
        LeanError: LG610, on every rank, if ranks replayed unequal numbers of calls under a wrapper that communicates.
    """
    ours = window.reweight
    assert ours is not None
    verdicts = judge(ours)
    plan = decide(ours, verdicts)
    _recompute(window, wrapper, plan, verdicts, replays)
    total = ours.buffers.take(plan.weights, plan.lines)
    if not wrapper.collective:
        if total:
            locally.deliver(sync.bare(net), total)  # the weights that the rollout walked, in their order
    elif agree.anyones([bool(total or ours.buffers.shares)])[0]:
        locally.deliver_sharded(net, total, ours.buffers.shares, replays[-1].for_audit())
    trained = [row for row, verdict in verdicts.items() if verdict.trained]
    ours.other_inputs = {
        key[1:]
        for row in trained
        for key in (part.key for part in verdicts[row].parts if not part.trained)
        if key not in window.held
    }
    ours.samples = dict(Counter(plan.again[row][1] if row in plan.again else "" for row in trained))


def judge(ours: Reweight) -> dict[int, Verdict]:
    """Each sample's c."""
    verdicts: dict[int, Verdict] = {}
    for (row, _, _), part in ours.parts.items():
        verdicts.setdefault(row, Verdict([])).parts.append(part)
    trained = [part for part in ours.parts.values() if part.trained]
    measured = dict(
        zip((part.key for part in trained), measure([(p.cotangents(), p.provisional) for p in trained]), strict=True)
    )
    for verdict in verdicts.values():
        found = [measured[part.key] for part in verdict.parts if part.trained]
        verdict.c, verdict.reason = coefficient(found)
        verdict.certainty = certainty(found)
        if not verdict.reason and verdict.c and not verdict.whole:
            verdict.reason = NOT_TRAINED
    return verdicts


def decide(ours: Reweight, verdicts: dict[int, Verdict]) -> Plan:
    """What counts how often, and what is recomputed."""
    plan, buffers = Plan(), ours.buffers
    for row, grads in buffers.single.items():
        verdict = verdicts.get(row)
        if verdict is None or not verdict.trained:
            continue
        if not verdict.reason and verdict.c and not finite(grads):
            verdict.reason = NOT_FINITE
        if verdict.reason:
            plan.again[row] = 0.0, verdict.reason
        else:
            plan.weights[row] = verdict.c
    points = buffers.everyones({row: verdict.point for row, verdict in verdicts.items()})
    again: dict[Any, tuple[float, str]] = {}
    for number, group in buffers.groups.items():
        line, found = weigh(group.rewards, {name: points[name] for name in group.rewards if name in points})
        again |= found
        if line is not None:
            plan.lines[number] = line
    plan.again |= {row: again[buffers.name(row)] for row in verdicts if buffers.name(row) in again}
    return plan


def weigh(
    rewards: Mapping[Any, float], points: Mapping[Any, Point]
) -> tuple[tuple[float, float] | None, dict[Any, tuple[float, str]]]:
    """A group's a and b, or None if its sums are of no use; and which of its samples are recomputed, as in `Plan`.

    Args:
        rewards: of the samples in its sums, centred.
        points: what is known of those of which some call was kept.
    """
    sound = {name: (rewards[name], point.c) for name, point in points.items() if not point.reason}
    line = fit(sound, max((points[name].certainty for name in sound), default=0.0))
    counted = {name: line.a + line.b * rewards[name] for name in points if name not in line.explained}
    # What was not trained has no call of the update that could take back what the sums hold of it.
    lost = len(points) < len(rewards) or any(s and not points[name].whole for name, s in counted.items())
    terms = abs(line.a) + abs(line.b) * max(map(abs, rewards.values()), default=0.0)
    far = terms > WORTH * max((abs(c) for _, c in sound.values()), default=0.0)
    useless = lost or far or not any(point.trained for point in points.values())
    if useless:
        counted = {name: 0.0 for name, point in points.items() if point.c or point.reason}
    other = NOT_TRAINED if lost else FAR if far else NO_LINE
    again = {name: (s, points[name].reason or other) for name, s in counted.items() if points[name].trained}
    return None if useless else (line.a, line.b), again


def _recompute(
    window: Window, wrapper: sync.Wrapper, plan: Plan, verdicts: dict[int, Verdict], replays: Sequence[Replay]
) -> None:
    parts = {(id(part.call), part.place): part for verdict in verdicts.values() for part in verdict.parts}
    found = [[parts[id(row.call), row.place] for row in replay.rows] for replay in replays]
    flags = [any(part.key[0] in plan.again for part in rows) for rows in found]
    if wrapper.collective:
        if agree.minimum(len(flags)) != -agree.minimum(-len(flags)):
            raise LeanError("LG610", "ranks replayed unequal numbers of calls", "train with LEANGRPO_SCHEDULE=retain")
        flags = agree.anyones(flags)
    for replay, rows, flag in zip(replays, found, flags, strict=True):
        if not flag:
            continue
        replay.check()
        # A wrapper that communicates needs the whole call on every rank; elsewhere its other rows are left out.
        places = [n for n, part in enumerate(rows) if wrapper.collective or part.key[0] in plan.again]
        call = replay.for_audit(places)
        call.walk_natively(_cotangents([rows[n] for n in places], plan))
        again = [part for part in rows if part.key[0] in plan.again]
        window.replayed -= len(again)
        window.recomputed += len(again)
        for part in again:
            window.count(plan.again[part.key[0]][1])


def _cotangents(parts: Sequence[Part], plan: Plan) -> list[Tensor]:
    columns = []
    for part in parts:
        s, _ = plan.again.get(part.key[0], (None, ""))
        v = part.cotangents()
        if s is None:
            columns.append([torch.zeros_like(grad) for grad in v])
        else:
            columns.append([grad - s * u if s else grad for grad, u in zip(v, part.provisional, strict=True)])
    return [join(list(column)) for column in zip(*columns, strict=True)]


WEIGHED = (NO_MULTIPLE, SPREAD, NO_LINE, FAR)


def in_vain(samples: dict[str, int]) -> str:
    """Why another window would go as badly: what most samples of this one were recomputed for, or nothing."""
    if sum(samples.get(reason, 0) for reason in WEIGHED) * 2 <= sum(samples.values()):
        return ""
    return max(WEIGHED, key=lambda reason: samples.get(reason, 0))
