"""Whether windows keep their promise: seconds of whole windows by way, and what follows from them. No torch."""

import math
import statistics
from collections import deque

from .choice import Way

ENOUGH = 3
"""Windows of a way of which the median counts."""
NOISE = 0.03
"""The part of a window that says nothing: by more a way that rounds otherwise than upstream must be faster."""
DUELS = 4
"""So often ways are compared at most: figures that change all the time are noise."""


class Watch:
    """Seconds of windows, each of the slowest rank.

    Two ways are compared in windows that alternate between them, so that a machine that becomes slower meanwhile says
    nothing about either. That is due for a way that no estimate can judge, and when windows take longer than the first,
    native one did.

    Args:
        home: the way that was chosen.
        native: upstream's way and the seconds of the first window; NaN if they are not known.
        untried: ways that no estimate can judge.

    Attributes:
        home: the way that has proved best so far.
    """

    def __init__(self, home: Way, native: tuple[Way, float], untried: list[Way]) -> None:
        self.home, self.untried = home, untried
        self._native = native[0]
        self._seconds: dict[Way, deque[float]] = {}
        self._rival: Way | None = None
        self._duels = self._turns = 0
        self.add(*native)

    def add(self, way: Way, seconds: float) -> None:
        """A window was run that way. NaN is none."""
        if not math.isnan(seconds):
            self._seconds.setdefault(way, deque(maxlen=ENOUGH)).append(seconds)

    def choose_again(self, home: Way) -> None:
        """Another choice was made: its windows differ from those before."""
        self.home, self._rival, self.untried = home, None, []
        self._forget(home)

    def next(self) -> tuple[Way, str]:
        """The way of the next window, and what was found, if anything was."""
        if self._rival is not None:
            return self._duel(self._rival)
        slower = self._count(self.home) >= ENOUGH and self.home != self._native
        slower = slower and self._median(self.home) > (1 + NOISE) * self._median(self._native)
        if not (self.untried or slower) or self._duels >= DUELS:
            return self.home, ""
        self._rival = self.untried.pop(0) if self.untried else self._native
        why = f"compares {self.home} with {self._rival}"
        if slower and self._rival == self._native:
            why += f", since windows take {self._median(self.home):.3g} s, natively {self._median(self._native):.3g} s"
        self._duels, self._turns = self._duels + 1, 0
        self._forget(self.home)
        self._forget(self._rival)
        return self._rival, f"{why}, {ENOUGH} windows each"

    def _duel(self, rival: Way) -> tuple[Way, str]:
        self._turns += 1
        if min(self._count(self.home), self._count(rival)) < ENOUGH:
            if self._turns < 4 * ENOUGH:  # windows that are audited, or without an update, do not count
                return (self.home if self._turns % 2 else rival), ""
            self._rival = None
            return self.home, ""
        # By the median and by the fastest: one of them alone is easily disturbed, and the estimate spoke for `home`.
        # What adds up gradients otherwise than upstream must be faster by more than noise.
        margin = NOISE * ((rival.rounds != self._native.rounds) - (self.home.rounds != self._native.rounds))
        better = all(
            of(self._seconds[rival]) * (1 + margin) < of(self._seconds[self.home]) for of in (statistics.median, min)
        )
        other, self._rival = (self.home, None) if better else (rival, None)
        self.home = rival if better else self.home
        seconds = f"a window takes {self._median(self.home):.3g} s, {self._median(other):.3g} s with {other}"
        return self.home, f"{self.home}: {seconds}"

    def _count(self, way: Way) -> int:
        return len(self._seconds.get(way, ()))

    def _median(self, way: Way) -> float:
        found = self._seconds.get(way)
        return statistics.median(found) if found else math.inf

    def _forget(self, way: Way) -> None:
        self._seconds.pop(way, None)
