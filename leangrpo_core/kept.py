"""Kept calls: a network call of the rollout, its graph, and the cut at its output.

The cut: the rollout's forward ran under grad, giving `out`. A leaf with the same values takes its place in upstream's
loss, so upstream's own backward stops there and leaves the exact cotangent in `leaf.grad`. Walking `out` backward with
that cotangent gives the gradient that a second forward would have given.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .cutting import Cuts
from .errors import LeanError
from .fsdp1 import Held
from .rows import join, split
from .values import Uncuttable, map_tensors, snapshot

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
    """One network call of the rollout, held with its graph. Its rows are replayed one by one, in any order.

    Args:
        result: what the network returned, under grad.
        named: its arguments by name; tensors are copied.
        rows: how many rows of the rollout it evaluated; see `rows.py` for how tensors hold them.
        device: where the call ran.
        graph_bytes: bytes the call left allocated on the device.

    Attributes:
        host_bytes: bytes it left in host memory.
        on_host: all that could be moved is there.

    Raises:
        Uncuttable: the result cannot be rebuilt, or not be split into rows.
    """

    def __init__(self, result: Any, named: dict[str, Any], rows: int, device: torch.device, graph_bytes: int) -> None:
        self.inputs = snapshot(named)
        self.autocast = autocast_state(device)
        self.rows = rows
        self.copies = 1
        self.graph_bytes = graph_bytes
        self.host_bytes, self.on_host = 0, False
        self.outs: list[Tensor] = []
        self.leaves: list[list[Tensor]] = []  # per output that has a graph, per row
        self.values: list[list[Tensor]] = []  # per tensor of the result, per row
        self.held: Held | Cuts | None = None  # what the backward needs of the forward besides its graph
        self.waiting: set[int] = set()  # rows that an update may still ask for
        self.taken: list[int] = []
        self.loss = 0  # calls with the same number are parts of one loss
        self._container = map_tensors(result, self._cut)

    def _cut(self, out: Tensor) -> Tensor:
        parts = split(out, self.rows)
        if parts is None:
            raise Uncuttable(f"an output of shape {tuple(out.shape)} is not made of {self.rows} rows")
        if out.dim():
            self.copies = out.shape[0] // self.rows
        # Copies: the network may use the memory of its output again in a later call.
        parts = [part.detach().clone() for part in parts]
        if out.requires_grad:
            for leaf in parts:
                leaf.requires_grad_().register_post_accumulate_grad_hook(_Once())
            self.outs.append(out)
            self.leaves.append(parts)
        self.values.append(parts)
        return torch.tensor(len(self.values) - 1)

    def for_rollout(self) -> Any:
        """The result without a graph, of the type the network returned.

        A copy: an operation in place on it must not reach the leaves or what the graph holds.
        """
        with torch.no_grad():
            return map_tensors(self._container, lambda at: join([part.clone() for part in self.values[int(at)]]))

    def for_log_prob(self) -> tuple[Any, list[list[Tensor]]]:
        """The same with a graph, and its leaves: per output that has one, per row.

        They are not those of the update. What the rollout makes of this result may be kept, and be part of the loss.
        """
        leaves: list[list[Tensor]] = []

        def put_together(at: Tensor) -> Tensor:
            parts = self.values[int(at)]
            if parts[0].requires_grad:
                parts = [part.detach().requires_grad_() for part in parts]
                leaves.append(parts)
            return join([part.clone() for part in parts])

        return map_tensors(self._container, put_together), leaves

    def wait_for(self, places: Iterable[int]) -> None:
        """The rows at `places` are held from now on."""
        self.waiting = set(places)

    @property
    def complete(self) -> bool:
        """No update will ask for another row, and every row that was replayed has got its gradient."""
        return not self.waiting and self.has_gradients(every=True)

    def has_gradients(self, every: bool) -> bool:
        """Whether every, or any, replayed row has got a gradient."""
        rows = [any(column[place].grad is not None for column in self.leaves) for place in self.taken]
        return all(rows) if every else any(rows)

    def release(self) -> list[Tensor]:
        """Hands over the outputs with their graphs; the call holds none of them any more."""
        outs, self.outs = self.outs, []
        return outs

    def cotangents(self) -> list[Tensor]:
        """What the loss left for each output; zeros for a row it did not ask for."""
        return [join([_grad(leaf) for leaf in column]) for column in self.leaves]


class Row(NamedTuple):
    """A row of a kept call."""

    call: Kept
    place: int


def result_of(rows: Sequence[Row]) -> Any:
    """The result of the network call with these rows, for upstream's loss.

    Made of copies of the leaves, so that operations in place are allowed as natively.
    """

    def put_together(at: Tensor) -> Tensor:
        return join([row.call.values[int(at)][row.place].clone() for row in rows])

    return map_tensors(rows[0].call._container, put_together)


def outputs_of(rows: Sequence[Row]) -> list[tuple[Tensor, Tensor]]:
    """Per output with a graph: its value and its cotangent for the network call with these rows."""
    found = []
    for output in range(len(rows[0].call.leaves)):
        leaves = [row.call.leaves[output][row.place] for row in rows]
        found.append((join([leaf.detach() for leaf in leaves]), join([_grad(leaf) for leaf in leaves])))
    return found


def _grad(leaf: Tensor) -> Tensor:
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad


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
