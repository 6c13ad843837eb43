"""What a kept graph weighs, and how many of them a budget holds."""

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
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
        # A view, or an operation in place, returns a storage that was there before: weights must not be counted.
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
        self._followed = [ref for ref in self._followed if not ref.expired()]
        return _bytes(self._followed)


def fits(budget_bytes: float, graph_bytes: int) -> float:
    """How many graphs of `graph_bytes` bytes a budget holds; infinity where it has no limit."""
    return math.inf if math.isinf(budget_bytes) else math.floor(budget_bytes / max(graph_bytes, 1))
