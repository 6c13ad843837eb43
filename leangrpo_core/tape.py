"""Kept calls: the graphs of one rollout, the cut at each output, and what happens to them until the flush.

The cut: the rollout's forward ran under grad, giving `out`. A leaf with the same values takes its place in upstream's
loss, so upstream's own backward stops there and leaves the exact cotangent in `leaf.grad`. Walking `out` backward with
that cotangent gives the gradient that a second forward would have given.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .errors import LeanError
from .guard import Seen
from .memory import Meter
from .rows import join, split
from .values import Uncuttable, map_tensors, snapshot

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
    """One network call of the rollout, held with its graph. Its rows are replayed one by one, in any order.

    Args:
        result: what the network returned, under grad.
        named: its arguments by name; tensors are copied.
        rows: how many rows of the rollout it evaluated; see `rows.py` for how tensors hold them.
        device: where the call ran.
        graph_bytes: bytes the call left allocated.

    Raises:
        Uncuttable: the result cannot be rebuilt, or not be split into rows.
    """

    def __init__(self, result: Any, named: dict[str, Any], rows: int, device: torch.device, graph_bytes: int) -> None:
        self.inputs = snapshot(named)
        self.autocast = autocast_state(device)
        self.rows = rows
        self.copies = 1
        self.plain = False  # a plain tuple, as asked for with return_dict=False
        self.graph_bytes = graph_bytes
        self.outs: list[Tensor] = []
        self.leaves: list[list[Tensor]] = []  # per output that has a graph, per row
        self.values: list[list[Tensor]] = []  # per tensor of the result, per row
        self.waiting: set[int] = set()  # rows that an update may still ask for
        self.taken: list[int] = []
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


@dataclass
class Window:
    """One rollout and the first update after it. A step is one (row, trajectory step).

    Attributes:
        number: counts the windows of the process from 1.
        base: the id of its first row; ids are never used twice, so samples of an older rollout cannot match.
        positions: the place of each selected step in the order of consumption.
        held: rows of kept calls that no update has consumed yet.
        consumed: kept calls of which upstream holds leaves, in the order of consumption.
        reasons: why steps were not kept, not replayed or dropped, and how many.
        limit: how many leading places the budget holds.
        kept, replayed, recomputed: steps.
        calls, measured: kept calls, and of how many the bytes were followed.
        net, seen: the network whose calls are kept, and what they depended on besides their arguments.
        refusal: why the window keeps nothing more; empty as long as it may.
        turned_away: steps that were held for other inputs than the update's.
        agreed: how many leading places every rank holds, once ranks have compared.
        native_only: some rank had to recompute, so from here on all do.
        updating: the rollout is over.
    """

    number: int
    base: int
    positions: dict[tuple[int, int], int]
    held: dict[Key, Row] = field(default_factory=dict)
    consumed: list[Kept] = field(default_factory=list)
    reasons: dict[str, int] = field(default_factory=dict)
    limit: float = float("inf")
    kept: int = 0
    replayed: int = 0
    recomputed: int = 0
    calls: int = 0
    measured: int = 0
    graph_bytes: int = 0
    peak_held_bytes: int = 0
    net: nn.Module | None = None
    seen: Seen | None = None
    probed: bool = False
    audits: list[float] = field(default_factory=list)
    looked_at: bool = False
    refusal: str = ""
    turned_away: int = 0
    ambiguous: set[Key] = field(default_factory=set)
    passed_by: set[Key] = field(default_factory=set)
    meter: Meter = field(default_factory=Meter)
    updating: bool = False
    native_only: bool = False
    agreed: int | None = None

    def count(self, reason: str, steps: int = 1) -> None:
        """Remembers why steps were not kept, not replayed, or dropped."""
        self.reasons[reason] = self.reasons.get(reason, 0) + steps

    def pass_by(self, keys: Iterable[Key], reason: str) -> None:
        """Counts selected steps of the rollout that were not kept; the update does not count them again."""
        for key in keys:
            self.passed_by.add(key)
            self.count(reason)

    def hold(self, call: Kept, keys: Mapping[Key, int]) -> None:
        """Keeps rows of a call, given by their places in it, until an update asks for them."""
        call.wait_for(keys.values())
        self.held |= {key: Row(call, place) for key, place in keys.items()}
        self.kept += len(keys)
        self.calls += 1

    def take(self, keys: Iterable[Key]) -> list[Row]:
        """Hands rows to an update, each once."""
        rows = [self.let_go(key) for key in keys]
        for row in rows:
            if not row.call.taken:
                self.consumed.append(row.call)
            row.call.taken.append(row.place)
        self.replayed += len(rows)
        return rows

    def end_rollout(self) -> None:
        """From here on calls are used; until here they piled up, so this is the peak."""
        self.updating = True
        followed = self.meter.alive() if self.measured == self.calls else 0
        self.peak_held_bytes = followed or self.held_bytes()

    def held_bytes(self) -> int:
        """Bytes of the graphs of which a row is held."""
        return sum({id(row.call): row.call.graph_bytes for row in self.held.values()}.values())

    def prefix(self) -> int:
        """How many leading places of the order of consumption are held, whatever the site."""
        places = {self.positions[(row, step)] for row, step, _ in self.held}
        return next(place for place in range(len(places) + 1) if place not in places)

    def keep_prefix(self, length: int, reason: str) -> None:
        """Drops held rows from place `length` on."""
        beyond = [key for key in self.held if self.positions[key[:2]] >= length]
        self.drop(beyond, reason)

    def drop(self, keys: Iterable[Key], reason: str) -> None:
        """Lets rows go. A graph is freed once none of its rows is held or replayed."""
        for key in list(keys):
            self.let_go(key)
            self.count(reason)

    def let_go(self, key: Key) -> Row:
        """Takes a row out of what is held."""
        row = self.held.pop(key)
        row.call.waiting.discard(row.place)
        return row
