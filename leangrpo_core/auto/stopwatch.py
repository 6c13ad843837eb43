"""Seconds of a window: its rollout and its updates, and in a native one each of its network calls."""

import math
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ..values import tensors_of
from .clock import Stamp

Span = tuple[Stamp, Stamp]


class Stopwatch:
    """Of one window at a time. Rewards, logging and evaluations are not in it. Before the first one it does nothing.

    Attributes:
        sites: the network calls of a step that a detailed window's rollout has made.
        rolling: within a rollout.
        native: seconds of the detailed window without its warm-up, once it is finished.
    """

    def __init__(self) -> None:
        self.sites: set[str] = set()
        self._on = self._detailed = self.rolling = False
        self._calls: dict[str, list[Span]] = {}
        self._rollouts: list[Span] = []
        self._update: Stamp | None = None
        self._end: Stamp | None = None
        self._last: Stamp | None = None  # the end of the last native call of a detailed window's update
        self.native = math.nan
        self._walking: Stamp | None = None

    def begin(self, detailed: bool) -> None:
        """A window begins. Calls are timed if it is `detailed`; their figures stay until the next such window."""
        self._on, self._detailed = True, detailed
        if detailed:
            self._calls = {"rollout": [], "update": [], "backward": []}
        self._rollouts, self._update, self._end, self._last = [], None, None, None

    def finish(self) -> bool:
        """A detailed window is over; whether it had an update, without which it has to be measured again."""
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        self.native = self._without_warm_up()
        return self.native > 0 and self.median("update") > 0

    @contextmanager
    def rolling_out(self) -> Iterator[None]:
        """Around a rollout, or one batch of it."""
        if not self._on:
            yield
            return
        began, self.rolling = Stamp(), True
        try:
            yield
        finally:
            self.rolling = False
            self._rollouts.append((began, Stamp()))

    def rollout_call(self, call: Callable[[], Any], site: str) -> Any:
        """A native call of the rollout."""
        if not (self._detailed and self.rolling):
            return call()
        self.sites.add(site)
        return self._timed("rollout", call)

    def native_call(self, call: Callable[[], Any]) -> Any:
        """A native call of the update, under grad."""
        if not self._detailed:
            return call()
        result = self._timed("update", call)
        self._last = self._calls["update"][-1][1]
        for out in tensors_of(result):
            if out.requires_grad:
                out.register_hook(self._walk)
        return result

    def update_begins(self) -> bool:
        """The update makes a call; whether it is the first one."""
        self._walked()
        first = self._update is None
        if first:
            self._update = Stamp()
        return first

    def update_ends(self) -> bool:
        """Gradients are there; whether for the first time. Later updates of the same rollout count, too."""
        self._walked()
        first, self._end = self._end is None, Stamp()
        return first

    def seconds(self) -> float:
        """Of the rollout and the updates; NaN without an update, or while the device is still at it."""
        end = self._end or self._last  # an update may take several rollouts
        if self._update is None or end is None:
            return math.nan
        return sum(end.since(begin) for begin, end in [*self._rollouts, (self._update, end)])

    def median(self, kind: str) -> float:
        """Seconds of a call of the last detailed window: `rollout`, `update` or `backward`. Zero without any."""
        found = self._found(kind)
        return statistics.median(found) if found else 0.0

    def _found(self, kind: str) -> list[float]:
        found = [end.since(begin) for begin, end in self._calls.get(kind, [])]
        return [seconds for seconds in found if not math.isnan(seconds)]

    def _without_warm_up(self) -> float:
        """A native window as if each call had taken the median: the first ones compile, allocate and connect."""
        found = [self._found(kind) for kind in self._calls]
        return self.seconds() - sum(sum(times) - len(times) * statistics.median(times) for times in found if times)

    def _timed(self, kind: str, call: Callable[[], Any]) -> Any:
        began = Stamp()
        result = call()
        self._calls[kind].append((began, Stamp()))
        return result

    def _walk(self, grad: Tensor) -> None:
        """A backward has come to the network."""
        self._walking = self._walking or Stamp()

    def _walked(self) -> None:
        """It has ended, and what upstream does until its next call."""
        if self._walking is not None:
            self._calls["backward"].append((self._walking, Stamp()))
            self._walking = None
