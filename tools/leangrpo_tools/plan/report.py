"""What a plan says, as data, as text and as JSON."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from leangrpo_tools.plan import tabletext
from leangrpo_tools.plan.cost import Rollout
from leangrpo_tools.plan.instead import Instead
from leangrpo_tools.plan.memory import Memory
from leangrpo_tools.plan.named import Named
from leangrpo_tools.plan.predict import Speeds, Table
from leangrpo_tools.plan.sizing import Sized

ASSUMPTIONS = (
    "compute of the policy only: reward model, VAE, data and communication come on top and are not reduced",
    "one forward = 1, with or without gradient; one backward = b (measured on CPU: full 2.1, LoRA 1.24; with activation"
    " checkpointing 3.0 and 2.2)",
    "the predicted ratio and those of flags and settings: all graphs of the first update fit; what does not fit is"
    " recomputed (LEANGRPO_BUDGET_GB)",
)


@dataclass(frozen=True)
class Change:
    """A flag of upstream that would change the prediction, what that means, and the ratio it would give."""

    flag: str
    meaning: str
    ratio: float


@dataclass(frozen=True)
class PlanReport:
    """The answer of `leangrpo plan`."""

    upstream: str
    script: str
    launch: str
    line: int
    patched: bool
    """Whether the kit has a recipe for this script."""
    ranks: int
    rollout: Rollout
    training: str
    checkpointed: float
    leftover: str
    table: Table
    speeds: Speeds
    network: Named
    sized: Sized
    instead: Instead | None = None
    """Where another launcher's configuration would gain what this one cannot."""
    preset: str | None = None
    """Where the settings are kept in a config: its file and function."""
    overridden: dict[str, Any] = field(default_factory=dict)
    """Entries of the preset that the command line sets."""
    defaults: dict[str, Any] = field(default_factory=dict)
    defaults_from: str = ""
    notes: list[str] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)
    settings: list[Change] = field(default_factory=list)
    """Settings of the kit that do, in place of upstream's flags."""

    @property
    def memory(self) -> Memory | None:
        """One rank's, as far as it is known."""
        return self.sized.memory

    def figures(self) -> dict[str, Any]:
        """What two plans of the same run agree in."""
        return {name: value for name, value in self.to_json().items() if name not in ("launch", "notes", "defaults")}

    def to_json(self) -> dict[str, Any]:
        """Plain data, every number a finite JSON number."""
        size = self.rollout
        return {
            "upstream": self.upstream,
            "script": self.script,
            "launch": {"file": self.launch, "line": self.line},
            "preset": self.preset,
            "overridden": self.overridden,
            "patched": self.patched,
            "ranks": self.ranks,
            "network": self.network.to_json(),
            "samples_per_rank": size.samples,
            "trained_samples_per_rank": size.trained,
            "sampling_steps": size.steps,
            "trained_steps": size.trained_steps,
            "samples_per_update": size.accumulation,
            "updates_per_rollout": size.updates,
            "leftover_samples": size.leftover,
            "recompute_free_samples": size.free,
            "recompute_free_share": size.free / size.trained,
            "forwards": {"native": size.forwards(False), "patched": size.forwards(True)},
            "reference_forwards": size.reference_forwards,
            "samples_per_call": size.batch,
            "network_calls": {"native": size.network_calls(False), "patched": size.network_calls(True)},
            "graphs_held": size.graphs,
            "memory": self._memory_json(),
            "bytes_unknown": {"why": self.sized.why, "help": self.sized.help} if self.sized.why else None,
            "predicted": tabletext.to_json(self.table, self.memory, self.speeds),
            "instead": self.instead.to_json() if self.instead else None,
            "backward_cost": size.backward,
            "training": self.training,
            "checkpointed_share": self.checkpointed,
            "ratio": size.ratio,
            "ratio_if_all_updates_were_recompute_free": size.ratio_all,
            "defaults": {"from": self.defaults_from, "values": self.defaults},
            "changes": [vars(change) for change in self.changes],
            "settings": [vars(change) for change in self.settings],
            "assumptions": list(ASSUMPTIONS),
            "notes": list(self.notes),
        }

    def _memory_json(self) -> dict[str, Any] | None:
        memory = self.memory
        if memory is None:
            return None
        fitting = {name: memory.fitting(joint) for name, joint in memory.choices.items()}
        return {
            "gpu_bytes": memory.gpu_bytes,
            "states_bytes": memory.states,
            "units_bytes": memory.units,
            "joint_bytes": memory.full,
            "graph_bytes": memory.graph,
            "graphs_that_fit": fitting,
            "ratio_with_those": {
                name: None if graphs is None else self.rollout.ratio_with(graphs) for name, graphs in fitting.items()
            },
        }

    def _call_rows(self) -> list[tuple[str, str]]:
        """Where they say more than the forwards do: reference forwards, and calls that take several samples."""
        size = self.rollout
        rows = []
        if size.reference_forwards:
            rows.append(("reference forwards", f"{size.reference_forwards}, natively and patched"))
        if size.batch > 1 or size.calls > 1:
            native, lean = size.network_calls(False), size.network_calls(True)
            told = f"{native['no_grad']} without and {native['grad']} with gradient"
            per_step = f"{size.calls} calls per step, " if size.calls > 1 else ""
            patched = f"{lean['no_grad']} and {lean['grad']}"
            rows.append(("network calls", f"{told}, patched {patched}; {per_step}{size.batch} samples a call"))
        return rows

    def _memory_rows(self) -> list[tuple[str, str]]:
        memory, held = self.memory, self.rollout.graphs
        if memory is None:
            return []
        each = f"{memory.graph / 1e9:.3g} GB each graph" if memory.graph is not None else "a graph's are not known"
        told = f"{memory.states / 1e9:.3g} GB weights, gradients and AdamW; {each}"
        if memory.offloaded:
            told = f"weights, gradients and AdamW are in host memory; {each}"
        rows = [("bytes, by formula", told)]
        if held and self.table.known and not any(row.choice.schedule == "retain" for row in self.table.rows):
            rows.append(("graphs that fit", f"0 of {held} ({memory.gpu_bytes / 1e9:g} GB)"))
        return rows

    def render(self) -> str:
        """The plan as text for a reader."""
        size = self.rollout
        native, lean = size.forwards(False), size.forwards(True)
        state = "" if self.patched else " (there is no recipe for this script yet)"
        drawn = f"{size.samples} samples" + (f", {size.trained} trained" if size.samples != size.trained else "")
        free = f"{size.free:g} of {size.trained} trained samples ({size.free / size.trained:.0%})"
        share = f"{free}: the first update's" if 0 < size.replayed < size.trained else free
        checkpointed = f", {self.checkpointed:.0%} of the blocks checkpointed" if self.checkpointed else ""
        each = f", each of {size.batch} samples" if size.batch > 1 else ""
        fits = " of compute alone, if all graphs fit" if size.graphs else ""
        again = f", every sample {size.passes} times" if size.passes > 1 else ""
        rows = [
            ("network", self.network.told),
            ("ranks", self.ranks),
            ("per rank and rollout", drawn),
            ("steps", f"T = {size.steps} sampled, S = {size.trained_steps} trained per sample"),
            ("updates per rollout", f"K = {size.updates}, {size.accumulation} samples each{again}"),
            ("leftover", f"{size.leftover} samples: {_LEFTOVER[self.leftover]}" if size.leftover else "none"),
            ("free of recomputation", share),
            ("policy forwards, native", f"{native['no_grad']} without and {native['grad']} with gradient"),
            ("policy forwards, patched", f"{lean['no_grad']} without and {lean['grad']} with gradient"),
            ("forwards removed", f"{sum(native.values()) - sum(lean.values())} of {sum(native.values())}"),
            *self._call_rows(),
            ("graphs held", f"{size.graphs} per rank at the end of the rollout{each}"),
            ("backward cost", f"b = {size.backward:g} ({self.training}{checkpointed})"),
            (
                "predicted ratio",
                f"{size.ratio:.2f}{fits} ({size.ratio_all:.2f} if every update were free of recomputation)",
            ),
        ]
        rows += self._memory_rows()
        text = [f"{self.upstream} {self.script}, {self.launch} line {self.line}{state}", ""]
        if self.preset:
            given = "".join(f", {name}={value}" for name, value in self.overridden.items())
            text[1:1] = [f"  {'preset':<26}{self.preset}{given}"]
        text += [f"  {name:<26}{value}" for name, value in rows]
        if self.defaults:
            given = ", ".join(f"--{name} {value}" for name, value in self.defaults.items())
            text += ["", f"Not in the launch file, defaults from {self.defaults_from}: {given}"]
        if self.changes:
            text += ["", f"Flags of upstream that would change it {_ALONE}:"]
            text += [f"  {change.flag}: ratio {change.ratio:.2f}; {change.meaning}" for change in self.changes]
        if self.settings:
            text += ["", f"Settings of the kit that would change it {_ALONE}:"]
            text += [f"  {change.flag}: ratio {change.ratio:.2f}; {change.meaning}" for change in self.settings]
        text += tabletext.render(self.table, self.sized, self.speeds)
        text += self.instead.render() if self.instead else []
        text += ["", "Assumed:", *(f"  {line}" for line in ASSUMPTIONS)]
        if self.notes:
            text += ["", "Note:", *(f"  {line}" for line in self.notes)]
        return "\n".join(text)


_ALONE = "(ratios of compute alone, if all graphs fit)"
_LEFTOVER = {
    "discarded": "their gradient is dropped by upstream when the next rollout starts",
    "carried": "upstream adds their gradient to the next rollout's first update",
    "refused": "upstream refuses to start",
}
