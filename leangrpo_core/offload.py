"""Keeps a graph with its saved tensors in host memory: they leave the device as the forward saves them.

    with to_host(net, (args, kwargs), memory) as moved:
        out = net(*args, **kwargs)

What stays on the device: weights and buffers and whatever else modules hold, also as FSDP has gathered or cast them;
the call's own arguments, which upstream holds; small tensors; tensors that are more than memory with strides. Inside
activation checkpointing nothing is saved but its inputs (`checkpoints.py` makes torch save those passed by keyword).
"""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.multiprocessing.reductions import StorageWeakRef

from .checkpoints import saving_keywords
from .guard import FSDPModule
from .host import Copy, HostMemory, Part, lane_to_host, size_of
from .values import leaves

SMALL = 1 << 16
"""Bytes of storage below which a copy costs more than it frees."""

OVER_HOST = "over LEANGRPO_OFFLOAD_GB"


class Stays:
    """A saved tensor that stays where it is. torch gives up its check for writes in place where hooks are, so it is
    made here."""

    def __init__(self, tensor: Tensor) -> None:
        # A result of the graph would hold itself through its own node.
        self._tensor = tensor if tensor.grad_fn is None else tensor.detach()
        self._version = tensor._version

    def get(self) -> Tensor:
        if self._tensor._version != self._version:
            raise RuntimeError(
                f"one of the variables needed for gradient computation has been modified by an inplace operation: a "
                f"{tuple(self._tensor.shape)} that a kept graph saved is at version {self._tensor._version}, expected "
                f"{self._version}"
            )
        return self._tensor


class Moved:
    """What one forward moved.

    Attributes:
        bytes: of device memory that its graph does not hold.
        host_bytes: of host memory that it holds instead, as allocated.
        refusal: why not everything could be moved, or nothing.
    """

    def __init__(self, memory: HostMemory, device: torch.device) -> None:
        self.bytes = self.host_bytes = 0
        self.refusal = ""
        self._memory, self._lane = memory, lane_to_host(device)
        self._staying: dict[int, StorageWeakRef] = {}  # weak references keep an address from being used again
        self._copies: dict[tuple[int, int], tuple[StorageWeakRef, ref[Copy]]] = {}

    def stay(self, tensors: Iterable[Any]) -> None:
        """Tensors in the storages of these are not moved."""
        for tensor in tensors:
            if isinstance(tensor, Tensor) and _plain(tensor):
                storage = tensor.untyped_storage()
                self._staying[storage._cdata] = StorageWeakRef(storage)

    def pack(self, tensor: Tensor) -> Part | Stays:
        if not _plain(tensor) or tensor.is_conj() or tensor.is_neg():
            return Stays(tensor)
        storage = tensor.untyped_storage()
        if storage.nbytes() < SMALL or storage._cdata in self._staying:
            return Stays(tensor)
        with torch.no_grad():
            copy = self._copy(tensor, storage)
        return Stays(tensor) if copy is None else Part(copy, tensor)

    def _copy(self, tensor: Tensor, storage: torch.UntypedStorage) -> Copy | None:
        """The copy of the storage as it is now; None if there is no room."""
        key = (storage._cdata, tensor._version)
        known = self._copies.get(key)
        copy = known[1]() if known else None
        if copy is not None:
            return copy
        size = size_of(storage.nbytes(), self._lane.pinned)
        if not self._memory.has_room(size):
            self.refusal = OVER_HOST
            return None
        copy = Copy(tensor, self._memory, self._lane)
        self._copies[key] = StorageWeakRef(storage), ref(copy)
        return copy

    def finish(self) -> None:
        """The forward is over: waits for its copies and counts those its graph holds."""
        self._lane.finish()
        for _, copy in self._copies.values():
            held = copy()
            if held is not None:
                self.bytes += held.moved
                self.host_bytes += size_of(held.moved, self._lane.pinned)
        self._copies.clear()
        self._staying.clear()


def _plain(tensor: Tensor) -> bool:
    """Whether a tensor is memory with strides and nothing else."""
    return type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided and not tensor.is_inference()


def _unpack(packed: Part | Stays) -> Tensor:
    return packed.get()


def _held_by(net: nn.Module) -> Iterator[Any]:
    """What modules hold: weights and buffers, as FSDP has them now, and tensors in plain attributes."""
    for module in net.modules():
        yield from module._parameters.values()
        yield from module._buffers.values()
        yield from vars(module).values()


def why_not(net: nn.Module) -> str:
    """Why no graph of `net` can be held this way; empty if it can."""
    if any(getattr(module, "_compiled_call_impl", None) or hasattr(module, "_orig_mod") for module in net.modules()):
        return "torch.compile decides itself what a graph saves"
    return ""


@contextmanager
def to_host(net: nn.Module, arguments: Any, memory: HostMemory, device: torch.device) -> Iterator[Moved]:
    """Around one forward under grad.

    Args:
        arguments: of the call; they stay.
        memory: what the copies are taken from. Each is given back when the last saved tensor in it dies.
        device: where the forward runs.
    """
    moved = Moved(memory, device)
    moved.stay(item for _, item in leaves(arguments))
    moved.stay(_held_by(net))

    def gathered(module: nn.Module, args: Any) -> None:
        moved.stay(_held_by(module))

    with ExitStack() as undo:
        for module in net.modules():
            unit = module.module if isinstance(module, FullyShardedDataParallel) else module
            if unit is not module or isinstance(module, FSDPModule):
                undo.callback(unit.register_forward_pre_hook(gathered).remove)
        undo.enter_context(saving_keywords(net))
        undo.enter_context(saved_tensors_hooks(moved.pack, _unpack))
        yield moved
    moved.finish()
