"""Whether calls of a network can be walked before the loss is known, and what a gradient that waits for it takes."""

from typing import Any

import torch
from torch import nn

from .. import fsdp1, memory, sync
from ..capture import where
from . import grads, locally
from .buffers import wide


def why_not(net: nn.Module, wrapper: sync.Wrapper, rows: int, args: Any, kwargs: Any) -> str:
    """Why such calls, of so many rows, cannot be walked before the loss is known, or nothing."""
    device = where(args, kwargs)
    kinds = {p.dtype for p in net.parameters()}
    if torch.is_autocast_enabled(device.type):
        kinds.add(torch.get_autocast_dtype(device.type))
    if torch.float16 in kinds:
        return "fp16 needs the loss scale, which is not known in the rollout"
    hooks = ("_backward_hooks", "_post_accumulate_grad_hooks")
    if any(getattr(p, kind, None) for p in net.parameters() for kind in hooks):
        return "something of upstream's own runs on each gradient as it arrives"
    if wrapper.kind == "fsdp2":
        return "FSDP2 hands out no gradient before it is reduced"
    if wrapper.kind == "fsdp1":
        return (_why_not_sharded if wrapper.collective else _why_not_alone)(net, wrapper, rows)
    return ""


def why_not_together(net: nn.Module, rows: int) -> str:
    """Why a call of so many rows has to be split, which slows the rollout down, or nothing."""
    return grads.why_not(net) if rows > 1 else ""


def gradient_bytes(net: nn.Module, wrapper: sync.Wrapper) -> int:
    """Of a sample's gradient."""
    if wrapper.collective:
        return memory.gradient_bytes(net, wrapper.shards)
    return sum(p.numel() * max(p.element_size(), 4) for p in net.parameters() if p.requires_grad)


def scale(net: nn.Module) -> None:
    """Work of the kind, and on this rank's weights of the size, that scaling a gradient is; nothing stays."""
    for p in locally.weights(net):
        torch.zeros_like(p, dtype=wide(p.dtype)).mul_(1.0)


def _why_not_alone(net: nn.Module, wrapper: sync.Wrapper, rows: int) -> str:
    """On one rank gradients are found at the weights, so these must be what autograd leaves them at: the units'."""
    unknown = fsdp1.supports(net)
    if not unknown and {id(p) for p in locally.flat(net)} != {id(p) for p in locally.weights(net)}:
        return "FSDP1 with use_orig_params on one rank"
    return unknown or ("several rows in one call under FSDP1" if rows > 1 else "")


def _why_not_sharded(net: nn.Module, wrapper: sync.Wrapper, rows: int) -> str:
    low = {torch.bfloat16, torch.float16} & sync.precisions(net)
    if not wrapper.known:
        return wrapper.notice or "this torch's FSDP1 is not known"
    if low:
        return f"FSDP1 in {low.pop()} would round a whole gradient"
    return "several rows in one call under FSDP1" if rows > 1 else ""
