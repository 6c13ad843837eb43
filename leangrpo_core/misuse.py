"""Calls of an edited script that would end in one of torch's own errors, or in none: what they did, and a fix."""

import re
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel

from . import guard, sync
from .errors import LeanError
from .values import leaves

_NO_GRAPH = re.compile(r"does not require grad and does not have a grad_fn")


def graph_in_rollout(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raises LG610 if the rollout runs under grad, so that each of its calls hands its graph on to the next one."""
    if torch.is_grad_enabled() and any(
        isinstance(item, Tensor) and item.grad_fn is not None for _, item in leaves((args, kwargs))
    ):
        raise LeanError(
            "LG610",
            "the rollout runs with gradients on: this call's arguments carry the graph of an earlier one into the "
            "update, whose backward passes would walk it again and again",
            "put `with torch.no_grad():` back around the rollout; `diff-patch` shows how the patch left it",
        )


def inside_fsdp(net: nn.Module, known: nn.Module | None) -> None:
    """Raises LG610 if `net` is a module inside `known`, the network as it was called before, which FSDP1 shards."""
    if net is known or not isinstance(known, FullyShardedDataParallel):
        return
    if not isinstance(net, FullyShardedDataParallel) and any(module is net for module in known.modules()):
        raise LeanError(
            "LG610",
            "lean.policy_call got the module inside FSDP (`.module`), whose weights are shards; the rollout called the "
            "wrapped network",
            "hand lean.policy_call the wrapped network, without `.module` or unwrap_model",
        )


def untrained(called: nn.Module | None, model: nn.Module, optimizer: Any) -> None:
    """Raises LG610 if the update evaluated a network of which neither `model` nor the optimizer has a weight."""
    if called is None or called is model or sync.bare(called) is sync.bare(model):
        return
    groups = getattr(optimizer, "param_groups", [])
    trained = {id(p) for p in (*guard.parameters_of(model), *(p for group in groups for p in group["params"]))}
    if not any(id(p) in trained for p in guard.parameters_of(called)):
        raise LeanError(
            "LG610",
            f"lean.policy_call evaluated a {type(called).__name__} of which the optimizer trains no weight: a copy of "
            "the network",
            "hand lean.policy_call the network that lean.flush gets and the optimizer trains",
        )


def explained(error: BaseException, called: bool, without_grad: bool) -> BaseException:
    """The cause of an error of torch's in the update, where it is known; else the error itself.

    Args:
        called: the update has called the network under grad since the last flush.
        without_grad: it has called it under no_grad.
    """
    if not (isinstance(error, RuntimeError) and _NO_GRAPH.search(str(error)) and (called or without_grad)):
        return error
    what, fix = (
        "the loss does not depend on what lean.policy_call returned: it was detached, or put into another tensor",
        "take the `.detach()` or the copy between lean.policy_call and the loss out",
    )
    if not called:
        what = "the update calls the network under no_grad, so that the loss has no graph"
        fix = "take no_grad from around the update; only a reference call needs it"
    found = LeanError("LG610", what, f"{fix}; `diff-patch` shows how the patch left it")
    found.__cause__ = error
    return found
