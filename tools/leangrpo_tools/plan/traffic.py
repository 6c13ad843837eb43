"""How often a rank's weights are gathered and its gradients reduced in a rollout and its updates.

Counted for the whole network: FSDP does so unit by unit. Natively every forward gathers the weights once, every
backward gathers them once more and reduces the gradients once. A replayed call has no second forward. `late` walks all
graphs that are held in one backward, and reduces once per update; native calls then gather as ever. DDP averages once
per update: accelerate leaves the other backward passes of an update alone, and the runtime averages at the boundary.
"""

from __future__ import annotations

from dataclasses import dataclass

from leangrpo_tools.plan.choice import Case, Choice


@dataclass(frozen=True)
class Wire:
    """Bytes of a weight as it is gathered and of a gradient as it is reduced."""

    gathered: int = 4
    reduced: int = 4


@dataclass(frozen=True)
class Traffic:
    """Collectives of a rank per rollout, each over the whole network."""

    gathers: float = 0.0
    reductions: float = 0.0
    averages: float = 0.0

    def bytes(self, parameters: float, trained: float, ranks: int, wire: Wire, shards: int = 0) -> float:
        """Bytes that a rank receives. `trained` of the `parameters` have gradients.

        Over `shards` ranks (0: all) weights are gathered and gradients scattered; then the shards' gradients are
        averaged over the ranks that hold the same shard.
        """
        shards = shards or ranks
        copies = ranks / shards
        gathered = (shards - 1) / shards * self.gathers * wire.gathered * parameters
        reduced = (shards - 1) / shards + 2 * (copies - 1) / copies / shards
        averaged = 2 * (ranks - 1) / ranks
        return gathered + (self.reductions * reduced + self.averages * averaged) * wire.reduced * trained


def traffic(case: Case, choice: Choice, share: float) -> Traffic:
    """What a choice communicates. `share`: of the samples that could be replayed, those that are."""
    size = case.size
    if case.ranks == 1 or case.wrapper == "none":
        return Traffic()
    if case.wrapper == "ddp":
        return Traffic(averages=size.updates)
    native = size.network_calls(patched=False)
    saved = case.replayed(choice) * share * size.trained_steps * size.calls / size.batch
    walks = _walks(case, choice) if saved else 0.0
    backward = native["grad"] - saved + (saved if walks == 0 else min(walks, saved))
    gathers = native["no_grad"] + native["grad"] - saved + backward
    if case.stays:  # a forward leaves the weights there, and each backward frees them
        gathers = native["grad"]
    return Traffic(gathers, _reductions(case, choice, saved, share))


def _walks(case: Case, choice: Choice) -> float:
    """Backward passes through several graphs at once; 0 where each graph has its own."""
    if choice.schedule != "retain" or choice.sync == "upstream":
        return 0.0
    free = case.size.updates if choice.updates == "on-policy" else 1
    groups = free * case.groups(choice) if choice.sync == "group" else free
    return max(groups, case.replayed(choice) / case.live(choice))


def _reductions(case: Case, choice: Choice, saved: float, share: float) -> float:
    size = case.size
    calls = size.network_calls(patched=False)["grad"]
    free = (size.updates if choice.updates == "on-policy" else 1) if saved else 0
    if choice.schedule == "reweight" and saved:
        return min(_gradients(case, choice, share, free) + (calls - saved if choice.sync == "upstream" else 0), calls)
    if choice.sync != "upstream":
        each = case.groups(choice) if choice.sync == "group" else 1
        return min(size.updates * each + (free if share < 1 else 0), calls)
    return calls


def _gradients(case: Case, choice: Choice, share: float, free: int) -> float:
    """Of what `reweight` keeps: once per update, or part of one with shared prompts, where sums that are spread over
    the ranks take in each sample. Beside it, where upstream's reductions are not left alone, of the other updates."""
    shared = choice.layout == "shared"
    found = free * (case.groups(choice) if shared else 1)
    if shared and choice.buffers == "affine":
        found += case.replayed(choice) * share
    if choice.sync != "upstream":
        each = case.groups(choice) if choice.sync == "group" else 1
        found += (case.size.updates - free + (share < 1)) * each
    return found
