"""The result of a rehearsal: what was compared, the verdict, and its JSON form."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from leangrpo_rehearsal.base import Bound, Config
from leangrpo_rehearsal.beside import Repeated
from leangrpo_rehearsal.outcome import Update
from leangrpo_tools.rehearsal import replays
from leangrpo_tools.rehearsal.verdict import NOTHING_REPLAYED, Verdict, Warned

NOT_TESTED = (
    "CUDA kernels and their rounding (everything ran on CPU)",
    "torch.compile and CUDA graphs",
    "NCCL, and more than one machine",
    "your reward model, checkpoints and data",
    "real sizes: memory, speed, long runs",
)

SHOWN = 4
"""So many of the things noted beside gradients are named where they differ."""


@dataclasses.dataclass
class Counts:
    """Policy forwards per rank, over the whole rehearsal."""

    grad: list[int]
    no_grad: list[int]


@dataclasses.dataclass
class Report:
    """Everything a rehearsal found out. `problems` and `warnings` make the verdict."""

    upstream: str
    script: str
    config: Config
    bound: Bound
    updates: list[Update]
    """Native against patched."""
    floor: list[Update]
    """Native against native, a second time."""
    control: list[Update]
    """Native against patched with one advantage's sign flipped."""
    forwards: dict[str, Counts]
    collectives: dict[str, dict[str, int]]
    """Calls on rank 0 by kind, while training."""
    seconds: dict[str, float]
    peak_held_bytes: int
    gradients: float
    """How many of `gradient_bytes` each were held at most in place of graphs, on one rank."""
    gradient_bytes: int
    peak_rss_bytes: dict[str, int]
    windows: list[list[dict[str, Any]]]
    """What the runtime reported, per rank one entry per window."""
    replicas: list[bool] = dataclasses.field(default_factory=list)
    """Where ranks must hold the same weights: per update of the patched run, whether they do."""
    repeated: list[Repeated] = dataclasses.field(default_factory=list)
    """Per window and rank, how much of what upstream evaluates twice the patched run did not."""
    known_reasons: tuple[str, ...] = ()
    """Parts of the runtime's reasons which the rehearsal itself brings about."""
    clipping: tuple[int, int] = (0, 0)
    """In how many native updates the clip range held back some ratios and not others, and in how many the gradient
    norm was cut."""
    further: list[tuple[str, Report]] = dataclasses.field(default_factory=list)
    """Other branches of the script that were rehearsed, too, in words."""
    nothing_to_replay: str = ""
    """Why the patched run had to recompute everything, where the script knows that beforehand."""
    failures: list[str] = dataclasses.field(default_factory=list)
    """Runs that ended badly, or made too few updates."""
    tested: list[str] = dataclasses.field(default_factory=list)
    not_tested: list[str] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)
    logs: str = ""
    second_look: dict[str, float] = dataclasses.field(default_factory=dict)
    """Where the first bound was too narrow, relative L2: `alike` between native runs with the patched run's calls and
    without, `fp64` between native and patched, `fp64_alike` between the native ones."""
    controlled: bool = True
    """Whether a negative control was asked for."""
    strict: bool = False
    """Warnings make the exit status 1."""

    @property
    def floor_bitwise(self) -> bool:
        """Whether two native runs agree in every bit."""
        return bool(self.floor) and all(u.grad_bitwise and u.weights_bitwise and u.rewards_equal for u in self.floor)

    @property
    def control_caught(self) -> bool:
        """Whether the flipped advantage was seen as a mismatch, by far more than rounding."""
        return any(
            update.finite and not update.matches(self.bound) and update.grad_rel_l2 > max(1e-4, 10 * self.bound.rel_l2)
            for update in self.control
        )

    @property
    def mismatches(self) -> list[Update]:
        """Updates outside the bound."""
        return [update for update in self.updates if not update.matches(self.bound)]

    @property
    def problems(self) -> list[str]:
        """Why the rehearsal is not ok, in words; empty if it is."""
        found = list(self.failures)
        if len(self.updates) < self.config.updates and not self.failures:
            found.append(f"only {len(self.updates)} of {self.config.updates} updates could be compared")
        found += [_describe(update, self.bound) for update in self.mismatches]
        apart = [index for index, same in enumerate(self.replicas) if not same]
        found += [f"update {index}: the ranks' weights differ from each other" for index in apart]
        if any(not update.finite for update in self.floor):
            found.append("upstream's own run has values that are not finite")
        if self.nothing_to_replay and self._asks_for_replay and self._replayed:
            found.append(f"{self._replayed} steps were replayed, though {self.nothing_to_replay}")
        if self.controlled and not self.control_caught and (self.control or not self.failures):
            found.append("the negative control was not caught: a flipped advantage looked like a match")
        return found + [f"{words}: {problem}" for words, report in self.further for problem in report.problems]

    @property
    def warnings(self) -> list[Warned]:
        """What a user has to know though no number is wrong. Nothing of a run that ended badly."""
        if self.failures or not self._asks_for_replay:
            return []
        found = self._without_replay() or replays.warnings(self.repeated, self.windows, self.known_reasons)
        return found + [
            Warned(warned.code, f"{words}: {warned.text}")
            for words, report in self.further
            for warned in report.warnings
        ]

    @property
    def _asks_for_replay(self) -> bool:
        return self.config.schedule in ("retain", "reweight") and self.config.budget_gb == "unlimited"

    @property
    def _replayed(self) -> int:
        return sum(window["replayed"] for rank in self.windows for window in rank)

    def _without_replay(self) -> list[Warned]:
        """A patched run that replays nothing is upstream's own: equal gradients say nothing of replays."""
        if self._replayed:
            return []
        reasons = {reason for rank in self.windows for window in rank for reason in window["reasons"]}
        why = "; ".join(sorted(reasons)) or self.nothing_to_replay or "its script never opened a window"
        return [Warned(NOTHING_REPLAYED, f"nothing was replayed, so nothing is saved: {why}")]

    @property
    def verdict(self) -> Verdict:
        """Whether patched and native training match, and the rehearsal would have noticed if not."""
        return Verdict.of(self.problems, self.warnings)

    @property
    def ok(self) -> bool:
        """Whether they match, warnings or not."""
        return self.verdict is not Verdict.MISMATCH

    @property
    def exit_code(self) -> int:
        """0 match, 1 mismatch. What could not be rehearsed never becomes a report."""
        return self.verdict.exit_code(self.strict)

    def render(self) -> str:
        """The report as text, with colour if stdout is a terminal."""
        from leangrpo_tools.rehearsal.render import render

        return render(self)

    def to_json(self) -> dict[str, Any]:
        """Plain data; numbers that are not finite become null."""
        forwards: dict[str, Any] = {name: dataclasses.asdict(counts) for name, counts in self.forwards.items()}
        return {
            "ok": self.ok,
            "verdict": self.verdict.value,
            "warnings": [dataclasses.asdict(warning) for warning in self.warnings],
            "upstream": self.upstream,
            "script": self.script,
            "config": dataclasses.asdict(self.config) | {"options": dict(self.config.options)},
            "bound": dataclasses.asdict(self.bound) | {"text": self.bound.describe()},
            "problems": self.problems,
            "updates": [_plain(update, self.bound) for update in self.updates],
            "floor": {"bitwise": self.floor_bitwise, "updates": [_plain(update, None) for update in self.floor]},
            "replicas_equal": self.replicas,
            "control_caught": self.control_caught if self.control else None,
            "control": [_plain(update, None) for update in self.control],
            "rollouts": self.config.rollouts,
            "forwards": forwards,
            "collectives": self.collectives,
            "seconds": _finite(self.seconds),
            "peak_held_bytes": self.peak_held_bytes,
            "gradients_held": self.gradients,
            "gradient_bytes": self.gradient_bytes,
            "peak_rss_bytes": self.peak_rss_bytes,
            "windows": self.windows,
            "second_look": _finite(self.second_look),
            "repeated": [dataclasses.asdict(item) | {"missing": item.missing} for item in self.repeated],
            "clipping": {"ratios": self.clipping[0], "norms": self.clipping[1]},
            "further": [{"what": words} | report.to_json() for words, report in self.further],
            "tested": self.tested,
            "not_tested": self.not_tested,
            "notes": self.notes,
        }


def _describe(update: Update, bound: Bound) -> str:
    text = f"update {update.index} is not within the bound ({bound.describe()})"
    if not update.finite:
        text = f"update {update.index} holds values that are not finite"
    elif not update.rewards_equal:
        text = f"update {update.index}: the rewards differ, so the rollouts already did"
    worst = update.worst
    off = update.off(bound)
    if off and dataclasses.replace(update, beside=[]).matches(bound):
        return f"update {update.index}: " + "; ".join(item.text() for item in off[:SHOWN])
    if worst is None:
        return text
    amount = ""
    if not math.isinf(worst.rel_l2):
        amount = f", relative L2 {worst.rel_l2:.3g}, largest difference {worst.max_abs:.3g}"
    return f"{text}; worst: {worst.tensor} of {worst.parameter} on rank {worst.rank} ({worst.why}{amount})"


def _plain(update: Update, bound: Bound | None) -> dict[str, Any]:
    plain = dataclasses.asdict(update)
    plain["seconds"] = {"native": update.seconds[0], "patched": update.seconds[1]}
    if bound is not None:
        plain["ok"] = update.matches(bound)
    return _finite(plain)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value
