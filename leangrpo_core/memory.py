"""What a kept graph weighs, and how many of them a budget holds."""

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from .values import leaves


class _Follow(TorchDispatchMode):
    """Notes each storage that an operation creates, without keeping it alive."""

    def __init__(self) -> None:
        super().__init__()
        self.created: dict[int, StorageWeakRef] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        # A view, or an operation in place, returns a storage that was there before: weights must not be counted. Its
        # schema says so for torch's own operations; for others (collectives) the arguments are looked through.
        if func.namespace == "fsdp":  # FSDP2 copies out of what it gathers into, which gloo's threads let go only later
            for _, item in leaves(result):
                if isinstance(item, Tensor):
                    self.created.pop(item.untyped_storage()._cdata, None)
            return result
        if func.namespace == "aten":
            if any(returned.alias_info is not None for returned in func._schema.returns):
                return result
            before: set[int] = set()
        else:
            before = {item.untyped_storage()._cdata for _, item in leaves((args, kwargs)) if isinstance(item, Tensor)}
        for _, item in leaves(result):
            if isinstance(item, Tensor):
                storage = item.untyped_storage()
                if storage._cdata not in before:
                    self.created[storage._cdata] = StorageWeakRef(storage)
        return result


def _bytes(refs: Iterable[StorageWeakRef]) -> int:
    """Bytes that the living ones hold now: FSDP makes a storage once and frees it by resizing."""
    return sum(torch.UntypedStorage._new_with_weak_ptr(ref.cdata).nbytes() for ref in refs if not ref.expired())


class Meter:
    """Bytes that network calls leave allocated behind them.

    On CUDA the allocator tells. Elsewhere the storages that operations create are followed until they die; that counts
    what activation checkpointing holds in closures, and the low-precision weight copies of autocast.
    """

    def __init__(self) -> None:
        self._followed: list[StorageWeakRef] = []

    @contextmanager
    def measure(self, device: torch.device) -> Iterator[list[int]]:
        """Yields a list that holds the bytes of the call once the block has ended."""
        figure: list[int] = []
        if device.type == "cuda":
            before = torch.cuda.memory_allocated(device)
            yield figure
            figure.append(max(torch.cuda.memory_allocated(device) - before, 0))
            return
        follow = _Follow()
        with follow:
            yield figure
        self._followed.extend(follow.created.values())
        figure.append(_bytes(follow.created.values()))

    def alive(self) -> int:
        """Bytes of all measured calls that are still allocated (not on CUDA)."""
        return _bytes(self._followed)


class Row(NamedTuple):
    """Bytes of one row's graph, on the device or as if it were there.

    Attributes:
        left: of a graph in host memory, what stays on the device: what could not be moved.
        host: what it takes on the host; no more than a graph as long as none was moved.
    """

    graph: float
    left: float
    host: float


class Sizes:
    """Bytes of a graph, by the shapes of the call's arguments: measured twice each, then known.

    The very first forward also allocates what is no part of a graph (FSDP's buffers, workspaces of kernels), so the
    smaller figure counts.
    """

    def __init__(self) -> None:
        self._figures: dict[tuple[Any, ...], list[int]] = {}
        self._moved: dict[tuple[Any, ...], tuple[int, int]] = {}
        self.rows: dict[str, Row] = {}  # by site: of the last kept call
        self.measured = 0

    def _of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[int]:
        return self._figures.setdefault(_shapes(args, kwargs), [])

    def settled(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        return len(self._of(args, kwargs)) >= 2

    def add(self, args: tuple[Any, ...], kwargs: dict[str, Any], figure: int) -> None:
        figures = self._of(args, kwargs)
        figures[:] = [*figures[-1:], figure]
        self.measured += 1

    def add_moved(self, args: tuple[Any, ...], kwargs: dict[str, Any], moved: int, host: int) -> None:
        """A call with such arguments moved `moved` bytes off the device, which take `host` bytes on the host."""
        self._moved[_shapes(args, kwargs)] = moved, host

    def per_row(self, args: tuple[Any, ...], kwargs: dict[str, Any], rows: int, site: str) -> None:
        """From here on rows weigh, at that site, what those of such a call weigh, `rows` of them."""
        graph = self.graph_bytes(args, kwargs)
        moved, host = self._moved.get(_shapes(args, kwargs), (graph, graph))
        self.rows[site] = Row(graph / rows, max(graph - moved, 0) / rows, host / rows)

    @property
    def row(self) -> Row:
        """What a step of one row weighs, with the graphs of all its sites. Zeros before the first kept call."""
        return Row(*(sum(part) for part in zip(*self.rows.values(), strict=True))) if self.rows else Row(0.0, 0.0, 0.0)

    def fits(self, budget_bytes: float) -> float:
        """How many rows' graphs a budget holds; infinity where it has no limit or no graph was measured yet."""
        one = self.row.graph
        return math.floor(budget_bytes / one) if math.isfinite(budget_bytes) and one else math.inf

    def room(self, budget_bytes: float, host_bytes: float, selected: int) -> tuple[float, float]:
        """How many rows' graphs are to lie on the device, and how many are held in all, some in host memory.

        As many as possible in all, and of those as many as possible on the device, where the others leave something,
        too. The first call is one for the host, which shows both figures.
        """
        alone, one = self.fits(budget_bytes), self.row
        if not host_bytes or alone >= selected:
            return (0, alone) if host_bytes and not one.graph and math.isfinite(budget_bytes) else (alone, alone)

        def on_host(on_device: int) -> int:
            left = budget_bytes - on_device * one.graph
            limits = (left / one.left if one.left else math.inf,
                      host_bytes / one.host if one.host else math.inf, selected - on_device)  # fmt: skip
            return math.floor(min(limits))

        total, on_device = max((here + on_host(here), here) for here in range(int(alone) + 1))
        return on_device, total

    def graph_bytes(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        """The smaller of the last two figures."""
        return min(self._of(args, kwargs))


def _shapes(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(tuple(item.shape) for _, item in leaves((args, kwargs)) if isinstance(item, Tensor))


def free_bytes(device: torch.device) -> float:
    """What could still be allocated; infinite where nobody can tell (the CPU)."""
    if device.type != "cuda":
        return math.inf
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def joint_bytes(net: nn.Module, shards: int) -> int:
    """What one backward through graphs of all units adds: it gathers every unit and holds full gradients to the end.

    Args:
        net: the network under FSDP1; its parameters are this rank's share.
        shards: how many ranks share the weights.
    """
    weights = sum(p.numel() * p.element_size() for p in net.parameters())
    gradients = gradient_bytes(net, shards)
    return weights * (shards - 1) + gradients


def gradient_bytes(net: nn.Module, shards: int) -> int:
    """Bytes of a whole gradient of what trains.

    Under FSDP1 a unit has one gradient: where some of its weights train, it is as large as all of them.

    Args:
        net: the network; its parameters are this rank's share, or, where FSDP2 shards them, know their whole size.
        shards: how many ranks share the weights of which `net` has this rank's share.
    """
    found, seen = 0, set[int]()
    units = FullyShardedDataParallel.fsdp_modules(net)
    for unit in [*reversed(units), *([] if units else [net])]:  # those inside another first
        own = [p for p in unit.parameters() if id(p) not in seen]
        seen |= {id(p) for p in own}
        counted = own if units and any(p.requires_grad for p in own) else [p for p in own if p.requires_grad]
        found += sum(p.numel() * p.element_size() for p in counted)
    return found * shards
