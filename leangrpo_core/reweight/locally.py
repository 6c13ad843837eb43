"""Backward passes whose gradients go into a buffer: this rank's own, neither shared nor added to `.grad`."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel

from .. import fsdp1, sync
from ..audit import Call
from ..errors import LeanError
from ..guard import parameters_of
from ..kept import Kept, outputs_of
from . import spread
from .buffers import Gradient, wide


def weights(net: nn.Module) -> list[nn.Parameter]:
    """What gradients in a buffer belong to, in order."""
    return [p for p in parameters_of(net) if p.requires_grad]


def flat(net: nn.Module) -> list[Tensor]:
    """The same under FSDP1."""
    return fsdp1.flat_parameters(net)


def walk(
    parameters: Sequence[nn.Parameter], into: Gradient, outs: Sequence[Tensor], cotangents: Sequence[Tensor]
) -> None:
    """One backward; its gradients are added to `into`, which has a place for each of the parameters (`weights`)."""
    before = [p.grad for p in parameters]
    for parameter, held in zip(parameters, into, strict=True):
        # Autograd adds in place, so a gradient in the weight's own precision needs no second copy.
        parameter.grad = held if held is not None and held.dtype == parameter.dtype else None
    try:
        torch.autograd.backward(list(outs), list(cotangents))
        _take(parameters, into)
    finally:
        for parameter, grad in zip(parameters, before, strict=True):
            parameter.grad = grad


def _take(parameters: Sequence[nn.Parameter], into: Gradient) -> None:
    for place, parameter in enumerate(parameters):
        grad, held = parameter.grad, into[place]
        if grad is None or grad is held:
            continue
        into[place] = grad.to(wide(parameter.dtype)) if held is None else held.add_(grad)


def deliver(net: nn.Module, total: Gradient) -> None:
    """Adds a gradient to the `.grad` of the weights; where there was none, zeros count as one."""
    for parameter, grad in zip(weights(net), total, strict=True):
        if grad is None:
            continue
        if parameter.grad is None:
            parameter.grad = grad.to(parameter.dtype)
        else:
            parameter.grad.add_(grad)


def walk_sharded(net: nn.Module, into: Gradient, calls: Sequence[tuple[Kept, list[Tensor]]]) -> None:
    """The same under FSDP1, for the graphs of a trajectory: without reducing, so gradients are whole.

    Each unit is gathered in each backward, so every rank must walk equally many graphs here.
    """
    assert isinstance(net, FullyShardedDataParallel)
    flats = fsdp1.flat_parameters(net)
    parameters = [*flats, *(p for p in net.parameters() if all(p is not flat for flat in flats))]
    before = [p.grad for p in parameters]
    for parameter in parameters:
        parameter.grad = None
    try:
        for call, cotangents in calls:
            with net.no_sync(), sync.walking(net, call.held):
                torch.autograd.backward(call.release(), cotangents)
            call.held = None
        for place, flat in enumerate(flats):
            grad, held = flat.grad, into[place]
            if grad is not None:
                into[place] = grad if held is None else held.add_(grad)
    finally:
        for parameter, grad in zip(parameters, before, strict=True):
            parameter.grad = None
            parameter.grad = grad


def deliver_sharded(net: nn.Module, total: Gradient, shares: Gradient, last: Call) -> None:
    """Reduces a whole gradient over the ranks, once, as part of a backward that adds nothing itself.

    Args:
        net: the network under FSDP1.
        total: this rank's, per flat parameter; empty for none.
        shares: what this rank has of the sum of all ranks' (`spread.py`), per flat parameter; empty for none.
        last: a call of the update, made again with zero for its loss.

    Raises:
        LeanError: LG612 if a unit took no part in that backward.
    """
    arrived: list[int] = []

    def add(place: int, ours: Tensor | None, share: Tensor | None) -> Any:
        def hook(grad: Tensor) -> Tensor:
            arrived.append(place)
            found = grad.clone() if ours is None else grad + ours.to(grad.dtype)
            if share is not None:
                spread.run_of(found).add_(share)
            return found

        return hook

    flats = fsdp1.flat_parameters(net)
    nothing: Gradient = [None] * len(flats)
    parts = zip(flats, total or nothing, shares or nothing, strict=True)
    added = [(flat, add(place, *both)) for place, (flat, *both) in enumerate(parts) if both != [None, None]]
    hooks = [flat.register_hook(hook) for flat, hook in added]
    try:
        last.walk_natively([torch.zeros_like(value) for value, _ in outputs_of(last.rows)])
    finally:
        for hook in hooks:
            hook.remove()
    if len(arrived) < len(hooks):
        raise LeanError(
            "LG612",
            f"{len(hooks) - len(arrived)} units have a gradient that no backward reduced",
            "train with LEANGRPO_SCHEDULE=retain: a part of this network is not used by every call",
        )
