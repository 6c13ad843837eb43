"""Figures for LEANGRPO_SCHEDULE=auto in place of measured ones, so that a test knows the choice."""

from collections.abc import Callable
from typing import Any

from leangrpo_core.auto import auto, peaks
from leangrpo_core.auto.stopwatch import Stopwatch

Patch = Callable[[Any, str, Any], object]
"""As `setattr`, or a monkeypatch's."""


def times(
    patch: Patch, update: float = 0.02, extra: float = 0.0, window: float = 0.2,
    seconds: Callable[[], float] | None = None, scaling: float = 0.0,
) -> None:  # fmt: skip
    """Seconds of a native forward of the update, of what a kept call takes longer, of a native window, and of scaling.

    By default a step saves a tenth of a window, so that no two ways are close. Windows have no duration, so none is
    judged, unless `seconds` tells it.
    """
    measured = auto.probe

    def probe(*args: Any, **options: Any) -> Any:
        found, reason = measured(*args, **options)
        if found is not None:
            found = found._replace(forward=0.0, extra=extra, replay=0.0, verdict=0.0, checks=0.0, scaling=scaling)
        return found, reason

    patch(auto, "probe", probe)
    patch(Stopwatch, "median", lambda self, kind: update)
    patch(Stopwatch, "_without_warm_up", lambda self: window)
    patch(Stopwatch, "seconds", lambda self: float("nan") if seconds is None else seconds())


class Memory:
    """A device's memory in place of CUDA's: `capacity` bytes, and peaks that the test sets."""

    def __init__(self, patch: Patch, capacity: float, peak: float) -> None:
        self.total, self.now, self.most, self.resets = capacity, 0.0, peak, 0
        patch(peaks, "source", lambda: self)

    def capacity(self) -> float:
        return self.total

    def allocated(self) -> float:
        return self.now

    def peak(self) -> float:
        return self.most

    def reset(self) -> None:
        self.resets += 1
