"""What the patched run still evaluated twice, per window and rank: in the report's words, and as warnings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from leangrpo_rehearsal.beside import Repeated
from leangrpo_tools.rehearsal.verdict import HELD_IN_VAIN, PARTLY_REPLAYED, Warned

Windows = Sequence[Sequence[dict[str, Any]]]
"""What the runtime reported, per rank one entry per window."""


def lines(found: Sequence[Repeated], windows: Windows, known: Sequence[str]) -> list[str]:
    """Of how many evaluations that could be replayed how many were, window by window; and what the rehearsal, by
    itself, has made again.

    Args:
        known: parts of the runtime's reasons which the rehearsal itself brings about.
    """
    if not any(item.possible for item in found):
        return []
    ranks = sorted({item.rank for item in found})
    shown = {rank: ", ".join(_share(item) for item in found if item.rank == rank) for rank in ranks}
    alike = len(set(shown.values())) == 1
    text = shown[ranks[0]] + (" on each rank" if len(ranks) > 1 else "")
    if not alike:
        text = "; ".join(f"rank {rank}: {share}" for rank, share in shown.items())
    text = [f"replayed, of what each window's first update evaluates again: {text}"]
    mine: Counter[str] = Counter()
    for window in [window for rank in windows for window in rank]:
        mine.update({reason: n for reason, n in window["reasons"].items() if any(part in reason for part in known)})
    said = "; ".join(f"{steps} x {reason}" for reason, steps in mine.items())
    return text + ([f"made again because this rehearsal itself brings it about, so no warning: {said}"] if said else [])


def warnings(found: Sequence[Repeated], windows: Windows, known: Sequence[str]) -> list[Warned]:
    """What could have been replayed and was not, and what was held for nothing.

    Args:
        known: parts of the runtime's reasons which the rehearsal itself brings about.
    """
    told = []
    lacking = [item for item in found if item.missing > _explained(item, found, windows, known)]
    if lacking:
        possible, missing = (sum(getattr(item, what) for item in lacking) for what in ("possible", "missing"))
        where = ", ".join(_where(item, found) + f" {item.missing} of {item.possible}" for item in lacking)
        told.append(Warned(
            PARTLY_REPLAYED,
            f"{missing} of {possible} evaluations that could be replayed were made again ({where}): "
            f"{_reasons(lacking, found, windows)}",
        ))  # fmt: skip
    vain = [item for item in found if item.unused > _explained(item, found, windows, known)]
    if vain:
        where = ", ".join(f"{_where(item, found)} {item.unused} of {item.held}" for item in vain)
        told.append(Warned(HELD_IN_VAIN, f"graphs were held that the first update did not use ({where})"))
    return told


def _share(item: Repeated) -> str:
    return f"{item.saved} of {item.possible}" + (f" (held {item.held})" if item.held != item.saved else "")


def _where(item: Repeated, found: Sequence[Repeated]) -> str:
    several = len({other.rank for other in found}) > 1
    return f"window {item.window}" + (f" on rank {item.rank}" if several else "") + ":"


def _told(item: Repeated, found: Sequence[Repeated], windows: Windows) -> list[dict[str, Any]]:
    """The runtime's entries for a window; all of the rank's where they cannot be told apart."""
    entries = list(windows[item.rank]) if item.rank < len(windows) else []
    rollouts = sum(other.rank == item.rank for other in found)
    return entries[item.window - 1 : item.window] if len(entries) == rollouts else entries


def _explained(item: Repeated, found: Sequence[Repeated], windows: Windows, known: Sequence[str]) -> float:
    """Evaluations that the rehearsal itself has made again."""
    steps = selected = 0
    for window in _told(item, found, windows):
        selected += window.get("selected", 0)
        steps += sum(n for reason, n in window["reasons"].items() if any(part in reason for part in known))
    return steps * item.possible / selected if selected else 0.0


def _reasons(lacking: Sequence[Repeated], found: Sequence[Repeated], windows: Windows) -> str:
    reasons: Counter[str] = Counter()
    for item in lacking:
        for window in _told(item, found, windows):
            reasons.update(window["reasons"])
    said = "; ".join(f"{steps} x {reason}" for reason, steps in reasons.items())
    return said or "the runtime gives no reason, since no window of it had these steps"
