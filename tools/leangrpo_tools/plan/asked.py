"""What the command line asks `leangrpo plan`, besides which launch file."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

from leangrpo_tools.plan.cost import Rollout
from leangrpo_tools.plan.predict import Speeds


@dataclass(frozen=True)
class Machine:
    """The GPUs, and what was measured on them.

    Attributes:
        gpu_gb: memory of a GPU, in gigabytes (1e9 bytes).
        other_gb: what else stays on it.
        host_gb: host memory per GPU for kept graphs.
        speeds: of forwards and links.
        grad_forward: cost of a forward with gradient in forwards without, where it was measured.
        backward: cost of a backward in forwards without gradient, where it was measured.
        graph_gb: gigabytes of the graph of one network call, where it was measured.
    """

    gpu_gb: float = 80.0
    other_gb: float = 0.0
    host_gb: float = 0.0
    speeds: Speeds = field(default_factory=Speeds)
    grad_forward: float | None = None
    backward: float | None = None
    graph_gb: float | None = None

    @property
    def graph_bytes(self) -> float | None:
        """The same in bytes."""
        return None if self.graph_gb is None else 1e9 * self.graph_gb

    def measured(self, size: Rollout) -> Rollout:
        """The same rollout with costs that were measured."""
        grad = size.grad_forward if self.grad_forward is None else self.grad_forward
        return replace(size, grad_forward=grad, backward=size.backward if self.backward is None else self.backward)


@dataclass(frozen=True)
class Asked:
    """What the command line asks for; see `plan`."""

    launch_file: Path | None = None
    preset: str | None = None
    script: str | None = None
    overrides: list[str] = field(default_factory=list)
    ranks: int | None = None
    network: str | None = None
    machine: Machine = field(default_factory=Machine)
    line: int | None = None
