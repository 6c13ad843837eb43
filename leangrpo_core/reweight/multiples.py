"""Whether the loss's gradient at a sample's outputs is a multiple of the provisional one, the same at every step.

The provisional one, u, is the gradient of the log-prob of the drawn sample; the true one, v, is what upstream's loss
left. Where v = c u at every output of a sample, the sample's gradient is c times what a backward with u has given.
Nothing about the loss is taken on trust: c, what is left of v, and how far c spreads are measured.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

EXACT = {torch.float64: 1e-9, torch.float32: 2e-6}
EPSILONS = 1.5  # a low-precision output has a low-precision gradient: u and v are both rounded


def allowed(dtype: torch.dtype) -> float:
    """How much of v may be no multiple of u, relative L2, where the network's output has this dtype."""
    return EXACT.get(dtype) or EPSILONS * torch.finfo(dtype).eps


class Measured(NamedTuple):
    """Sums over the outputs of one call for one sample, in double precision.

    Attributes:
        vu, uu, vv: <v, u>, <u, u>, <v, v>.
        off: |v - vu / uu u| squared.
        count: how many values there are.
        dtype: the lowest of the outputs.
    """

    vu: float
    uu: float
    vv: float
    off: float
    count: int
    dtype: torch.dtype


def measure(pairs: Sequence[tuple[Sequence[Tensor], Sequence[Tensor]]]) -> list[Measured]:
    """What each (v, u) is like; one device synchronisation in all. v and u list the outputs of one call."""
    sums = []
    for v, u in pairs:
        wide = [(a.double(), b.double()) for a, b in zip(v, u, strict=True)]
        vu, uu, vv = (
            torch.stack([(x * y).sum() for x, y in both]).sum()
            for both in (wide, [(b, b) for _, b in wide], [(a, a) for a, _ in wide])
        )
        c = torch.where(uu == 0, torch.zeros_like(uu), vu / uu)
        off = torch.stack([(a - c * b).square().sum() for a, b in wide]).sum()
        sums.append(torch.stack([vu, uu, vv, off]))
    figures = torch.stack([row.to(sums[0].device) for row in sums]).tolist() if sums else []
    return [
        Measured(
            row[0],
            row[1],
            row[2],
            row[3],
            sum(a.numel() for a in v),
            max((a.dtype for a in v), key=lambda kind: torch.finfo(kind).eps),
        )
        for row, (v, _) in zip(figures, pairs, strict=True)
    ]


NOT_FINITE = "a gradient is not finite"
NO_MULTIPLE = "the loss's gradient is no multiple of the log-prob's"
SPREAD = "the loss weights a sample's steps unequally"


def coefficient(parts: Sequence[Measured]) -> tuple[float, str]:
    """The c of a sample, given all its calls, and why there is none, or nothing."""
    if not all(math.isfinite(number) for part in parts for number in part[:4]):
        return math.nan, NOT_FINITE
    if not any(part.vv for part in parts):
        return 0.0, ""
    whole = sum(part.uu for part in parts)
    c = sum(part.vu for part in parts) / whole if whole else 0.0
    for part in parts:
        if part.off > allowed(part.dtype) ** 2 * part.vv:
            return c, NO_MULTIPLE
        own = part.vu / part.uu if part.uu else 0.0
        if abs(own - c) > _spread(part, part.count) * abs(c):
            return c, SPREAD
    return c, ""


def certainty(parts: Sequence[Measured]) -> float:
    """How far a sample's c may be from the fit of its group, relative to the largest c there."""
    count = sum(part.count for part in parts)
    return max((_spread(part, count) for part in parts), default=0.0) / 2


def _spread(part: Measured, count: int) -> float:
    """How far rounding may bring a quotient of two sums over `count` values: it averages out, a weight does not."""
    return max(EXACT.get(part.dtype, EXACT[torch.float32]), 4 * allowed(part.dtype) / math.sqrt(count))


class Fit(NamedTuple):
    """c = a + b x over a group, and which of its samples that explains."""

    a: float
    b: float
    explained: frozenset[int]


def fit(points: dict[int, tuple[float, float]], certain: float) -> Fit:
    """The line that explains the most samples.

    Args:
        points: by sample, its centred reward x and its c. A sample without a c is not among them.
        certain: how far from the line a c may be, relative to the largest.
    """
    best = Fit(0.0, 0.0, frozenset())
    rows = list(points)
    for first, row in enumerate(rows):
        for other in [row, *rows[first + 1 :]]:
            found = _explained(points, certain, *_through(points[row], points[other]))
            if len(found.explained) > len(best.explained):
                best = found
        if len(best.explained) == len(rows):
            break
    refined = _explained(points, certain, *_least_squares([points[row] for row in best.explained]))
    return refined if len(refined.explained) >= len(best.explained) else best


def _through(p: tuple[float, float], q: tuple[float, float]) -> tuple[float, float]:
    b = (q[1] - p[1]) / (q[0] - p[0]) if q[0] != p[0] else 0.0
    return p[1] - b * p[0], b


def _least_squares(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    if not points:
        return 0.0, 0.0
    x0, c0 = (math.fsum(column) / len(points) for column in zip(*points, strict=True))
    squares = math.fsum((x - x0) ** 2 for x, _ in points)
    b = math.fsum((x - x0) * (c - c0) for x, c in points) / squares if squares else 0.0
    return c0 - b * x0, b


def _explained(points: dict[int, tuple[float, float]], certain: float, a: float, b: float) -> Fit:
    largest = max((abs(c) for _, c in points.values()), default=0.0)
    inside = {row for row, (x, c) in points.items() if abs(a + b * x - c) <= certain * largest}
    return Fit(a, b, frozenset(inside))
