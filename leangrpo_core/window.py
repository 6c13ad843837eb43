"""One rollout and the first update after it: which steps are held, which were used, and why others were not."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from . import agree
from .errors import LeanError
from .kept import Kept, Row
from .memory import Meter
from .rows import BY_UP_TO
from .seen import Seen, see, versions
from .sync import Wrapper, bare

if TYPE_CHECKING:
    from .reweight.rollout import Reweight

Key = tuple[int, int, str]  # row of the rollout, trajectory step, site (which network call of the step)


def numbers(value: Any) -> list[int]:
    """Ids, however upstream has them."""
    if isinstance(value, Tensor):
        return [int(item) for item in value.reshape(-1).tolist()]
    return [int(item) for item in value] if isinstance(value, (list, tuple, range)) else [int(value)]


def keys_of(rows: Any, steps: Any, site: str) -> list[Key]:
    """The steps that a network call evaluates: one per row, each at its own step or all at the same.

    Raises:
        LeanError: LG610 if there are neither one step nor as many as rows.
    """
    ids, at = numbers(rows), numbers(steps)
    if len(at) not in (1, len(ids)):
        raise LeanError("LG610", f"{len(ids)} rows with {len(at)} steps", "the tree was edited: apply the patch again")
    return [(row, step, site) for row, step in zip(ids, at * len(ids) if len(at) == 1 else at, strict=True)]


@dataclass
class Window:
    """One rollout and the first update after it. A step is one (row, trajectory step).

    Attributes:
        number: counts the windows of the process from 1.
        base: the id of its first row; ids are never used twice, so samples of an older rollout cannot match.
        positions: the place of each selected step in the order of consumption.
        whole: the update trains the rows of each call of the rollout in one call, in their order.
        held: rows of kept calls that no update has consumed yet.
        consumed: kept calls of which upstream holds leaves, in the order of consumption.
        largest: the amount, for reasons that have one.
        reasons: why steps were not kept, not replayed or dropped, and how many.
        limit: how many leading places the budgets hold, device and host together.
        on_device: how many of them are to lie on the device.
        offloaded: kept calls of which the graph lies in host memory.
        graph_bytes: of the last kept call's graph, on the device or as if it were there.
        host_bytes: of the last one in host memory, there.
        kept, replayed, recomputed: steps, once for each site.
        sites: the network calls of a step that the rollout has made.
        calls, measured: kept calls, and of how many the bytes were followed.
        net, seen: the network whose calls are kept, and what they depended on besides their arguments.
        books: attributes of the network that its own calls change.
        glanced: the rows of the call before, at which the network was looked at again.
        other: what the network has otherwise than at the first kept call, in words, or nothing.
        refusal: why the window keeps nothing more; empty as long as it may.
        losses: how many losses went backward between calls that were consumed.
        turned_away: steps that were held for other inputs than the update's.
        rounding_allowed: whether a step may be replayed for inputs that differ by rounding.
        rounded: which inputs did, in words, and by how much at most.
        walks: how often graphs were walked.
        agreed: how many leading places every rank holds, with all their calls, once ranks have compared.
        native_only: some rank had to recompute, so from here on all do.
        updating: the rollout is over.
        reweight: what keeps gradients in place of graphs, with that schedule.
    """

    number: int
    base: int
    positions: dict[tuple[int, int], int]
    whole: bool = False
    held: dict[Key, Row] = field(default_factory=dict)
    consumed: list[Kept] = field(default_factory=list)
    reasons: dict[str, int] = field(default_factory=dict)
    largest: dict[str, float] = field(default_factory=dict)
    limit: float = float("inf")
    on_device: float = float("inf")
    kept: int = 0
    replayed: int = 0
    recomputed: int = 0
    calls: int = 0
    measured: int = 0
    offloaded: int = 0
    graph_bytes: int = 0
    host_bytes: int = 0
    peak_held_bytes: int = 0
    peak_host_bytes: int = 0
    net: nn.Module | None = None
    seen: Seen | None = None
    books: set[str] = field(default_factory=set)
    glanced: frozenset[int] = frozenset()
    other: str = ""
    probed: bool = False
    audits: list[float] = field(default_factory=list)
    walks: int = 0
    looked_at: bool = False
    refusal: str = ""
    losses: int = 0
    turned_away: int = 0
    rounding_allowed: bool = False
    rounded: dict[str, float] = field(default_factory=dict)
    ambiguous: set[Key] = field(default_factory=set)
    passed_by: set[Key] = field(default_factory=set)
    sites: set[str] = field(default_factory=set)
    meter: Meter = field(default_factory=Meter)
    updating: bool = False
    native_only: bool = False
    agreed: int | None = None
    reweight: "Reweight | None" = None

    def calls_whole(self, wrapper: Wrapper) -> bool:
        """Whether a kept call is replayed with all its rows or not at all, since ranks communicate in its backward."""
        return self.whole and wrapper.communicates

    def see(self, net: nn.Module) -> Seen:
        """What the calls of `net` depend on, looked at the first time."""
        if self.seen is None:
            self.net = bare(net)
            self.seen = see(self.net)
        return self.seen

    def others(self, net: nn.Module, wholly: bool) -> list[str]:
        """What `net` has otherwise than the kept calls saw it, in words."""
        return self.seen.others(see(bare(net), wholly), self.books) if self.seen is not None else []

    def written(self, net: nn.Module) -> bool:
        """Whether weights were written in place since, so that graphs that are held cannot be walked any more."""
        return self.reweight is None and self.seen is not None and versions(bare(net)) != self.seen.versions

    def glance(self, net: nn.Module, keys: Sequence[Key], wrapper: Wrapper) -> None:
        """At the first call of each trajectory of the rollout: whether the network is still that of the first kept one.

        Between trajectories upstream may turn to other weights. Looking at weights makes FSDP2 give up gathered ones:
        ranks keep calls of other steps, but look at the same calls, so that they gather again in the same ones.
        """
        rows = frozenset(row for row, _, _ in keys)
        if rows == self.glanced or wrapper.refusal:
            return
        if self.reweight is not None:
            self.reweight.end_trajectory()  # where a reward has not done so: ranks communicate in one order
        self.glanced, other = rows, list[str]()
        if self.seen is not None and self.net is not None and self.calls:
            now = see(self.net, wholly=False)
            other = self.seen.others(now, self.books) or ["weights"] * (now.versions != self.seen.versions)
        elif wrapper.collective:
            self.net = bare(net)
            self.seen = see(self.net)
        if wrapper.collective and self.reweight is not None and agree.anyones([bool(other)])[0]:
            other = other or ["weights on another rank"]
        self.other = f"{' and '.join(other)} were others when the rollout made this call" if other else ""

    def count(self, reason: str, steps: int = 1) -> None:
        """Remembers why steps were not kept, not replayed, or dropped; of reasons with an amount the largest one."""
        what, by, amount = reason.partition(BY_UP_TO)
        if by:
            self.largest[what] = max(float(amount), self.largest.get(what, 0.0), key=lambda x: (math.isnan(x), x))
        self.reasons[what] = self.reasons.get(what, 0) + steps

    def note_rounding(self, reasons: Iterable[str]) -> None:
        """Remembers inputs that differ from the rollout's by rounding, replayed or not."""
        for reason in reasons:
            what, _, amount = reason.partition(BY_UP_TO)
            self.rounded[what] = max(float(amount), self.rounded.get(what, 0.0))

    def told(self) -> dict[str, int]:
        """The reasons as text, and how many steps each."""
        return {
            what + (f"{BY_UP_TO}{self.largest[what]:.3g}" if what in self.largest else ""): steps
            for what, steps in self.reasons.items()
        }

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
        if call.on_host:
            self.offloaded += 1
            self.host_bytes = call.host_bytes

    def take(self, keys: Iterable[Key]) -> list[Row]:
        """Hands rows to an update, each once."""
        rows = [self.let_go(key) for key in keys]
        if self.consumed and self.consumed[-1].has_gradients(every=False):
            self.losses += 1
        for row in rows:
            if not row.call.taken:
                row.call.loss = self.losses
                self.consumed.append(row.call)
            row.call.taken.append(row.place)
        self.replayed += len(rows)
        return rows

    def end_rollout(self) -> None:
        """From here on calls are used; until here they piled up, so this is the peak."""
        self.updating = True
        followed = self.meter.alive() if self.measured == self.calls else 0
        self.peak_host_bytes = sum({id(row.call): row.call.host_bytes for row in self.held.values()}.values())
        # What is followed are storages, wherever they lie.
        self.peak_held_bytes = followed - self.peak_host_bytes if followed else self.held_bytes()

    def held_bytes(self) -> int:
        """Bytes on the device of the graphs of which a row is held."""
        return sum({id(row.call): row.call.graph_bytes for row in self.held.values()}.values())

    def places_on_host(self) -> list[int]:
        """Places, ascending, that are held in host memory."""
        return sorted({self.positions[key[:2]] for key, row in self.held.items() if row.call.on_host})

    def prefix(self) -> int:
        """How many leading places of the order of consumption are held, each with every network call of its step."""
        held = Counter(self.positions[(row, step)] for row, step, _ in self.held)
        return next(place for place in range(len(held) + 1) if held[place] < max(len(self.sites), 1))

    @property
    def agreed_calls(self) -> int:
        """How many steps every rank holds, counted once for each site as `replayed` is."""
        return (self.agreed or 0) * max(len(self.sites), 1)

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
