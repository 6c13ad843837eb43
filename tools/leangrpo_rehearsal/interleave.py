"""Runs that take turns, a rollout with its updates each: the speed of a machine drifts, and should favour none.

All processes are there at a time; a file says whose turn it is.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

PATIENCE_S = 0.05
"""Between two looks at the file; what waits should take no time from what runs."""
STOP = -1


def order(rollouts: Mapping[str, int]) -> dict[str, list[int]]:
    """The turns of each run, which makes so many rollouts: in rounds, each round begun by another one."""
    found: dict[str, list[int]] = {name: [] for name in rollouts}
    turn, names = 0, list(rollouts)
    for number in range(max(rollouts.values(), default=0)):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            if number < rollouts[name]:
                found[name].append(turn)
                turn += 1
    return found


def give(file: Path, turn: int) -> None:
    """From here on it is this turn; `STOP` ends all."""
    new = file.with_name(f"{file.name}.new{turn}")
    new.write_text(str(turn))
    new.replace(file)


class Turns:
    """Those of one process.

    Args:
        file: whose turn it is.
        mine: numbers, ascending.
        leads: of the ranks of a run one ends its turns.
    """

    def __init__(self, file: str | Path, mine: list[int], leads: bool) -> None:
        self._file, self._mine, self._leads = Path(file), list(mine), leads

    @classmethod
    def of(cls, job: Mapping[str, Any]) -> Turns | None:
        """What a job says of turns, if it takes some."""
        return cls(job["turns"]["file"], job["turns"]["mine"], job["rank"] == 0) if job.get("turns") else None

    @property
    def left(self) -> bool:
        """Whether there is another turn after this one."""
        return len(self._mine) > 1

    def wait(self, beat: Callable[[str], object] = lambda text: None) -> bool:
        """Until it is this process's turn; False if there will be none."""
        while self._mine:
            turn = int(self._file.read_text())
            if turn == STOP:
                return False
            if turn == self._mine[0]:
                return True
            beat("waiting for its turn")
            time.sleep(PATIENCE_S)
        return False

    def over(self) -> None:
        """This turn is."""
        if self._mine:
            turn = self._mine.pop(0)
            if self._leads and int(self._file.read_text()) != STOP:
                give(self._file, turn + 1)
