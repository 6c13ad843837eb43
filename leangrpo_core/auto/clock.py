"""Stamps on the time line of the device that computes, without making it wait."""

import math
import time

import torch


class Stamp:
    """A moment in the order of the device's own work: an event in its stream on CUDA, the host's clock elsewhere."""

    def __init__(self) -> None:
        self._event: torch.cuda.Event | None = None
        if torch.cuda.is_initialized():
            self._event = torch.cuda.Event(enable_timing=True)
            self._event.record()
        self._at = time.perf_counter()

    def since(self, earlier: "Stamp") -> float:
        """Seconds from an earlier stamp to this one; NaN as long as the device has not come here."""
        if self._event is None or earlier._event is None:
            return self._at - earlier._at
        return earlier._event.elapsed_time(self._event) / 1e3 if self._event.query() else math.nan


def now(device: torch.device) -> float:
    """The host's clock once the device has done all it was given: for probes only."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
