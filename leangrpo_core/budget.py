"""How many bytes of kept graphs this rank may hold: what is set, or what the first window leaves free on CUDA."""

import math
from collections.abc import Callable

import torch

MARGIN = 0.05
"""Part of the device's memory left alone: the allocator cannot use every gap."""


class Budget:
    """Measured, it is what was free at the peak of a window without kept graphs, rollout, rewards and step included.

    Args:
        bytes_set: the setting; None to measure. Where nothing can be measured (on the CPU) there is no limit then.
    """

    def __init__(self, bytes_set: float | None) -> None:
        self.bytes = math.inf if bytes_set is None else bytes_set
        self._measuring = False
        self._known = bytes_set is not None

    def begin_window(self, say: Callable[[str], object]) -> str:
        """At the start of every window: why it must keep nothing, or nothing. `say` is told what was measured."""
        if self._known or not torch.cuda.is_initialized():
            return ""
        if not self._measuring:
            torch.cuda.reset_peak_memory_stats()
            self._measuring = True
            return "the first window measures memory (set LEANGRPO_BUDGET_GB to skip that)"
        free, _ = torch.cuda.mem_get_info()
        capacity = free + torch.cuda.memory_reserved()
        self.bytes = max(capacity * (1 - MARGIN) - torch.cuda.max_memory_allocated(), 0.0)
        self._known = True
        say(f"room for {self.bytes / 1e9:.3g} GB of kept graphs")
        return ""
