"""Kept calls: the graphs of one rollout, the cut at each output, and what happens to it until the flush.

The cut: the rollout's forward ran under grad, giving `out`. A leaf with the same values takes its place in upstream's
loss, so upstream's own backward stops there and leaves the exact cotangent in `leaf.grad`. Walking `out` backward with
that cotangent gives the gradient that a second forward would have given.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from .errors import LeanError
from .guard import Seen
from .memory import Meter
from .values import map_tensors, snapshot

Key = tuple[int, int, str]  # row of the rollout, trajectory step, site (which network call of the step)


# Two native runs differ too where kernels add in another order: by up to a few per cent under bf16 on GPUs. A wrong
# row, step or sign is off by tens of per cent.
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}
LOW_PRECISION_TOLERANCE = 5e-2


def tolerance(dtype: torch.dtype) -> float:
    """How far two evaluations may be apart, relative L2, where the network's output has this dtype."""
    return TOLERANCE.get(dtype, LOW_PRECISION_TOLERANCE)


def autocast_state(device: torch.device) -> tuple[bool, torch.dtype]:
    """Whether autocast is on for the device of the call, and its dtype."""
    return torch.is_autocast_enabled(device.type), torch.get_autocast_dtype(device.type)


class Kept:
    """One network call of the rollout, held with its graph.

    Args:
        result: what the network returned, under grad.
        args, kwargs: its arguments; tensors are copied.
        device: where the call ran.
        graph_bytes: bytes the call left allocated.

    Raises:
        Uncuttable: the result is a container that cannot be rebuilt.
    """

    def __init__(
        self, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device, graph_bytes: int
    ) -> None:
        self.inputs = snapshot(args, kwargs)
        self.autocast = autocast_state(device)
        self.graph_bytes = graph_bytes
        self.outs: list[Tensor] = []
        self.leaves: list[Tensor] = []
        self._result = map_tensors(result, self._cut)

    def _cut(self, out: Tensor) -> Tensor:
        # A copy: the network may use the memory of its output again in a later call.
        leaf = out.detach().clone()
        if out.requires_grad:
            self.outs.append(out)
            self.leaves.append(leaf.requires_grad_())
            leaf.register_post_accumulate_grad_hook(_Once())
        return leaf

    def for_rollout(self) -> Any:
        """The result without a graph, of the type the network returned.

        A clone: an operation in place on it must not reach the leaf or what the graph holds.
        """
        return map_tensors(self._result, lambda leaf: leaf.detach().clone())

    def for_update(self) -> Any:
        """The result for upstream's loss: clones of the leaves, so that operations in place are allowed as natively."""
        return map_tensors(self._result, lambda leaf: leaf.clone())

    def release(self) -> list[Tensor]:
        """Hands over the outputs with their graphs; the call holds none of them any more."""
        outs, self.outs = self.outs, []
        return outs

    def cotangents(self) -> list[Tensor] | None:
        """What the loss left for each output; zeros where it left nothing for some; None where for none."""
        if all(leaf.grad is None for leaf in self.leaves):
            return None
        return [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in self.leaves]


class _Once:
    """Refuses a second backward through one leaf: cotangents would add up in the output's own, maybe low, precision."""

    def __init__(self) -> None:
        self.seen = False

    def __call__(self, leaf: Tensor) -> None:
        if self.seen:
            raise LeanError(
                "LG605",
                "a replayed output received a gradient from two backward passes",
                "run with LEANGRPO_SCHEDULE=recompute, or call backward once per policy call",
            )
        self.seen = True


@dataclass
class Window:
    """One rollout and the first update after it.

    Attributes:
        number: counts the windows of the process from 1.
        base: the id of its first row; ids are never used twice, so samples of an older rollout cannot match.
        order: [rows, steps] CPU long, the steps of each row in the order upstream trains them.
        trained: how many steps of each row are trained.
        consumed_rows: how many rows the first update consumes.
        held: kept calls that no update has consumed yet.
        consumed: kept calls whose leaf upstream holds, in the order of consumption.
        positions: the place of each selected (row, step) in the order of consumption.
        reasons: why calls were not kept, not replayed or dropped, and how many.
        limit: how many leading places the budget holds.
        net, seen: the network whose calls are kept, and what they depended on besides their arguments.
        refusal: why the window keeps nothing more; empty as long as it may.
        agreed: how many leading places every rank holds, once ranks have compared.
        native_only: some rank had to recompute, so from here on all do.
        updating: the rollout is over.
    """

    number: int
    base: int
    order: Tensor
    trained: int
    consumed_rows: int
    positions: dict[tuple[int, int], int] = field(default_factory=dict)
    held: dict[Key, Kept] = field(default_factory=dict)
    consumed: list[tuple[Key, Kept]] = field(default_factory=list)
    reasons: dict[str, int] = field(default_factory=dict)
    limit: float = float("inf")
    kept: int = 0
    replayed: int = 0
    recomputed: int = 0
    measured: int = 0
    graph_bytes: int = 0
    peak_held_bytes: int = 0
    net: nn.Module | None = None
    seen: Seen | None = None
    probed: bool = False
    audits: list[float] = field(default_factory=list)
    looked_at: bool = False
    refusal: str = ""
    ambiguous: set[Key] = field(default_factory=set)
    passed_by: set[Key] = field(default_factory=set)
    meter: Meter = field(default_factory=Meter)
    updating: bool = False
    native_only: bool = False
    agreed: int | None = None

    def __post_init__(self) -> None:
        for row, steps in enumerate(self.order[: self.consumed_rows, : self.trained].tolist()):
            for place, step in enumerate(steps):
                self.positions[(self.base + row, step)] = row * self.trained + place

    def count(self, reason: str, calls: int = 1) -> None:
        """Remembers why calls were not kept, not replayed, or dropped."""
        self.reasons[reason] = self.reasons.get(reason, 0) + calls

    def pass_by(self, key: Key, reason: str) -> None:
        """Counts a selected call of the rollout that was not kept; the update does not count it again."""
        self.passed_by.add(key)
        self.count(reason)

    def hold(self, key: Key, call: Kept) -> None:
        """Keeps a call until an update asks for it."""
        self.held[key] = call
        self.kept += 1

    def end_rollout(self) -> None:
        """From here on calls are used; until here they piled up, so this is the peak."""
        self.updating = True
        followed = self.meter.alive() if self.measured == self.kept else 0
        self.peak_held_bytes = followed or sum(call.graph_bytes for call in self.held.values())

    def prefix(self) -> int:
        """How many leading places of the order of consumption are held, whatever the site."""
        places = {self.positions[(row, step)] for row, step, _ in self.held}
        return next(place for place in range(len(places) + 1) if place not in places)

    def keep_prefix(self, length: int, reason: str) -> None:
        """Drops held calls from place `length` on."""
        beyond = [key for key in self.held if self.positions[key[:2]] >= length]
        self.drop(beyond, reason)

    def drop(self, keys: Iterable[Key], reason: str) -> None:
        for key in list(keys):
            del self.held[key]
            self.count(reason)
