"""Host memory for what kept graphs saved on the device: counted, limited, and copied aside where there is CUDA."""

from collections import deque
from typing import Any

import torch
from torch import Tensor

from .errors import LeanError


class HostMemory:
    """How much of the host's memory this rank uses for kept graphs.

    Args:
        limit: bytes it may use; infinity for all there is.

    Attributes:
        used: bytes in use now.
    """

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self.used = 0

    def has_room(self, size: int) -> bool:
        return self.used + size <= self.limit


def size_of(numel: int, pinned: bool) -> int:
    """Bytes that a host copy of `numel` bytes takes: torch rounds pinned blocks up to powers of two."""
    return 1 << (numel - 1).bit_length() if pinned and numel else numel


def flat(tensor: Tensor) -> Tensor:
    """The whole storage behind `tensor` as bytes, [n] uint8, on its device."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


class Copy:
    """The bytes of one storage on the host, shared by all saved tensors that lie in it.

    Brought back to the device at the first use, the storage stays there until each of those tensors has been used once,
    as long as it would have stayed without a copy. Later uses (a graph that is walked twice) bring it back again.
    """

    def __init__(self, tensor: Tensor, memory: HostMemory, lane: "Lane") -> None:
        self._memory, self._size = memory, 0
        self._device = tensor.device
        source = flat(tensor)
        self.moved = source.numel()
        size = size_of(self.moved, lane.pinned)
        try:
            self._bytes = torch.empty(self.moved, dtype=torch.uint8, pin_memory=lane.pinned)
        except RuntimeError as error:
            raise LeanError(
                "LG608",
                f"no host memory for {self.moved} bytes of a kept graph, {memory.used / 1e9:.3g} GB in use: {error}",
                f"set LEANGRPO_OFFLOAD_GB to less than {memory.used / 1e9:.3g}; what does not fit is recomputed",
            ) from error
        lane.copy(self._bytes, source, tensor)
        self._size = size
        memory.used += size
        self._back: Tensor | None = None
        self.unused = 0  # saved tensors that no backward has asked for yet

    def __del__(self) -> None:
        self._memory.used -= self._size

    def storage(self) -> Tensor:
        """The bytes on the device, in the order of its current stream."""
        back = self._back
        if back is None:
            back = torch.empty(self.moved, dtype=torch.uint8, device=self._device)
            back.copy_(self._bytes, non_blocking=True)
        self._back = back if self.unused else None
        return back


class Part:
    """A saved tensor that lies in a copied storage."""

    def __init__(self, copy: Copy, tensor: Tensor) -> None:
        self._copy, self._dtype = copy, tensor.dtype
        self._view = tensor.storage_offset(), tensor.shape, tensor.stride()
        self._used = False
        copy.unused += 1

    def get(self) -> Tensor:
        """The tensor on its device, of the layout it had."""
        if not self._used:
            self._used = True
            self._copy.unused -= 1
        with torch.no_grad():
            back = self._copy.storage()
            return torch.empty(0, dtype=self._dtype, device=back.device).set_(back.untyped_storage(), *self._view)


class Lane:
    """The way of one call's copies to the host. On the CPU each is there at once."""

    pinned = False

    def copy(self, to: Tensor, source: Tensor, tensor: Tensor) -> None:
        """Copies `source`, the storage of `tensor`, whose memory must stay as it is until :meth:`finish`."""
        to.copy_(source)

    def finish(self) -> None:
        """Waits until all copies are there."""


class CudaLane(Lane):
    """Copies to pinned memory on a stream of their own, beside the forward's kernels.

    A tensor is let go as soon as its copy is there, at the latest at the end of the call.

    Raises:
        RuntimeError: a tensor was written in place while it was being copied. Without a copy torch itself would refuse
            the backward.
    """

    pinned = True

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)
        self._under_way: deque[tuple[Any, Tensor, int]] = deque()

    def copy(self, to: Tensor, source: Tensor, tensor: Tensor) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            to.copy_(source, non_blocking=True)
            event = self._stream.record_event()
        self._under_way.append((event, tensor.detach(), tensor._version))
        while self._under_way and self._under_way[0][0].query():
            self._let_go()

    def finish(self) -> None:
        self._stream.synchronize()
        while self._under_way:
            self._let_go()

    def _let_go(self) -> None:
        _, tensor, version = self._under_way.popleft()
        if tensor._version != version:
            raise RuntimeError(f"a tensor of shape {tuple(tensor.shape)} was written in place after a graph saved it")


def lane_to_host(device: torch.device) -> Lane:
    return CudaLane(device) if device.type == "cuda" else Lane()
