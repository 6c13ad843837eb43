"""Graphs of several forwards of one FSDP1-wrapped network, held and walked backward one by one.

FSDP1 keeps what the backward of its latest forward needs (which AccumulateGrad node reduces the gradient, which views
a recomputation reads, what to gather and in which order) on its units, and forgets it at the end of any backward. So
each held forward takes it along, and brings it back for its own backward:

    with holding(net) as held:
        out = net(x)
    ...
    with walking(net, held):
        torch.autograd.backward(out, grad)

In that backward each unit is un-sharded and its gradient reduced as natively; several may be walked in one. Both put
back what a forward outside them left, so native forwards and backwards in between, before or after are safe, with
`tidy(net)` before each.

Private names of torch are used in this module only. They were read in torch 2.5.1 to 2.14.1 and run with 2.13;
`available` and `supports` say when they are not what this module knows.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel

_flat_param: Any = None
_runtime_utils: Any = None
with suppress(ImportError):  # another torch than this module knows; `available` says so
    from torch.distributed.fsdp import _flat_param, _runtime_utils

# What FSDP's own functions must still read or write for this module to mean what it says.
_NAMES = {
    "_register_post_backward_hook": ("_post_backward_hook_state", "next_functions", "register_hook"),
    "_register_post_backward_reshard_only_hook": ("_post_backward_hook_state",),
    "_register_pre_backward_hooks": ("_needs_pre_backward_unshard",),
    "_pre_backward_hook": ("_needs_pre_backward_unshard", "_ran_pre_backward_hook"),
    "_post_backward_hook": ("flat_param", "_training_state"),
    "_post_backward_final_callback": ("next_iter", "_post_forward_index", "_ran_pre_backward_hook"),
    "_finalize_params": ("_post_backward_hook_state",),
    "_get_handle_to_prefetch": ("_exec_order_data", "_needs_pre_backward_unshard"),
}
_OF_A_STATE = ("_handle", "_is_root", "_exec_order_data", "_fsdp_extension")
_OF_A_HANDLE = (
    "flat_param",
    "_needs_pre_backward_unshard",
    "_post_forward_index",
    "_offload_params",
    "_use_orig_params",
    "_use_sharded_views",
    "_setattr_tensor",
    "_training_state",
)


@dataclass
class _Unit:
    """What a forward left on one unit for its backward.

    Attributes:
        state: the FSDP module that owns the unit.
        hook: what ends the unit's part of the backward: the AccumulateGrad node of this forward and None, or, where
            nothing of the unit trains, the handle of a hook on the inputs of this forward.
        unshard: whether the backward must gather the unit.
        index: the unit's place in the order of this forward.
        tensors: with use_orig_params, the views that this forward's graph was built on.
        views: without it, the same as (module, name, view): a recomputation reads them from the modules.
    """

    state: Any
    hook: tuple[Any, ...] | None
    unshard: bool
    index: int | None
    tensors: list[Tensor | None] | None
    views: list[tuple[nn.Module, str, Tensor]]


@dataclass
class Held:
    """What one forward left on the units of its network; good for one backward."""

    units: list[_Unit] = field(default_factory=list)
    order: list[Any] = field(default_factory=list)

    def pending(self) -> bool:
        """Whether there is a graph to walk; a forward without grad leaves none."""
        return any(unit.hook or unit.unshard for unit in self.units)


def available() -> str:
    """Why this torch is not one that the module knows; empty if it is."""
    if _flat_param is None or _runtime_utils is None:
        return "torch has no torch.distributed.fsdp._runtime_utils"
    for name, needed in _NAMES.items():
        function = getattr(_runtime_utils, name, None)
        if function is None:
            return f"FSDP has no {name}"
        missing = set(needed) - _words(function)
        if missing:
            return f"FSDP's {name} does not know {', '.join(sorted(missing))}"
    missing = {"_post_backward_hook_state", "_tensors", "_param_infos", "_shared_param_infos"} - set(
        inspect.get_annotations(_flat_param.FlatParameter)
    )
    return f"FSDP's FlatParameter has no {', '.join(sorted(missing))}" if missing else ""


def _words(function: Callable[..., Any]) -> set[str]:
    """Names and strings in a function's code."""
    code = inspect.unwrap(function).__code__
    return {*code.co_names, *code.co_varnames, *(const for const in code.co_consts if isinstance(const, str))}


