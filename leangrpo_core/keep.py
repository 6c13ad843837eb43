"""The rollout's side: which calls, and which of their rows, are kept."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from . import guard, memory, sync
from .capture import Capture, where
from .host import HostMemory
from .rows import copies_in, merge, take
from .values import Uncuttable, leaves, needs_grad, rebuildable, uncomparable
from .window import Key, Window

TWICE = "the network was called twice for one step and site"


def rollout_call(
    window: Window,
    wrapper: sync.Wrapper,
    net: nn.Module,
    keys: Sequence[Key],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    budget: float,
    host: HostMemory,
    sizes: memory.Sizes,
    measure: bool,
) -> Any:
    """A network call of the rollout: kept if the update will ask for a row of it.

    Args:
        keys: which step of which row, for each row of the call.
        budget: bytes of graphs this rank may hold on the device.
        host: the host memory for graphs beyond that.
        sizes: what graphs of calls with such arguments weigh, as far as measured.
        measure: follow the bytes of this call in any case.

    Raises:
        LeanError: LG608 if CUDA ran out of memory.
    """
    wanted = {key: place for place, key in enumerate(keys) if key[:2] in window.positions}
    window.sites |= {site for _, _, site in wanted}
    reason = _why_not(window, wrapper, net, keys, wanted, args, kwargs) if wanted else ""
    if reason:
        window.pass_by(wanted, reason)
        wanted = {}
    call = (window.reweight.capture if window.reweight else Capture)(window, wrapper, net, budget, host, sizes, measure)
    call.set_limits()
    # One figure is not enough to keep nothing for good: the first forward allocates more than a graph.
    if sizes.measured < 2:
        window.limit = max(window.limit, len(keys) if window.calls_whole(wrapper) else 1)
    over = call.beyond(wanted)
    window.pass_by(over, call.over_budget)
    for key in over:
        del wanted[key]
    if not wanted:
        return net(*args, **kwargs)
    # A wrapper that communicates needs equally many forwards on every rank.
    parts = call.parts(wanted)
    if len(parts) == 1 and (len(wanted) == len(keys) or wrapper.collective):
        return call.keep(wanted, len(keys), args, kwargs)
    return _in_parts(call, parts, len(keys), args, kwargs)


def _in_parts(
    call: Capture, wanted: list[dict[Key, int]], rows: int, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Keeps calls with the wanted rows and runs the others without a graph, which would cost a backward."""
    window = call.window
    others = sorted(set(range(rows)) - {place for part in wanted for place in part.values()})
    copies = copies_in(args, kwargs, rows)
    if copies is None or not rebuildable((args, kwargs)):
        return call.keep({key: place for part in wanted for key, place in part.items()}, rows, args, kwargs)
    done = []
    for part in wanted:
        places = sorted(part.values())
        ours = {key: places.index(place) for key, place in part.items()}
        done.append((places, call.keep(ours, len(places), *take(args, kwargs, rows, copies, places))))
    if others:
        other_args, other_kwargs = take(args, kwargs, rows, copies, others)
        done.append((others, call.net(*other_args, **other_kwargs)))
    try:
        with torch.enable_grad():  # a part may be made of leaves that wait for their log-prob
            return merge(done, container=done[-1][1])
    except Uncuttable as reason:
        window.refusal = str(reason)
        window.drop([key for part in wanted for key in part if key in window.held], window.refusal)
        return call.net(*args, **kwargs)


def _why_not(
    window: Window,
    wrapper: sync.Wrapper,
    net: nn.Module,
    keys: Sequence[Key],
    wanted: dict[Key, int],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> str:
    """Why this call cannot be kept, or nothing. Such a call runs, and is recomputed later, as upstream does."""
    if wrapper.refusal:
        return wrapper.refusal
    # Ranks whose rows come from unequal numbers of calls would make unequal numbers of backward passes.
    mixed = len(keys) > 1 and not window.whole
    if wrapper.flush == "armed" and mixed:
        return "several rows in one call under FSDP1: set LEANGRPO_SYNC=late"
    if wrapper.kind == "fsdp2" and wrapper.flush == "in order" and wrapper.communicates and mixed:
        return f"several rows in one call under FSDP2: {wrapper.notice or 'set LEANGRPO_SYNC=late'}"
    if not window.looked_at:
        window.looked_at = True
        window.refusal = window.refusal or guard.why_unlike_training(net) or no_room(wrapper, net, where(args, kwargs))
        if guard.uses_cuda_graphs(net):
            window.refusal = "torch.compile in reduce-overhead or max-autotune mode reuses the memory of held graphs"
    if window.refusal:
        return window.refusal
    if window.other:
        return window.other
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
    if len(set(keys)) < len(keys) or any(key in window.held or key in window.ambiguous for key in wanted):
        for key in wanted:
            if key in window.held:
                window.let_go(key)
            window.ambiguous.add(key)
        return TWICE
    return ""


def no_room(wrapper: sync.Wrapper, net: nn.Module, device: torch.device) -> str:
    """Why a joint backward cannot end well, or nothing. It would run out of memory at the flush."""
    if wrapper.flush != "joint" or wrapper.shards == 1:
        return ""
    needed, free = memory.joint_bytes(net, wrapper.shards), memory.free_bytes(device)
    if needed <= free:
        return ""
    return f"a joint backward needs {needed / 1e9:.3g} GB for full weights and gradients, {free / 1e9:.3g} GB are free"
