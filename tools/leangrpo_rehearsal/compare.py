"""Compares what two runs recorded, update by update."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import torch

from leangrpo_rehearsal.beside import differences
from leangrpo_rehearsal.outcome import Update, Worst

DIFFERS = "differs"


@dataclasses.dataclass
class Run:
    """What the ranks of one variant recorded: `updates[k][rank]` holds grads, weights, notes, seconds."""

    updates: list[list[dict[str, Any]]]
    summaries: list[dict[str, Any]]
    ends: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    """What each rank noted after the last update."""


def load(out: Path, ranks: int) -> Run:
    """Reads the records of one variant."""
    folders = [out / f"rank{rank}" for rank in range(ranks)]
    summaries = [json.loads((folder / "summary.json").read_text()) for folder in folders]
    count = min(int(summary["updates"]) for summary in summaries)
    updates = [[_record(folder, f"update{number}") for folder in folders] for number in range(count)]
    return Run(updates, summaries, [_record(folder, "end") for folder in folders])


def _record(folder: Path, name: str) -> dict[str, Any]:
    """The tensors and the figures of one update on one rank."""
    tensors = torch.load(folder / f"{name}.pt", weights_only=True)
    return tensors | json.loads((folder / f"{name}.json").read_text())


def compare(reference: Run, other: Run, across_ranks: bool = False) -> list[Update]:
    """Compares the updates that both runs made; with `across_ranks` what was noted over all ranks, in any order."""
    pairs = zip(reference.updates, other.updates, strict=False)
    found = [compare_update(index, a, b, across_ranks) for index, (a, b) in enumerate(pairs)]
    if found and len(reference.updates) == len(other.updates):
        for rank, (a, b) in enumerate(zip(reference.ends, other.ends, strict=False)):
            found[-1].beside += [
                dataclasses.replace(item, name=f"{item.name} (after it)") for item in differences(a, b, rank)
            ]
    return found


def compare_update(
    index: int, reference: list[dict[str, Any]], other: list[dict[str, Any]], across_ranks: bool = False
) -> Update:
    """Compares one update, given what each rank recorded of it in both runs."""
    grads, weights, notes = _Tally("gradient"), _Tally("weight"), _Tally("")
    for rank, (a, b) in enumerate(zip(reference, other, strict=True)):
        grads.add_all(a["grads"], b["grads"], rank)
        weights.add_all(a["weights"], b["weights"], rank)
        if not across_ranks:
            for name in sorted({*a["notes"], *b["notes"]}):
                notes.add(_stacked(a["notes"].get(name)), _stacked(b["notes"].get(name)), rank, name)
    if across_ranks:
        for name in sorted({name for ranks in (reference, other) for record in ranks for name in record["notes"]}):
            notes.add(_sorted(reference, name), _sorted(other, name), 0, name)
    worst = grads.worst or weights.worst or notes.worst
    if notes.worst is not None and not notes.bitwise:
        worst = notes.worst if grads.worst is None else grads.worst
    pairs = zip(reference, other, strict=True)
    return Update(
        index=index,
        grad_rel_l2=grads.rel_l2, grad_max_abs=grads.max_abs, grad_cosine=grads.cosine, grad_bitwise=grads.bitwise,
        weights_rel_l2=weights.rel_l2, weights_bitwise=weights.bitwise, rewards_equal=notes.bitwise,
        finite=grads.finite and weights.finite and notes.finite, complete=grads.complete and weights.complete,
        worst=worst,
        seconds=(max(float(a["seconds"]) for a in reference), max(float(b["seconds"]) for b in other)),
        beside=[item for rank, pair in enumerate(pairs) for item in differences(*pair, rank)],
    )  # fmt: skip


def replicas(run: Run) -> list[bool]:
    """Per update, whether all ranks hold the same weights, to the bit."""
    return [not any(_unlike(ranks[0]["weights"], other["weights"]) for other in ranks[1:]) for ranks in run.updates]


def _unlike(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() != b.keys() or any(_difference(a[name], b[name]) for name in a)


class _Tally:
    """Sums over many tensors, in float64."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.bitwise = self.finite = self.complete = True
        self.max_abs = 0.0
        self.worst: Worst | None = None
        self._difference = self._reference = self._other = self._dot = 0.0

    def add_all(self, a: dict[str, Any], b: dict[str, Any], rank: int) -> None:
        for name in sorted({*a, *b}):
            self.add(a.get(name), b.get(name), rank, name)

    def add(self, a: torch.Tensor | None, b: torch.Tensor | None, rank: int, name: str) -> None:
        if a is None and b is None:
            return
        why = _difference(a, b)
        zero = torch.zeros_like(a if a is not None else b)  # type: ignore[arg-type]
        first = zero if a is None else a
        second = zero if b is None or b.shape != first.shape else b
        self.bitwise &= not why
        self.complete &= why in ("", DIFFERS)
        self._count(first.double(), second.double(), rank, name, why)

    def _count(self, a: torch.Tensor, b: torch.Tensor, rank: int, name: str, why: str) -> None:
        if not (bool(torch.isfinite(a).all()) and bool(torch.isfinite(b).all())):
            self.finite = False
            self._offer(Worst(self.kind or name, name, rank, math.inf, math.inf, "not finite"))
            return
        difference, reference = float((a - b).norm()), float(a.norm())
        self._difference += difference**2
        self._reference += reference**2
        self._other += float(b.norm()) ** 2
        self._dot += float((a * b).sum())
        biggest = float((a - b).abs().max()) if a.numel() else 0.0
        self.max_abs = max(self.max_abs, biggest)
        if why:
            relative = difference / reference if reference else (math.inf if difference else 0.0)
            self._offer(Worst(self.kind or name, name, rank, relative, biggest, why))

    def _offer(self, candidate: Worst) -> None:
        if self.worst is None or candidate.rel_l2 > self.worst.rel_l2:
            self.worst = candidate

    @property
    def rel_l2(self) -> float:
        if not self.finite:
            return math.nan
        if self._reference == 0.0:
            return math.inf if self._difference else 0.0
        return math.sqrt(self._difference / self._reference)

    @property
    def cosine(self) -> float:
        if not self.finite:
            return math.nan
        norms = math.sqrt(self._reference * self._other)
        return self._dot / norms if norms else (1.0 if self._difference == 0.0 else 0.0)


def _difference(a: torch.Tensor | None, b: torch.Tensor | None) -> str:
    """How two tensors differ, in words; empty if every bit is the same."""
    if a is None or b is None:
        return f"absent in the {'reference' if a is None else 'other'} run"
    if a.shape != b.shape or a.dtype != b.dtype:
        return f"{a.dtype} {tuple(a.shape)} became {b.dtype} {tuple(b.shape)}"
    # Bytes, so that 0.0 and -0.0 are told apart.
    same = torch.equal(a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8))
    return "" if same else DIFFERS


def _sorted(ranks: list[dict[str, Any]], name: str) -> torch.Tensor:
    found = [_stacked(record["notes"].get(name)) for record in ranks]
    return torch.cat([item.reshape(-1) for item in found if item is not None]).sort().values


def _stacked(values: list[torch.Tensor] | None) -> torch.Tensor | None:
    return None if not values else torch.stack([value.reshape(-1) for value in values])
