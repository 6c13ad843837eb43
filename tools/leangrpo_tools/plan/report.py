"""What a plan says, as data, as text and as JSON."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from leangrpo_tools.plan.cost import Rollout

ASSUMPTIONS = (
    "compute of the policy only: reward model, VAE, data and communication come on top and are not reduced",
    "one forward = 1, with or without gradient; one backward = b (measured on CPU: full 2.1, LoRA 1.24; with activation"
    " checkpointing 3.0 and 2.2)",
    "all graphs of the first update fit into memory (LEANGRPO_BUDGET_GB limits them; the rest is recomputed)",
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
    defaults: dict[str, Any] = field(default_factory=dict)
    defaults_from: str = ""
    notes: list[str] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Plain data, every number a finite JSON number."""
        size = self.rollout
        return {
            "upstream": self.upstream,
            "script": self.script,
            "launch": {"file": self.launch, "line": self.line},
            "patched": self.patched,
            "ranks": self.ranks,
            "samples_per_rank": size.samples,
            "trained_samples_per_rank": size.trained,
            "sampling_steps": size.steps,
            "trained_steps": size.trained_steps,
            "samples_per_update": size.accumulation,
            "updates_per_rollout": size.updates,
            "leftover_samples": size.leftover,
            "recompute_free_samples": size.replayed,
            "recompute_free_share": size.replayed / size.trained,
            "forwards": {"native": size.forwards(False), "patched": size.forwards(True)},
            "graphs_held": size.graphs,
            "backward_cost": size.backward,
            "training": self.training,
            "checkpointed_share": self.checkpointed,
            "ratio": size.ratio,
            "ratio_if_all_updates_were_recompute_free": size.ratio_all,
            "defaults": {"from": self.defaults_from, "values": self.defaults},
            "changes": [vars(change) for change in self.changes],
            "assumptions": list(ASSUMPTIONS),
            "notes": list(self.notes),
        }

    def render(self) -> str:
        """The plan as text for a reader."""
        size = self.rollout
        native, lean = size.forwards(False), size.forwards(True)
        state = "" if self.patched else " (there is no recipe for this script yet)"
        drawn = f"{size.samples} samples" + (f", {size.trained} trained" if size.samples != size.trained else "")
        free = f"{size.replayed} of {size.trained} trained samples ({size.replayed / size.trained:.0%})"
        share = f"{free}: the first update's" if 0 < size.replayed < size.trained else free
        checkpointed = f", {self.checkpointed:.0%} of the blocks checkpointed" if self.checkpointed else ""
        rows = [
            ("ranks", self.ranks),
            ("per rank and rollout", drawn),
            ("steps", f"T = {size.steps} sampled, S = {size.trained_steps} trained per sample"),
            ("updates per rollout", f"K = {size.updates}, {size.accumulation} samples each"),
            ("leftover", f"{size.leftover} samples: {_LEFTOVER[self.leftover]}" if size.leftover else "none"),
            ("free of recomputation", share),
            ("policy forwards, native", f"{native['no_grad']} without and {native['grad']} with gradient"),
            ("policy forwards, patched", f"{lean['no_grad']} without and {lean['grad']} with gradient"),
            ("forwards removed", f"{size.graphs} of {sum(native.values())}"),
            ("graphs held", f"{size.graphs} per rank at the end of the rollout"),
            ("backward cost", f"b = {size.backward:g} ({self.training}{checkpointed})"),
            ("predicted ratio", f"{size.ratio:.2f} ({size.ratio_all:.2f} if every update were free of recomputation)"),
        ]
        text = [f"{self.upstream} {self.script}, {self.launch} line {self.line}{state}", ""]
        text += [f"  {name:<26}{value}" for name, value in rows]
        if self.defaults:
            given = ", ".join(f"--{name} {value}" for name, value in self.defaults.items())
            text += ["", f"Not in the launch file, defaults from {self.defaults_from}: {given}"]
        if self.changes:
            text += ["", "Flags of upstream that would change it:"]
            text += [f"  {change.flag}: ratio {change.ratio:.2f}; {change.meaning}" for change in self.changes]
        text += ["", "Assumed:", *(f"  {line}" for line in ASSUMPTIONS)]
        if self.notes:
            text += ["", "Note:", *(f"  {line}" for line in self.notes)]
        return "\n".join(text)


_LEFTOVER = {
    "discarded": "their gradient is dropped by upstream when the next rollout starts",
    "carried": "upstream adds their gradient to the next rollout's first update",
    "refused": "upstream refuses to start",
}
