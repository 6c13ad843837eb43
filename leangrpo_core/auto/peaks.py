"""The memory a native window takes, phase by phase, and what that leaves for kept graphs."""

import math

import torch

from ..budget import MARGIN

WITH_GRAPHS = ("rollout", "reward", "update")
"""Phases in which kept graphs are there. After the first flush none is, so the optimizer step needs no room beside."""


class Cuda:
    """Bytes of the current CUDA device, from the allocator; no call waits for the device."""

    def capacity(self) -> float:
        """What this process could have in all."""
        free, _ = torch.cuda.mem_get_info()
        return free + torch.cuda.memory_reserved()

    def allocated(self) -> float:
        return torch.cuda.memory_allocated()

    def peak(self) -> float:
        """The most that was allocated at a time since :meth:`reset`."""
        return torch.cuda.max_memory_allocated()

    def reset(self) -> None:
        torch.cuda.reset_peak_memory_stats()


def source() -> Cuda | None:
    """Where memory figures come from; None where nobody can tell (the CPU)."""
    return Cuda() if torch.cuda.is_initialized() else None


class Peaks:
    """Peaks of the first window, which keeps nothing, and the watch over later ones.

    Attributes:
        bytes: by phase: `rollout`, `reward` (and decoding), `update` (to its end, before clipping), `step` (the first
            optimizer step, which allocates its state, and later updates). Empty where nothing can be measured.
    """

    def __init__(self) -> None:
        self.bytes: dict[str, float] = {}
        self._source: Cuda | None = None
        self._base = self._before = self._over = 0.0

    def begin(self) -> None:
        """The first rollout begins."""
        self._source = source()
        if self._source is not None:
            self._base = self._source.allocated()
            self._source.reset()

    def end(self, phase: str) -> None:
        """A phase of the first window is over, and the next one begins."""
        if self._source is not None:
            self.bytes[phase] = max(self._source.peak(), self.bytes.get(phase, 0.0))
            self._source.reset()

    def limit(self) -> float:
        """Bytes that may be allocated at a time."""
        return math.inf if self._source is None else self._source.capacity() * (1 - MARGIN)

    def room(self) -> float:
        """Bytes for kept graphs, before a rollout: what the fullest phase leaves that has graphs beside it.

        What has come to stay since the first rollout began, such as the optimizer's state, is there in all later ones.
        """
        if self._source is None:
            return math.inf
        grown = max(self._source.allocated() - self._base, 0.0)
        return max(self.limit() - max(self.bytes.get(phase, 0.0) for phase in WITH_GRAPHS) - grown, 0.0)

    def watch(self) -> None:
        """A later rollout begins."""
        self._before = self._source.peak() if self._source is not None else 0.0
        self._over = 0.0

    def look(self) -> None:
        """Its first update ends; no reset, since upstream may report the peak of its whole run."""
        peak = self._source.peak() if self._source is not None else 0.0
        self._over = max(peak - self.limit(), 0.0) if peak > self._before else 0.0

    def over(self) -> float:
        """By how many bytes the watched window went beyond the limit."""
        return self._over

    def told(self) -> str:
        """The peaks in words, or nothing."""
        if not self.bytes:
            return ""
        return "; native peaks: " + ", ".join(f"{phase} {found / 1e9:.3g} GB" for phase, found in self.bytes.items())
