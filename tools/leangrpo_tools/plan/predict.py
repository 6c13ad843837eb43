"""The predicted time of a rollout and its updates under each choice of settings, and which to take.

Seconds are a compute term (cost.py, times the seconds of a forward) and a communication term (traffic.py, over the
speed of a link), added up as if nothing overlapped, and what is measured of the rest.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from leangrpo_tools.plan.choice import Case, Choice
from leangrpo_tools.plan.cost import Rollout
from leangrpo_tools.plan.held import Held, hold
from leangrpo_tools.plan.memory import Memory
from leangrpo_tools.plan.traffic import Traffic, Wire, traffic

GAIN = 1.005
"""A ratio below this is none."""


@dataclass(frozen=True)
class Speeds:
    """How fast the machine is.

    Attributes:
        tflops: 1e12 floating-point operations per second that a forward reaches.
        link_gb: gigabytes (1e9 bytes) per second that a rank receives from the others.
        forward_seconds: a forward of one sample, where it was measured; then `tflops` does not count.
        rest_seconds: of a rollout and its updates, all that is no forward, backward or reduction of the policy.
        host_link_gb: gigabytes per second between GPU and host.
    """

    tflops: float = 300.0
    link_gb: float = 200.0
    forward_seconds: float | None = None
    rest_seconds: float = 0.0
    host_link_gb: float = 20.0

    def forward(self, memory: Memory | None, size: Rollout) -> float | None:
        """Seconds of one sample's forward, all calls of a step; None where nothing tells."""
        if self.forward_seconds is not None:
            return self.forward_seconds
        flops = memory.flops * size.calls / size.batch if memory else 0.0
        return flops / (self.tflops * 1e12) if flops else None


@dataclass(frozen=True)
class Prediction:
    """One row of the table. Times in seconds, or in forwards where a forward's are not known; see `Table.seconds`."""

    choice: Choice
    held: Held
    traffic: Traffic
    compute: float
    communication: float
    total: float
    ratio: float
    runs: bool = True

    @property
    def rounded(self) -> float:
        """The ratio as it is shown."""
        return round(self.ratio, 2)


@dataclass(frozen=True)
class Table:
    """What each choice gives.

    Attributes:
        rows: choices that can run and keep upstream's algorithm, best first.
        apart: those that change the algorithm.
        native: upstream's own behaviour.
        seconds: times are seconds; otherwise forwards.
        refused: settings that cannot be chosen, and why.
    """

    rows: list[Prediction]
    apart: list[Prediction]
    native: Prediction
    seconds: bool
    communicates: bool
    refused: dict[str, str] = field(default_factory=dict)

    @property
    def known(self) -> bool:
        """Whether it is known what has room."""
        return self.native.held.fit is not None

    @property
    def recommended(self) -> Prediction | None:
        """The first that gains something, where it is known what has room."""
        return self.rows[0] if self.known and self.rows and self.rows[0].ratio >= GAIN else None

    @property
    def runner_up(self) -> Prediction | None:
        """The next that differs in more than its buffers."""
        best = self.recommended
        if best is None:
            return None
        other = (row for row in self.rows[1:] if row.ratio >= GAIN and _kind(row.choice) != _kind(best.choice))
        return next(other, None)


def _kind(choice: Choice) -> tuple[str, str, str]:
    return choice.schedule, choice.layout, choice.sync


def predict(case: Case, memory: Memory | None, speeds: Speeds, wire: Wire) -> Table:
    """The table of a case. Without `memory` room and communication are unknown: ratios are of all that is kept."""
    forward = speeds.forward(memory, case.size)
    model = (memory.model.parameters, memory.trained) if memory else None

    def row(choice: Choice, base: float | None) -> Prediction:
        held = hold(case, choice, memory)
        moved = traffic(case, choice, held.share)
        compute = (forward or 1.0) * case.size.cost(case.replayed(choice) * held.share)
        shards = memory.ranks if memory and memory.sharded else 0
        sent = moved.bytes(*model, case.ranks, wire, shards) if model and forward else 0.0
        copied = _copied(case, choice, held, memory) / (speeds.host_link_gb * 1e9) if forward else 0.0
        communication = sent / (speeds.link_gb * 1e9) + copied
        total = compute + communication + (speeds.rest_seconds if forward else 0.0)
        runs = (held.room is None or held.room >= 0) and (held.share > 0 or choice.schedule == "recompute")
        runs = runs and (held.on_host > 0 or not choice.offloads)
        # a call that is not kept has a graph, too
        runs = runs and (memory is None or memory.left(gradients=choice.sync != "upstream") >= 0)
        return Prediction(choice, held, moved, compute, communication, total, (base or total) / total, runs)

    native = row(Choice(), None)
    found = [row(choice, native.total) for choice in case.choices(bool(memory and memory.host_bytes))]
    found = sorted((item for item in found if item.runs), key=lambda item: (-item.rounded, item.choice.effort))
    faithful = [item for item in found if item.choice.updates == "faithful" and item.choice != native.choice]
    apart = [item for item in found if item.choice.updates != "faithful"]
    communicates = bool(model and forward and case.ranks > 1 and case.wrapper != "none")
    return Table(faithful, apart, native, forward is not None, communicates, case.refused)


def _copied(case: Case, choice: Choice, held: Held, memory: Memory | None) -> float:
    """Bytes that go to host memory and come back."""
    if memory is None or memory.graph is None or not held.on_host:
        return 0.0
    calls = case.replayed(choice) * case.size.trained_steps * case.size.calls / case.size.batch
    return 2 * memory.graph * calls * held.on_host / held.graphs
