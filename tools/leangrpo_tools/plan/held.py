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
        fit: those that have room on the device.
        on_host: those that have room in host memory beside them.
        gradients: whole gradients that are held, those shared by the ranks counted by their share.
        bytes: of all that fits on the device; 0 where the model's sizes are not known.
        room: bytes that were left for it; None where they are not known.
        whole: each rank holds one whole gradient till the ranks' are reduced together.
        whole_bytes: of that, this rank's shard included; 0 where they are not known.
        share: of the samples that could be trained without a second forward, those that are.
    """

    graphs: int = 0
    fit: int = 0
    on_host: int = 0
    gradients: float = 0.0
    bytes: float = 0.0
    room: float | None = None
    share: float = 0.0
    whole: bool = False
    whole_bytes: float = 0.0

    @property
    def told(self) -> str:
        """For a reader."""
        whole = "1 whole gradient" + (f" ({self.whole_bytes / 1e9:.3g} GB)" if self.whole_bytes else "")
        if not self.graphs:
            return whole if self.whole else "nothing"
        host = f" + {self.on_host} on the host" if self.on_host else ""
        gradients = f", {self.gradients:.3g} gradient{'s' * (self.gradients != 1)}" if self.gradients else ""
        size = f" ({self.bytes / 1e9:.3g} GB)" if self.bytes else ""
        return f"{self.fit} of {self.graphs} graphs{host}{gradients}{size}" + (f", {whole}" if self.whole else "")


def hold(case: Case, choice: Choice, memory: Memory | None) -> Held:
    """What this choice holds. Without `memory` everything has room."""
    late = choice.sync != "upstream"
    if choice.schedule == "retain":
        held = _graphs(case, choice, memory)
    elif choice.schedule == "reweight":
        held = _gradients(case, choice, memory)
    else:
        held = Held(room=memory.room(gradients=late) if memory else None)
    return replace(held, whole=True, whole_bytes=memory.gradient if memory else 0.0) if late else held


def _graphs(case: Case, choice: Choice, memory: Memory | None) -> Held:
    size = case.size
    graphs = case.live(choice) * size.trained_steps * size.calls // size.batch
    if memory is None:
        return Held(graphs, graphs, share=1.0)
    room = memory.room(joint=choice.sync != "upstream")
    fit = min(max(int(room // memory.graph), 0), graphs)
    on_host = min(int(memory.host_bytes / 2 // memory.graph), graphs - fit) if choice.offloads and room >= 0 else 0
    return Held(graphs, fit, on_host, 0.0, fit * memory.graph, room, (fit + on_host) / graphs)


def _gradients(case: Case, choice: Choice, memory: Memory | None) -> Held:
    """Graphs of one step, with a sharded wrapper of one trajectory, and the gradients they were walked for."""
    live, sharded = case.live(choice), case.wrapper == "fsdp" and case.ranks > 1
    graphs = case.size.calls * (case.size.trained_steps if sharded else 1)
    accumulators = 2 * case.live_groups(choice)
    if sharded and choice.layout == "shared":
        accumulators /= case.sharing  # spread over all ranks, but so are those of the other teams
    wanted = 1 + accumulators if choice.buffers == "affine" else live
    if memory is None:
        return Held(graphs, graphs, 0, wanted, share=1.0)
    room = memory.room()
    fit = min(max(int(room // memory.graph), 0), graphs)
    left = max((room - graphs * memory.graph) / memory.gradient, 0.0)
    if choice.buffers == "affine":
        count, share = (wanted, 1.0) if left >= wanted else (0.0, 0.0)
    else:
        count = min(int(left), live)
        if count < live and choice.sync != "upstream":  # the others' gradient adds up beside them
            count = min(count, int(max(memory.room(gradients=True), 0.0) // memory.gradient))
        share = count / live
    return Held(graphs, fit, 0, count, fit * memory.graph + count * memory.gradient, room, share)
