"""What a choice of settings holds at the same time, and how much of that has room."""

from __future__ import annotations

from dataclasses import dataclass, replace

from leangrpo_tools.plan.choice import Case, Choice
from leangrpo_tools.plan.memory import Memory


@dataclass(frozen=True)
class Held:
    """What is held at the same time on one rank.

    Attributes:
        graphs: kept graphs, where all of them have room.
        fit: those that have room on the device; None where that is not known.
        on_host: those that have room in host memory beside them.
        gradients: whole gradients that are held, those shared by the ranks counted by their share.
        bytes: of all that fits on the device; 0 where a graph's are not known.
        own: bytes of the graph of a call that is not kept, one at a time; 0 where they are not known.
        room: bytes that were left for it; None where they are not known.
        whole: each rank holds one whole gradient till the ranks' are reduced together.
        whole_bytes: of that, this rank's shard included; 0 where they are not known.
        share: of the samples that could be trained without a second forward, those that are; if all have room, where
            that is not known.
    """

    graphs: int = 0
    fit: int | None = 0
    on_host: int = 0
    gradients: float = 0.0
    bytes: float = 0.0
    own: float = 0.0
    room: float | None = None
    share: float = 0.0
    whole: bool = False
    whole_bytes: float = 0.0

    @property
    def fits(self) -> bool | None:
        """Whether everything has room; None where that is not known."""
        return None if self.fit is None else self.fit + self.on_host >= self.graphs and self.share in (0.0, 1.0)

    @property
    def told(self) -> str:
        """For a reader."""
        whole = "1 whole gradient" + (f" ({self.whole_bytes / 1e9:.3g} GB)" if self.whole_bytes else "")
        host = f" + {self.on_host} on the host" if self.on_host else ""
        gradients = f", {self.gradients:.3g} gradient{'s' * (self.gradients != 1)}" if self.gradients else ""
        size = f" ({self.bytes / 1e9:.3g} GB)" if self.bytes else ""
        if self.fit is None:
            kept = f"{self.graphs or 1} graph{'s' * (self.graphs > 1)}{gradients}: whether they fit is not known"
        elif not self.graphs:
            kept = f"1 graph at a time ({self.own / 1e9:.3g} GB)"
        else:
            kept = f"{self.fit} of {self.graphs} graphs{host}{gradients}{size}"
        return kept + (f", {whole}" if self.whole else "")


def hold(case: Case, choice: Choice, memory: Memory | None) -> Held:
    """What this choice holds. Without `memory`, or a graph's bytes in it, what has room is not known."""
    late = choice.sync != "upstream"
    if choice.schedule == "retain":
        held = _graphs(case, choice, memory)
    elif choice.schedule == "reweight":
        held = _gradients(case, choice, memory)
    else:
        known = memory is not None and memory.graph is not None
        held = Held(fit=0 if known else None, room=memory.room(gradients=late) if memory else None)
    own = memory.graph or 0.0 if memory else 0.0
    return replace(held, own=own, whole=late, whole_bytes=memory.gradient if memory and late else 0.0)


def _graphs(case: Case, choice: Choice, memory: Memory | None) -> Held:
    size = case.size
    graphs = case.live(choice) * size.trained_steps * size.calls // size.batch
    room = memory.room(joint=choice.sync != "upstream") if memory else None
    graph = memory.graph if memory else None
    if memory is None or room is None or graph is None:
        return Held(graphs, None, room=room, share=1.0)
    fit = min(max(int(room // graph), 0), graphs)
    on_host = min(int(memory.host_bytes / 2 // graph), graphs - fit) if choice.offloads and room >= 0 else 0
    return Held(graphs, fit, on_host, 0.0, fit * graph, room=room, share=(fit + on_host) / graphs)


def _gradients(case: Case, choice: Choice, memory: Memory | None) -> Held:
    """Graphs of one step, with a sharded wrapper of one trajectory, and the gradients they were walked for."""
    live, sharded = case.live(choice), case.wrapper == "fsdp" and case.ranks > 1
    graphs = case.size.calls * (case.size.trained_steps if sharded else 1)
    accumulators = 2 * case.live_groups(choice)
    if sharded and choice.layout == "shared":
        accumulators /= case.sharing  # spread over all ranks, but so are those of the other teams
    wanted = 1 + accumulators if choice.buffers == "affine" else live
    room = memory.room() if memory else None
    graph = memory.graph if memory else None
    if memory is None or room is None or graph is None:
        return Held(graphs, None, 0, wanted, room=room, share=1.0)
    fit = min(max(int(room // graph), 0), graphs)
    left = max((room - graphs * graph) / memory.gradient, 0.0)
    if choice.buffers == "affine":
        count, share = (wanted, 1.0) if left >= wanted else (0.0, 0.0)
    else:
        count = min(int(left), live)
        if count < live:  # the others are recomputed beside them; with late sums their gradient adds up, too
            beside = memory.left(gradients=choice.sync != "upstream")
            count = min(count, int(max(beside, 0.0) // memory.gradient))
        share = count / live
    return Held(graphs, fit, 0, count, fit * graph + count * memory.gradient, room=room, share=share)
