"""The check in the job itself, on its real kernels: the lean gradient against a native recomputation of the window."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from . import sync
from .errors import LeanError
from .tape import Kept
from .values import map_tensors

# Two native runs differ too where kernels add in another order: by up to a few per cent under bf16 on GPUs. A wrong
# row, step or sign is off by tens of per cent.
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}
LOW_PRECISION_TOLERANCE = 5e-2


@dataclass(frozen=True)
class Call:
    """A policy call of the update as upstream made it, so that it can be made again natively."""

    net: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    kept: Kept

    def walk_natively(self) -> None:
        """Forward with a fresh graph under the autocast state of the call, then backward with the true cotangent."""
        cotangents = self.kept.cotangents()
        if cotangents is None:
            return
        enabled, dtype = self.kept.autocast
        outs: list[Tensor] = []

        def collect(out: Tensor) -> Tensor:
            if out.requires_grad:
                outs.append(out)
            return out

        with torch.enable_grad(), torch.autocast(self.kept.leaves[0].device.type, dtype=dtype, enabled=enabled):
            map_tensors(self.net(*self.args, **self.kwargs), collect)
        torch.autograd.backward(outs, cotangents)


def gradients(parameters: Sequence[nn.Parameter]) -> list[Tensor | None]:
    """Copies of this rank's gradients."""
    return [None if p.grad is None else p.grad.detach().clone() for p in parameters]


def relative_l2(lean: Sequence[Tensor | None], native: Sequence[Tensor | None]) -> float:
    """|lean - native| / |native| over all parameters and ranks; infinite where only one of them has a gradient."""
    sums = torch.zeros(3, dtype=torch.float64)
    for a, b in zip(lean, native, strict=True):
        if (a is None) != (b is None):
            sums[2] += 1
        elif a is not None and b is not None:
            sums[0] += (a.double() - b.double()).square().sum().cpu()
            sums[1] += b.double().square().sum().cpu()
    if sync.world_size() > 1:
        sums = torch.stack([torch.as_tensor(row) for row in sync.everyones(sums.tolist())]).sum(0)
    off, size, lonely = sums.tolist()
    if lonely or math.isnan(off) or math.isnan(size):
        return math.inf
    return math.sqrt(off / size) if size else (math.inf if off else 0.0)


def audit(
    parameters: Sequence[nn.Parameter], before: list[Tensor | None], calls: Sequence[Call], reduce: Callable[[], None]
) -> float:
    """Recomputes `calls` natively, compares, and leaves the lean gradient in place.

    Args:
        parameters: the trainable weights, in a fixed order; their `.grad` holds the lean gradient.
        before: the gradients before the lean flush, from :func:`gradients`.
        reduce: what averages over ranks after local backward passes, if anything.

    Returns:
        The relative difference over all ranks.

    Raises:
        LeanError: LG607 if it exceeds the tolerance of the outputs' dtype, on every rank.
    """
    lean = gradients(parameters)
    for parameter, grad in zip(parameters, before, strict=True):
        parameter.grad = grad
    for call in calls:
        call.walk_natively()
    reduce()
    native = gradients(parameters)
    for parameter, grad in zip(parameters, lean, strict=True):
        parameter.grad = grad
    difference = relative_l2(lean, native)
    tolerance = TOLERANCE.get(calls[0].kept.leaves[0].dtype, LOW_PRECISION_TOLERANCE) if calls else 0.0
    if not difference <= tolerance:
        raise LeanError(
            "LG607",
            f"relative difference {difference:.3g} over {len(calls)} calls, allowed {tolerance:.0e}",
            "train with LEANGRPO_SCHEDULE=recompute and report this line with the start line",
        )
    return difference
