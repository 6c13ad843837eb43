"""The rollout's side: which calls are kept, and how a kept call runs."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from . import guard, memory, sync
from .errors import LeanError
from .tape import Kept, Key, Window, tolerance
from .values import Uncuttable, detach_all, leaves, needs_grad, tensors_of, uncomparable


@contextmanager
def training_mode(net: nn.Module) -> Iterator[None]:
    """Train mode as in upstream's update: some networks checkpoint activations in that mode only.

    Only the flag changes: a `train()` of the network's own, which may merge weights, is not called.
    """
    evaluating = [module for module in net.modules() if not module.training]
    for module in evaluating:
        module.training = True
    try:
        yield
    finally:
        for module in evaluating:
            module.training = False


def why_not(
    window: Window, wrapper: sync.Wrapper, net: nn.Module, key: Key, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> str | None:
    """Why this selected call cannot be kept, or None. Such a call runs, and is recomputed later, as upstream does."""
    if wrapper.refusal:
        return wrapper.refusal
    if not window.looked_at:
        window.looked_at = True
        window.refusal = window.refusal or guard.why_unlike_training(net) or _no_room(wrapper, net, where(args, kwargs))
        if guard.uses_cuda_graphs(net):
            window.refusal = "torch.compile in reduce-overhead or max-autotune mode reuses the memory of held graphs"
    if window.refusal:
        return window.refusal
    if torch.is_inference_mode_enabled():
        return "inference mode: no graph can be kept"
    if any(isinstance(item, Tensor) and item.is_inference() for _, item in leaves((args, kwargs))):
        return "an argument was made in inference mode"
    if needs_grad(args, kwargs):
        return "a gradient must flow into the arguments"
    if window.net not in (None, sync.bare(net)):
        return "a second network in one rollout"
    odd = uncomparable(args, kwargs)
    if odd:
        return f"an argument cannot be compared: {odd}"
    if key in window.held or key in window.ambiguous:
        window.held.pop(key, None)
        window.ambiguous.add(key)
        return "the network was called twice for one step and site"
    if window.positions[key[:2]] >= window.limit:
        return "over LEANGRPO_BUDGET_GB"
    return None


def _no_room(wrapper: sync.Wrapper, net: nn.Module, device: torch.device) -> str:
    """Why a joint backward cannot end well, or nothing. Better to recompute than to run out of memory at the flush."""
    if wrapper.flush != "joint" or wrapper.shards == 1:
        return ""
    needed, free = memory.joint_bytes(net, wrapper.shards), memory.free_bytes(device)
    if needed <= free:
        return ""
    return f"a joint backward needs {needed / 1e9:.3g} GB for full weights and gradients, {free / 1e9:.3g} GB are free"


def where(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device:
    """The device a call runs on: that of its first tensor off the CPU, since small arguments may stay there."""
    devices = [item.device for _, item in leaves((args, kwargs)) if isinstance(item, Tensor)]
    return next((device for device in devices if device.type != "cpu"), torch.device("cpu"))


def probe(window: Window, net: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Compares a forward as upstream's rollout makes it with one as a kept call runs.

    If they differ the window keeps nothing. Made at the same call of a window on every rank, since a wrapper may
    communicate in a forward.
    """
    device = where(args, kwargs)
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        rolled = tensors_of(net(*args, **kwargs))
        with training_mode(net), torch.enable_grad(), sync.unsynchronised(net):
            trained = tensors_of(net(*args, **kwargs))
    torch.clear_autocast_cache()
    for a, b in zip(rolled, trained, strict=True):
        size = b.detach().double().norm().item()
        off = (a.detach().double() - b.detach().double()).norm().item()
        if not off <= tolerance(b.dtype) * size:
            window.refusal = f"in train mode the network computes something else (by {off:.3g} of {size:.3g})"


def keep(
    window: Window,
    net: nn.Module,
    key: Key,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    budget: float,
    sizes: memory.Sizes,
    measure: bool,
) -> Any:
    """Runs the call under grad, holds its graph, returns the result without it, in the type the network returned.

    Args:
        budget: bytes of graphs this rank may hold.
        sizes: what graphs of calls with such arguments weigh, as far as measured.
        measure: follow the bytes of this call in any case.

    Raises:
        LeanError: LG608 if CUDA ran out of memory.
    """
    device = where(args, kwargs)
    first = window.seen is None
    if window.seen is None:
        window.net, window.seen = sync.bare(net), guard.see(net)
    generators = guard.generator_states(device)
    # Low-precision copies of weights that autocast cached without grad, or for another graph, must not enter this one.
    torch.clear_autocast_cache()
    with training_mode(net), torch.enable_grad(), sync.unsynchronised(net):
        try:
            if measure or not sizes.settled(args, kwargs):
                with window.meter.measure(device) as figure:
                    result = net(*args, **kwargs)
                    torch.clear_autocast_cache()
                window.measured += 1
                sizes.add(args, kwargs, figure[0])
            else:
                result = net(*args, **kwargs)
                torch.clear_autocast_cache()
        except torch.OutOfMemoryError as error:
            held = sum(call.graph_bytes for call in window.held.values()) / 1e9
            raise LeanError(
                "LG608",
                f"out of memory while {len(window.held)} graphs, {held:.3g} GB, were held: {error}",
                f"set LEANGRPO_BUDGET_GB to less than {held:.3g}; what does not fit is recomputed",
            ) from error
    window.graph_bytes = sizes.graph_bytes(args, kwargs)
    try:
        call = Kept(result, args, kwargs, device, window.graph_bytes)
    except Uncuttable as reason:
        window.refusal = str(reason)
        window.pass_by(key, window.refusal)
        detach_all(result)
        return result
    if not call.outs:
        window.refusal = "the network's output needs no gradient"
        window.pass_by(key, window.refusal)
        return result
    window.limit = memory.fits(budget, window.graph_bytes)
    value = call.for_rollout()
    if not all(map(torch.equal, generators, guard.generator_states(device))):
        window.refusal = "the network draws random numbers"
    elif first and guard.checksum(net.buffers()) != window.seen.buffers:
        window.refusal = "the network changes its buffers"
    if window.refusal:
        window.pass_by(key, window.refusal)
        return value
    if window.positions[key[:2]] >= window.limit:
        window.pass_by(key, "over LEANGRPO_BUDGET_GB")
        return value
    window.hold(key, call)
    return value