def supports(net: nn.Module) -> str:
    """Why graphs of `net` cannot be held this way; empty if they can."""
    reason = available()
    if reason:
        return reason
    if not isinstance(net, FullyShardedDataParallel):
        return "not wrapped in FSDP"
    for state in _states(net):
        missing = [name for name in _OF_A_STATE if not hasattr(state, name)]
        if not missing and state._handle is not None:
            missing = [name for name in _OF_A_HANDLE if not hasattr(state._handle, name)]
        if missing or not hasattr(state._exec_order_data, "handles_post_forward_order"):
            return f"this torch's FSDP lacks {', '.join(missing) or 'handles_post_forward_order'}"
        if state is net and state._is_root is False:
            return "a part of a larger FSDP network"
        if state._fsdp_extension is not None:
            return "FSDP over tensor parallelism is not supported yet"
        if state._handle is None:
            continue
        if state._handle._offload_params:
            return "FSDP with parameters offloaded to the CPU does not add up gradients of several backwards"
        flat = state._handle.flat_param
        if any(hasattr(p, "_in_backward_optimizers") for p in (flat, *(flat._params or ()))):
            return "the optimizer steps within the backward"
    return ""


@contextmanager
def holding(net: nn.Module) -> Iterator[Held]:
    """Around one forward under grad: fills what its backward will need. Nothing of it stays on the network."""
    before, held = _take(net), Held()
    yield held
    left = _take(net)
    held.units, held.order = left.units, left.order
    _put(before)


@contextmanager
def walking(net: nn.Module, *held: Held) -> Iterator[None]:
    """Around the one backward of a held forward, or of several.

    Several are one backward for FSDP, too: units stay gathered, and a gradient is reduced once all graphs have given
    their part. Only without mixed precision, where all graphs share the node that takes a unit's gradient.

    Raises:
        RuntimeError: FSDP did not end this backward, so gradients may be missing; or one was walked before.
    """
    if not all(forward.units for forward in held):
        raise RuntimeError("a held forward can be walked once, after it has ended")
    before = _take(net)
    _put(held[0] if len(held) == 1 else _together(held))
    for forward in held:
        forward.units, forward.order = [], []
    yield
    if any(unit.hook for unit in _take(net).units):
        raise RuntimeError("FSDP did not end the backward of a held forward")
    _put(before)


def tidy(net: nn.Module) -> None:
    """Before a native forward beside held graphs: parameters stand where they belong, unless a backward is to come."""
    for state in _states(net) if not available() else []:
        handle = state._handle
        if handle is None or handle._needs_pre_backward_unshard or handle.flat_param._tensors is None:
            continue
        if not hasattr(handle.flat_param, "_post_backward_hook_state") and _views_stand_in(handle.flat_param):
            handle._use_sharded_views()


def flat_parameters(net: nn.Module) -> list[Any]:
    """The one trainable weight of each unit, which is where autograd leaves gradients."""
    handles = [state._handle for state in _states(net)]
    return [handle.flat_param for handle in handles if handle is not None and handle.flat_param.requires_grad]


def _states(net: nn.Module) -> list[Any]:
    return FullyShardedDataParallel.fsdp_modules(net)


