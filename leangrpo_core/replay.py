"""The update's side: whether a kept call answers a policy call, and the walk through the graphs."""

from typing import Any

import torch
from torch import nn

from . import guard, sync
from .errors import LeanError
from .tape import Key, Window, autocast_state
from .values import difference, needs_grad


def why_not(
    window: Window, net: nn.Module, key: Key | None, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> str | None:
    """Why this policy call must be recomputed on this rank, or None if a kept call is the same evaluation."""
    call = window.held.get(key) if key else None
    if call is None:
        return "not held"
    if sync.bare(net) is not window.net:
        return "another network than in the rollout"
    if not window.replayed and window.seen is not None:
        now = guard.see(net)
        names = ("weights", "buffers", "trainable", "adapters")
        other = [name for name in names if getattr(now, name) != getattr(window.seen, name)]
        other = other or guard.switched(window.seen, now)
        if other:
            reason = f"{' and '.join(other)} changed since the rollout"
            window.drop(list(window.held), reason)
            return reason
    if needs_grad(args, kwargs):
        return "a gradient must flow into the arguments"
    if call.autocast != autocast_state(call.leaves[0].device):
        return "autocast differs from the rollout's"
    casts = call.autocast[0] or sync.casts_inputs(net)
    differs = difference(call.inputs, args, kwargs, promote=casts)
    if differs:
        return f"inputs differ from the rollout's: {differs}"
    return None


def changed(window: Window, net: nn.Module) -> bool:
    """Whether any weight differs from what the kept calls saw, to the bit."""
    return window.seen is not None and guard.weights_of(net) != window.seen.weights


def walk(window: Window, wrapper: sync.Wrapper, net: nn.Module) -> None:
    """Runs the graphs of all consumed calls backward and lets them go.

    In the order of consumption, which adds gradients up in upstream's order; jointly where the wrapper demands it.
    Calls whose loss has not been walked yet stay, except in a joint walk: there every rank must reach every unit, so
    they take part with zeros.

    Raises:
        LeanError: LG604 if weights changed since the rollout, on every rank where the wrapper communicates.
    """
    sound = not changed(window, net)
    if wrapper.collective:
        sound = sync.minimum(int(sound)) == 1
    if not sound:
        raise LeanError(
            "LG604",
            f"weights changed while {len(window.consumed)} replayed calls waited for their flush",
            "move the change behind optimizer.step(), or run with LEANGRPO_SCHEDULE=recompute",
        )
    joint = wrapper.flush == "joint"
    ready, waiting = [], []
    for key, call in window.consumed:
        grads = call.cotangents()
        if grads is None and joint:
            grads = [torch.zeros_like(leaf) for leaf in call.leaves]
        if grads is None:
            waiting.append((key, call))
        else:
            ready.append((call.release(), grads))
    window.consumed = waiting
    if joint:
        if ready:
            outs = [out for call_outs, _ in ready for out in call_outs]
            torch.autograd.backward(outs, [grad for _, grads in ready for grad in grads])
        return
    ready.reverse()
    while ready:  # taken off one by one, so that each graph is freed before the next is walked
        outs, grads = ready.pop()
        torch.autograd.backward(outs, grads)
        del outs
