"""The check in the job itself, on its real kernels: replayed outputs and the lean gradient against a recomputation."""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from . import agree, sync
from .errors import LeanError
from .guard import local
from .kept import Row, outputs_of, tolerance
from .values import tensors_of


@dataclass(frozen=True)
class Call:
    """A policy call of the update as upstream made it, so that it can be made again natively."""

    net: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    rows: Sequence[Row]

    def belongs_to(self, calls: Collection[int]) -> bool:
        """Whether all its rows are of these kept calls, given by `id`."""
        return all(id(row.call) in calls for row in self.rows)

    def walk_natively(self, cotangents: Sequence[Tensor] | None = None) -> tuple[float, float]:
        """Forward with a fresh graph under the autocast state of the call, then backward with the true cotangent.

        Or with other `cotangents`, one for each output with a graph.

        Returns squared norms: of the new outputs less the replayed ones, and of the new outputs.
        """
        sync.tidy(self.net)
        enabled, dtype = self.rows[0].call.autocast
        kept = outputs_of(self.rows)
        device = kept[0][0].device.type
        net, args, kwargs = sync.around_ddp(self.net, self.args, self.kwargs)
        # Upstream may be within an autocast region, whose cached casts of weights would tie the calls' graphs together.
        torch.clear_autocast_cache()
        with torch.enable_grad(), torch.autocast(device, dtype=dtype, enabled=enabled):
            outs = [out for out in tensors_of(net(*args, **kwargs)) if out.requires_grad]
        torch.clear_autocast_cache()
        off = size = 0.0
        for out, (value, _) in zip(outs, kept, strict=True):
            off += (out.detach().double() - value.double()).square().sum().item()
            size += out.detach().double().square().sum().item()
        torch.autograd.backward(outs, cotangents or [cotangent for _, cotangent in kept])
        return off, size


def gradients(parameters: Sequence[nn.Parameter]) -> list[Tensor | None]:
    """Copies of this rank's gradients."""
    return [None if p.grad is None else p.grad.detach().clone() for p in parameters]


def _squares(lean: Sequence[Tensor | None], native: Sequence[Tensor | None]) -> list[float]:
    """Squared norms of lean - native and of native, and how many parameters have a gradient on one side only."""
    sums = [0.0, 0.0, 0.0]
    for a, b in zip(lean, native, strict=True):
        if (a is None) != (b is None):
            sums[2] += 1
        elif a is not None and b is not None:
            lean_share, share = local(a).double(), local(b).double()
            sums[0] += (lean_share - share).square().sum().item()
            sums[1] += share.square().sum().item()
    return sums


def _relative(off: float, size: float) -> float:
    """NaN where upstream's own values are not finite, so that nothing can be said."""
    if not math.isfinite(size):
        return math.nan
    if not math.isfinite(off):
        return math.inf
    return math.sqrt(off / size) if size else (math.inf if off else 0.0)


def audit(
    parameters: Sequence[nn.Parameter], before: list[Tensor | None], calls: Sequence[Call], together: bool
) -> float:
    """Recomputes `calls` natively, compares outputs and gradients, and leaves the lean gradient in place.

    Gradients are compared before ranks are averaged, except where a sharded wrapper reduces in its backward.

    Args:
        parameters: the trainable weights; their `.grad` holds the lean gradient.
        before: the gradients before these calls were walked, from :func:`gradients`.
        calls: what was replayed and walked.
        together: whether to judge over all ranks, all of which are here.

    Returns:
        The relative difference of the gradients; NaN if upstream's own are not finite.

    Raises:
        LeanError: LG607 if outputs or gradients differ by more than the tolerance of the outputs' dtype.
    """
    lean = gradients(parameters)
    for parameter, grad in zip(parameters, before, strict=True):
        parameter.grad = grad
    outputs = [call.walk_natively() for call in calls]
    sums = [*_squares(lean, gradients(parameters)), sum(off for off, _ in outputs), sum(size for _, size in outputs)]
    for parameter, grad in zip(parameters, lean, strict=True):
        parameter.grad = grad
    if together:
        sums = [sum(row) for row in zip(*agree.everyones(sums), strict=True)]
    off, size, lonely, off_outputs, size_outputs = sums
    gradient, output = _relative(off, size), _relative(off_outputs, size_outputs)
    allowed = tolerance(calls[0].rows[0].call.leaves[0][0].dtype)
    if lonely or gradient > allowed or output > allowed:
        raise LeanError(
            "LG607",
            f"over {len(calls)} calls outputs differ by {output:.3g} and gradients by {gradient:.3g} (relative L2, "
            f"allowed {allowed:.0e}); {lonely:.0f} parameters have a gradient on one side only",
            "train with LEANGRPO_SCHEDULE=recompute and report this line with the start line; a network whose forward "
            "depends on more than its arguments, weights and buffers cannot be replayed",
        )
    return gradient