def _take(net: nn.Module) -> Held:
    """Takes off the units what the latest forward left there, as if it had run without grad."""
    held = Held()
    for state in _states(net):
        handle = state._handle
        if handle is None:
            continue
        if handle._training_state.name != "IDLE":
            raise RuntimeError(f"FSDP is in {handle._training_state}, not between a forward and a backward")
        flat = handle.flat_param
        hook = getattr(flat, "_post_backward_hook_state", None)
        if hook is not None:
            del flat._post_backward_hook_state
            if flat.requires_grad:
                # Without mixed precision all forwards share one node: hooks of other graphs would fire with it.
                hook[-1].remove()
                hook = (hook[0], None)
        tensors = None
        if flat._tensors is not None:
            if _views_stand_in(flat):
                handle._use_sharded_views()
            tensors, flat._tensors = flat._tensors, [None] * len(flat._tensors)
        held.units.append(
            _Unit(state, hook, handle._needs_pre_backward_unshard, handle._post_forward_index, tensors, _views(handle))
        )
        handle._needs_pre_backward_unshard = False
        handle._post_forward_index = None
    if held.units:
        order = held.units[0].state._exec_order_data.handles_post_forward_order
        held.order = list(order)
        order.clear()
    return held


def _together(held: Sequence[Held]) -> Held:
    """What one backward through the graphs of several forwards needs: of each unit what the last of them left that used
    it."""
    units = []
    for left in zip(*(forward.units for forward in held), strict=True):
        used = [unit for unit in left if unit.hook or unit.unshard] or left
        units.append(used[-1])
        if not units[-1].state._handle.flat_param.requires_grad:
            # Its weights would be freed once the first of the graphs is through it.
            for hook in [unit.hook for unit in used if unit.hook]:
                hook[-1].remove()
        elif len({unit.hook[0] for unit in used if unit.hook}) > 1:
            raise RuntimeError("the graphs of this unit do not share the node that takes its gradient")
    return Held(units, max((forward.order for forward in held), key=len))


def reduces(net: nn.Module) -> bool:
    """Whether a backward now would reduce; so, too, where this torch does not say."""
    return bool(getattr(net, "_sync_gradients", True))


def reduced_beside(net: nn.Module) -> bool:
    """Whether reduced gradients are put aside, to which those that wait will be added."""
    return any(getattr(flat, "_saved_grad_shard", None) is not None for flat in flat_parameters(net))


def forget_gradients(net: nn.Module) -> None:
    """Drops gradients that wait for their reduction, and those that were put aside."""
    for flat in flat_parameters(net):
        flat.grad = None
        if hasattr(flat, "_saved_grad_shard"):
            del flat._saved_grad_shard


def _views_stand_in(flat: Any) -> bool:
    """Whether views of a forward stand where the parameters belong.

    SHARD_GRAD_OP leaves them there from a forward to its backward, and then refuses any others. NO_SHARD leaves them
    there after a backward that reached nothing trainable in the unit, and then takes them for new weights: it writes
    them back, in place, over weights that graphs hold.
    """
    pairs = zip(flat._param_infos, flat._tensors, strict=True)
    return any(view is not None and getattr(module, name, None) is view for (name, module, _), view in pairs)


def _put(held: Held) -> None:
    """Brings back what `_take` took, if there is a graph to walk."""
    if not held.pending():
        return
    for unit in held.units:
        handle = unit.state._handle
        flat = handle.flat_param
        hook = unit.hook
        if hook is not None:
            if flat.requires_grad:
                backward = partial(_runtime_utils._post_backward_hook, unit.state, handle)
                hook = (hook[0], hook[0].register_hook(backward))
            flat._post_backward_hook_state = hook
        if unit.tensors is not None:
            flat._tensors = unit.tensors
        for module, name, view in unit.views:
            handle._setattr_tensor(module, name, view)
        handle._needs_pre_backward_unshard = unit.unshard
        handle._post_forward_index = unit.index
    held.units[0].state._exec_order_data.handles_post_forward_order[:] = held.order


def _views(handle: Any) -> list[tuple[nn.Module, str, Tensor]]:
    """The views that stand for the parameters; with use_orig_params they are in `_tensors` and need no place here."""
    if handle._use_orig_params:
        return []
    flat = handle.flat_param
    places = [(module, name) for name, module, *_ in (*flat._param_infos, *flat._shared_param_infos)]
    return [(module, name, getattr(module, name)) for module, name in places]
