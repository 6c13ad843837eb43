"""The cost model: policy forwards and what they and their backwards cost, natively and without the recomputation.

One policy forward costs 1, with gradient g (1, unless measured), and its backward b. Per sample natively
T + S(g + b): T sampling steps without gradient, then S trained steps forward and backward. A replayed sample saves its
S forwards without gradient: those with gradient are made in the rollout instead. A reference policy's cost 1 each.
Compute only (LeanGRPO, arXiv 2609.03528).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

BACKWARD = {"full": (2.1, 3.0), "lora": (1.24, 2.2)}
"""b without and with activation checkpointing, measured on CPU."""


def backward_cost(training: str, checkpointed: float) -> float:
    """b for the share (0 to 1) of blocks with activation checkpointing; in between it is interpolated."""
    plain, recomputing = BACKWARD[training]
    return plain + (recomputing - plain) * checkpointed


@dataclass(frozen=True)
class Rollout:
    """The size of one rollout on one rank.

    Attributes:
        samples: samples drawn.
        trained: how many of them are trained.
        steps: T, steps of a trajectory.
        trained_steps: S, trained steps of each trained sample.
        accumulation: samples per optimizer update.
        backward: b.
        replayable: whether kept graphs can be used at all.
        batch: samples per network call.
        calls: network calls per batch and step (2: the unconditional input in a call of its own).
        passes: how often each trained sample is trained per rollout.
        reference: forwards of a reference policy, without gradient, per trained step.
        sampling_reference: the same per sampled step.
        grad_forward: g.
        counted_on: updates are counted through from rollout to rollout, not from each rollout's start.
    """

    samples: int
    trained: int
    steps: int
    trained_steps: int
    accumulation: int
    backward: float
    replayable: bool = True
    batch: int = 1
    calls: int = 1
    passes: int = 1
    reference: int = 0
    sampling_reference: int = 0
    grad_forward: float = 1.0
    counted_on: bool = False

    @property
    def visits(self) -> int:
        """Samples that the updates of a rollout go through, each as often as it is trained."""
        return self.trained * self.passes

    @property
    def updates(self) -> int:
        """K, optimizer updates per rollout."""
        return self.visits // self.accumulation

    @property
    def leftover(self) -> int:
        """Trained samples after the last update of the rollout."""
        return self.visits % self.accumulation

    @property
    def replayed(self) -> int:
        """Samples free of recomputation: those of the first update, before which the policy has not changed.

        A sample that this update goes through a second time is recomputed then.
        """
        return min(self.accumulation, self.trained) if self.replayable and self.updates else 0

    @property
    def free(self) -> float:
        """The same, on average over the rollouts after which the updates come at the same places again.

        `replayed` is the most of these. With 5 batches and updates of 2, the first update of a rollout comes after 2
        batches, in the next rollout after 1, since the fifth batch was added up before it.
        """
        if not self.replayed or not self.counted_on or not self.leftover:
            return self.replayed
        step, batches = self.accumulation // self.batch, self.visits // self.batch
        firsts = [step - rollout * batches % step for rollout in range(step // math.gcd(step, batches))]
        return sum(min(first * self.batch, self.trained) for first in firsts) / len(firsts)

    @property
    def graphs(self) -> int:
        """Graphs held at the end of the rollout when everything that can be kept is kept."""
        return self.saved * self.calls // self.batch

    @property
    def saved(self) -> int:
        """Forwards that are not made a second time, one per sample and step."""
        return self.replayed * self.trained_steps

    @property
    def reference_forwards(self) -> int:
        """Forwards of the reference policy per rollout, natively and patched."""
        sampled = self.samples * self.steps * self.sampling_reference
        return sampled + self.visits * self.trained_steps * self.reference

    def forwards(self, patched: bool) -> dict[str, int]:
        """Policy forwards per rollout, with and without gradient. A kept forward runs with gradient in the rollout."""
        kept = round(self.free * self.trained_steps) if patched else 0
        return {"no_grad": self.samples * self.steps - kept, "grad": self.visits * self.trained_steps}

    def network_calls(self, patched: bool) -> dict[str, int]:
        """The same as calls of the network, each of which takes a batch of samples."""
        return {name: count * self.calls // self.batch for name, count in self.forwards(patched).items()}

    def cost(self, replayed: float) -> float:
        """Cost of a rollout and its updates, in policy forwards, with this many replayed samples."""
        update = self.visits * self.trained_steps * (self.grad_forward + self.backward)
        return self.samples * self.steps + self.reference_forwards + update - replayed * self.trained_steps

    @property
    def ratio(self) -> float:
        """Native over patched."""
        return self.cost(0) / self.cost(self.free)

    @property
    def ratio_all(self) -> float:
        """The same if every trained sample were replayed."""
        return self.cost(0) / self.cost(self.visits if self.replayable else 0)

    def ratio_with(self, graphs: int) -> float:
        """Native over patched if only this many graphs are held."""
        share = self.free / self.replayed if self.replayed else 0.0
        return self.cost(0) / (self.cost(0) - share * min(graphs, self.graphs) * self.batch / self.calls)

    def with_accumulation(self, samples: int) -> Rollout:
        """The same rollout with another number of samples per update."""
        return replace(self, accumulation=samples)

    def with_backward(self, backward: float) -> Rollout:
        """The same rollout with another cost of a backward."""
        return replace(self, backward=backward)
