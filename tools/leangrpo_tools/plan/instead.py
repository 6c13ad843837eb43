"""The accelerate configuration under which a preset would gain, where the one it is started with keeps nothing."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from leangrpo_tools.plan import accelerate, launch
from leangrpo_tools.plan.cost import Rollout
from leangrpo_tools.plan.memory import Memory
from leangrpo_tools.plan.predict import Table
from leangrpo_tools.plan.sizing import Sized

YAML = """compute_environment: LOCAL_MACHINE
distributed_type: MULTI_GPU
downcast_bf16: 'no'
machine_rank: 0
main_training_function: main
mixed_precision: {precision}
num_machines: {machines}
num_processes: {processes}
rdzv_backend: static
same_network: true
use_cpu: false
"""


@dataclass(frozen=True)
class Instead:
    """DDP in place of what the launcher starts.

    Attributes:
        file: upstream's own file for it, as the launch file would name it; empty where the tree has none.
        yaml: a complete file.
        given: the file that the launch file names now.
        rollout: sizes, with all that could be kept.
        sized: memory under DDP.
        table: what each choice gives under DDP.
        exports: settings that are needed beside the schedule.
    """

    file: str
    yaml: str
    given: str
    rollout: Rollout
    sized: Sized
    table: Table
    exports: tuple[str, ...] = ()

    @property
    def change(self) -> str:
        """What to change in the launch file."""
        file = self.file or "ddp.yaml"
        return f"--config_file {file}" + (f" in place of {self.given}" if self.given else "")

    @property
    def fits(self) -> int | None:
        """How many graphs would fit; None where that is not known."""
        fits = self.sized.memory.fitting(joint=False) if self.sized.memory else None
        return None if fits is None else min(fits, self.rollout.graphs)

    @property
    def ratio(self) -> float | None:
        """Native over patched under DDP, of what fits; None where that is not known."""
        return None if self.fits is None else self.rollout.ratio_with(self.fits)

    def _needed(self) -> tuple[float, float] | None:
        """Gigabytes of a GPU for upstream itself, and for all graphs."""
        memory = self.sized.memory
        least, most = (memory.needed(1), memory.needed(self.rollout.graphs)) if memory else (None, None)
        return None if least is None or most is None else (least / 1e9, most / 1e9)

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        memory, needed = self.sized.memory, self._needed()
        return {
            "change": self.change,
            "config_file": self.file or None,
            "yaml": self.yaml,
            "settings": [*self.exports, "export LEANGRPO_SCHEDULE=retain"],
            "bytes_by_part": memory.parts if memory else None,
            "graph_bytes": memory.graph if memory else None,
            "graphs": self.rollout.graphs,
            "graphs_that_fit": self.fits,
            "ratio": self.ratio,
            "ratio_if_all_fit": self.rollout.ratio,
            "gpu_gb_for_upstream": needed[0] if needed else None,
            "gpu_gb_for_all_graphs": needed[1] if needed else None,
            "unknown": self.sized.why or None,
        }

    def render(self) -> list[str]:
        """For a reader."""
        memory = self.sized.memory
        where = ", on GPUs with more memory than these" if memory and memory.left() < 0 else ""
        text = ["", f"Under DDP calls can be kept{where}. Start it with", f"  {self.change}"]
        text += [f"  {line}" for line in (*self.exports, "export LEANGRPO_SCHEDULE=retain")]
        if not self.file:
            text += ["with this as ddp.yaml:", *(f"  {line}" for line in self.yaml.splitlines())]
        graphs, needed = self.rollout.graphs, self._needed()
        text += [f"  ratio {self.rollout.ratio:.2f} of compute alone, if all {graphs} graphs fit"]
        if memory is None or needed is None or self.ratio is None:
            return [*text, f"  what fits is not known: {self.sized.why}"]
        return text + self._fitting(memory, needed, self.ratio)

    def _fitting(self, memory: Memory, needed: tuple[float, float], ratio: float) -> list[str]:
        parts = [f"{name} {size / 1e9:.3g}" for name, size in memory.parts.items() if size]
        text = [
            f"  bytes per GPU then, by formula (GB): {', '.join(parts)}, each graph {(memory.graph or 0) / 1e9:.3g}"
        ]
        gpu = f"{memory.gpu_bytes / 1e9:g} GB"
        if memory.left() < 0:
            text += [f"  upstream itself does not fit into {gpu} then: it needs {needed[0]:.3g}"]
        else:
            text += [f"  {self.fits} of {self.rollout.graphs} graphs fit into {gpu}: ratio {ratio:.2f}"]
        return [*text, f"  all graphs fit into {needed[1]:.3g} GB"]


def configuration(root: Path, file: str, precision: str, ranks: int, machines: int) -> tuple[str, str]:
    """Upstream's own file for DDP, if the tree has it, and a complete one."""
    started = accelerate.read(launch.Training("", 0, ["accelerate", "launch", "--config_file", file], [], []), root)
    found = file if started is not None and started.kind == "MULTI_GPU" else ""
    return found, YAML.format(precision=precision, machines=machines, processes=ranks)
