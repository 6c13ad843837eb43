"""Which way a window runs, from what was measured in this run. Plain arithmetic: no torch, no state.

A *step* is a selected trajectory step of one row, with all its network calls. A way is added by adding its function to
`WAYS`. Reweight's would have no graph to hold, but the buffers of a gradient, in place of `figures.graph`; the update's
forward is gone as with `retain`, and `figures.backward` stays, earlier.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

CLOSE = 0.25
"""Plans that are no further apart than this part of a window are run in turn and timed: what the walk of held graphs
costs no probe tells, and a few windows cost little beside a training run."""
WORTH = 0.005
"""The part of a window that a way must save to be chosen: less is not told from noise."""


class Figures(NamedTuple):
    """What was measured. Seconds are per step, unless they are said to be per window.

    Attributes:
        window: a native window: its rollout and its updates, without rewards.
        rollout, update, backward: a forward without a graph, one with, and the walk through it, natively.
        extra: what a kept call takes beyond `rollout`.
        replay: what the update spends on a held call in place of `update`.
        checks: per window: looks at the weights.
        graph: bytes.
        budget: bytes of kept graphs.
        selected: steps that may be kept.
        share: the part of them that the first update trains.
        host: steps for which there is room in host memory besides.
    """

    window: float
    rollout: float
    update: float
    backward: float
    extra: float
    replay: float
    checks: float
    graph: float
    budget: float
    selected: float
    share: float = 1.0
    host: float = 0.0

    @property
    def gain(self) -> float:
        """Seconds that one kept step saves."""
        return self.share * (self.update - self.replay) - self.extra


_LOWEST = ("update", "budget", "share", "host")  # of these the smallest is the worst rank's, of others the largest
_WHOLE = ("graph", "budget", "selected", "host")  # bytes and counts; the others go as billionths
_MOST = 1 << 62


def _scale(name: str) -> float:
    return (1 if name in _LOWEST else -1) * (1.0 if name in _WHOLE else 1e9)


def pack(figures: Figures) -> list[int]:
    """Integers; the smallest of all ranks, place by place, are the worst rank's figures."""
    scaled = [value * _scale(name) for name, value in figures._asdict().items()]
    return [round(min(max(value, -_MOST), _MOST)) for value in scaled]


def unpack(packed: list[int]) -> Figures:
    """The figures behind such integers, to the nanosecond and the byte."""
    found = {}
    for name, value in zip(Figures._fields, packed, strict=True):
        size = float(value) if abs(value) < _MOST else math.copysign(math.inf, value)
        found[name] = size / _scale(name) + 0.0  # no -0
    return Figures(**found)


class Way(NamedTuple):
    """How windows run: `schedule`, and how gradients are reduced, a value of LEANGRPO_SYNC."""

    schedule: str
    sync: str


class Plan(NamedTuple):
    """A schedule, how many steps it keeps, and how many seconds of a native window it saves."""

    schedule: str
    steps: int
    saves: float


def recompute(figures: Figures) -> Plan:
    """Upstream's own behaviour."""
    return Plan("recompute", 0, 0.0)


def retain(figures: Figures) -> Plan:
    """As many graphs as the budget holds."""
    fits = figures.selected
    if math.isfinite(figures.budget) and figures.graph > 0:
        fits = math.floor(min(figures.budget // figures.graph + figures.host, figures.selected))
    return Plan("retain", int(fits), fits * figures.gain - figures.checks)


WAYS: tuple[Callable[[Figures], Plan], ...] = (recompute, retain)


def choose(figures: Figures) -> list[Plan]:
    """The plans, best first. One that saves less than is worth it comes after `recompute`."""
    least = WORTH * figures.window
    return sorted((way(figures) for way in WAYS), key=lambda plan: (0 < plan.saves <= least, -plan.saves))


def close(plans: list[Plan], figures: Figures) -> list[str]:
    """Schedules that may be as good as the first plan's."""
    best, *others = plans
    margin = CLOSE * figures.window
    return [plan.schedule for plan in others if abs(best.saves - plan.saves) < margin and (plan.steps or best.steps)]


def reason(plans: list[Plan], figures: Figures) -> str:
    """Why the first one, in one line, with the figures."""
    best, other = plans[0], plans[1]
    retained = next(plan for plan in plans if plan.schedule == "retain")
    ms = {name: f"{value * 1e3:.3g} ms" for name, value in figures._asdict().items()}
    held = f"graphs of {retained.steps} of {figures.selected:.0f} selected steps"
    fit = f"{held} fit {figures.budget / 1e9:.3g} GB" if math.isfinite(figures.budget) else f"{held} fit"
    each = f"a step: {ms['update']} of forward less in the update"
    each += f" for {figures.share:.0%} of them" if figures.share < 1 else ""
    each += f", {ms['extra']} more in the rollout, {ms['replay']} to replay; {ms['checks']} of checks per window; "
    each += f"natively {ms['rollout']} rollout, {ms['backward']} backward"
    if best.schedule == "recompute" and not retained.steps:
        return f"recompute: {fit} (one takes {figures.graph / 1e9:.3g} GB)"
    saved = f"{abs(retained.saves) / figures.window:.1%} of a window"
    if best.schedule == "recompute":
        verb = "would cost" if retained.saves < 0 else "would save only"
        return f"recompute: to retain {verb} {saved} ({each})"
    return f"{best.schedule}: {fit}; saves about {saved} ({each}); runner-up {other.schedule}"
