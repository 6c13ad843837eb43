"""Which way a window runs, from what was measured in this run. Plain arithmetic: no torch, no state.

A *step* is a selected trajectory step of one row, with all its network calls. A way is added by adding its function to
`WAYS`.
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
        gradient: bytes of one gradient of all that trains; infinite where no gradient can be kept in place of graphs.
        samples: of which they are steps.
        affine: how many gradients sums per prompt group take; infinite where rewards come too late for them.
        scaling: per sample: its gradient read and written once, and its share of what a reduction costs besides.
        live: steps of which graphs are there at a time although gradients are kept.
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
    gradient: float = math.inf
    samples: float = 1.0
    affine: float = math.inf
    scaling: float = 0.0
    live: float = 1.0

    @property
    def gain(self) -> float:
        """Seconds that one kept step saves."""
        return self.share * (self.update - self.replay) - self.extra


_LOWEST = ("update", "budget", "share", "host")  # of these the smallest is the worst rank's, of others the largest
# Bytes and counts; the others go as billionths.
_WHOLE = ("graph", "budget", "selected", "host", "gradient", "samples", "affine")
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
    """How windows run: `schedule`, how gradients are reduced, a value of LEANGRPO_SYNC, and `reweight`'s buffers."""

    schedule: str
    sync: str
    buffers: str = "sample"

    @property
    def rounds(self) -> tuple[str, bool]:
        """Ways that differ in this add up gradients in another order."""
        return self.sync, self.schedule == "reweight"

    def __str__(self) -> str:
        return _name(self.schedule, self.buffers) + (f" with sync={self.sync}" if self.sync != "upstream" else "")


class Plan(NamedTuple):
    """A schedule, how many steps it keeps, how many seconds of a native window it saves, and `reweight`'s buffers."""

    schedule: str
    steps: int
    saves: float
    buffers: str = "sample"

    def __str__(self) -> str:
        return _name(self.schedule, self.buffers)


def _name(schedule: str, buffers: str) -> str:
    return f"{schedule} {buffers}" if schedule == "reweight" else schedule


def recompute(figures: Figures) -> Plan:
    """Upstream's own behaviour."""
    return Plan("recompute", 0, 0.0)


def retain(figures: Figures) -> Plan:
    """As many graphs as the budget holds."""
    fits = figures.selected
    if math.isfinite(figures.budget) and figures.graph > 0:
        fits = math.floor(min(figures.budget // figures.graph + figures.host, figures.selected))
    return Plan("retain", int(fits), fits * figures.gain - figures.checks)


def reweight(figures: Figures) -> Plan | None:
    """Gradients in place of graphs, of as many samples as the budget holds; sums per group where it holds too few.

    None where it is not possible, and where as many graphs fit: it would save no more forwards, and scale gradients.
    """
    if math.isinf(figures.gradient):
        return None
    room = max(figures.budget - figures.live * figures.graph, 0.0)
    gradients = room // figures.gradient if figures.gradient > 0 and math.isfinite(room) else math.inf
    sums = gradients < figures.samples and gradients >= figures.affine
    samples = figures.samples if sums else min(gradients, figures.samples)
    steps = math.floor(samples * figures.selected / figures.samples)
    if steps <= retain(figures).steps:
        return None
    # What no update of this policy trains is walked all the same.
    saves = steps * (figures.gain - (1 - figures.share) * figures.backward)
    saves -= samples * figures.scaling * (2 if sums else 1) + figures.checks
    return Plan("reweight", steps, saves, "affine" if sums else "sample")


WAYS: tuple[Callable[[Figures], Plan | None], ...] = (recompute, retain, reweight)


def choose(figures: Figures) -> list[Plan]:
    """The plans, best first. One that saves less than is worth it comes after `recompute`."""
    least = WORTH * figures.window
    found = [plan for plan in (way(figures) for way in WAYS) if plan is not None]
    return sorted(found, key=lambda plan: (0 < plan.saves <= least, -plan.saves))


def close(plans: list[Plan], figures: Figures) -> list[Plan]:
    """The second plan, if it may be as good as the first. What proves slower than native is compared in any case."""
    best, other = plans[:2]
    found = abs(best.saves - other.saves) < CLOSE * figures.window and (other.steps or best.steps)
    return [other] if found else []


def reason(plans: list[Plan], figures: Figures) -> str:
    """Why the first one, in one line, with the figures."""
    best, other = plans[0], plans[1]
    retained = next(plan for plan in plans if plan.schedule == "retain")
    ms = {name: f"{value * 1e3:.3g} ms" for name, value in figures._asdict().items()}
    held = f"graphs of {retained.steps} of {figures.selected:.0f} selected steps"
    fit = f"{held} fit {figures.budget / 1e9:.3g} GB" if math.isfinite(figures.budget) else f"{held} fit"
    if best.schedule == "reweight":
        fit += f" (one takes {figures.graph / 1e9:.3g} GB), gradients ({figures.gradient / 1e9:.3g} GB) of {best.steps}"
    each = f"a step: {ms['update']} of forward less in the update"
    each += f" for {figures.share:.0%} of them" if figures.share < 1 else ""
    each += f", {ms['extra']} more in the rollout, {ms['replay']} to replay; {ms['checks']} of checks per window; "
    each += f"natively {ms['rollout']} rollout, {ms['backward']} backward"
    if best.schedule == "recompute" and not any(plan.steps for plan in plans):
        return f"recompute: {fit} (one takes {figures.graph / 1e9:.3g} GB)"
    kept = max((plan for plan in plans if plan.steps), key=lambda plan: plan.saves)
    saved = f"{abs(kept.saves) / figures.window:.1%} of a window"
    if best.schedule == "recompute":
        verb = "would cost" if kept.saves < 0 else "would save only"
        return f"recompute: to {kept.schedule} {verb} {saved} ({each})"
    return f"{best}: {fit}; saves about {saved} ({each}); runner-up {other}"
