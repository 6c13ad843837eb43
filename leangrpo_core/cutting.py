"""Cuts the graph of a forward where it enters and leaves each unit that FSDP2 shards: each piece is walked alone.

    with cutting(net) as cuts:
        out = net(x)

FSDP2's own hooks stay inside the unit's piece of the graph: walking it gathers and reshards as natively. A
recomputation (activation checkpointing) happens in the backward, outside the context, and sees no hook of this module.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from .guard import FSDPModule
from .segments import Call, cut_at, cutter, swap


class Cuts:
    """What one forward leaves behind.

    Attributes:
        events: (call, whether it is entered), in the order of the forward.
        outer: the code around the network.
        refusal: why this graph cannot be walked unit by unit, or nothing.
    """

    def __init__(self) -> None:
        self.outer = Call(None, None)
        self.events: list[tuple[Call, bool]] = []
        self.refusal = ""
        self._open = [self.outer]
        self._owners: dict[int, nn.Module] = {}
        self._held: list[nn.Parameter] = []  # so that an id in `_owners` stays theirs

    def refuse(self, reason: str) -> None:
        self.refusal = self.refusal or reason

    def enter(self, unit: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Before FSDP2's own hook: the arguments, cut."""
        call = Call(unit, self._open[-1])
        self._open[-1].nests = True
        self._open.append(call)
        self.events.append((call, True))
        changed = swap((args, kwargs), cutter(call.inputs, call, call.arguments))
        if call.parent is self.outer:
            if call.inputs:
                self.refuse("a gradient must flow into the network's arguments")
            if len(self.events) > 1:
                self.refuse("the network, or a part of it alone, ran more than once")
        return changed

    def returned(self, unit: nn.Module, own: Sequence[nn.Module], output: Any) -> Any:
        """Before FSDP2's own hook: the result, on which that hook will watch a tensor that outlives the first walk."""
        call = self._open[-1]
        for parameter in [p for module in own for p in module._parameters.values() if p is not None]:
            self._owners[id(parameter)] = unit  # gathered ones here, which are what the graph holds
            self._held.append(parameter)
        if any(tensor._version != version for tensor, version in call.arguments):
            self.refuse(f"{_name(unit)} writes into its arguments")
        call.arguments = []
        if not call.nests and call.parent is not self.outer:
            return None
        changed = swap(output, cutter(call.inner, self.outer, []))

        def watch(tensor: Tensor) -> Tensor:
            if tensor.requires_grad:
                call.wake = get_gradient_edge(tensor), tensor.detach().new_zeros(()).expand(tensor.shape)
            return tensor

        swap(changed, watch)
        return changed

    def leave(self, output: Any) -> Any:
        """After FSDP2's own hook: the result, cut. The network's own stays: what the caller holds is watched."""
        call = self._open.pop()
        self.events.append((call, False))
        if call.parent is None or call.parent is self.outer:
            return None
        return swap(output, cutter(call.outputs, call.parent, []))

    def check(self) -> None:
        """Refuses a graph that reaches another unit's not through a cut: an attribute, a closure, an odd container."""
        if not self.events:
            self.refuse("no forward under grad")
        starts: dict[Call, list[GradientEdge]] = {}
        for call, entered in self.events:
            if entered and call.parent is not None:
                starts.setdefault(call.parent, []).extend(edge for edge, _ in call.inputs)
            elif not entered:
                starts.setdefault(call, []).extend(edge for edge, _ in call.inner or call.outputs)
        for call, edges in starts.items():
            if call.unit is not None and not self.refusal:
                self._check(call, edges)
        self._owners, self._held = {}, []

    def _check(self, call: Call, edges: list[GradientEdge]) -> None:
        seen: set[Node] = set()
        todo = [edge.node for edge in edges]
        name = _name(call.unit)
        while todo:
            node = todo.pop()
            if node in seen:
                continue
            seen.add(node)
            cut = cut_at(node)
            if cut is not None:
                if cut.mark is not call.mark:
                    self.refuse(f"{name} uses a tensor of another unit that was not passed as an argument or a result")
                continue
            parents = [parent for parent, _ in node.next_functions if parent is not None]
            if not parents:
                owner = self._owners.get(id(getattr(node, "variable", None)), call.unit)
                if owner is not call.unit:
                    self.refuse(f"{name} uses a weight, or a tensor computed from it, of {_name(owner)}")
            elif (call.nests or call.parent is self.outer) and node.name().startswith("CheckpointFunction"):
                self.refuse("reentrant activation checkpointing around units")
            todo.extend(parents)


def _name(unit: nn.Module | None) -> str:
    """What the network's author calls it: FSDP2 changes the class."""
    return type(unit).__name__.removeprefix("FSDP")


def units_of(net: nn.Module) -> list[nn.Module]:
    """The modules that FSDP2 shards, the network itself first."""
    return [module for module in net.modules() if isinstance(module, FSDPModule)]


@contextmanager
def cutting(net: nn.Module, units: Sequence[nn.Module] | None = None) -> Iterator[Cuts]:
    """Cuts the forward of `net` inside at its units. One forward per context.

    Args:
        units: what to cut at instead of what FSDP2 shards; must hold `net`.
    """
    cuts, handles = Cuts(), []
    units = units_of(net) if units is None else units

    def own(module: nn.Module) -> Iterator[nn.Module]:
        yield module
        for child in module.children():
            if child not in units:
                yield from own(child)

    def attach(unit: nn.Module) -> None:
        mine = list(own(unit))

        def enter(module: nn.Module, args: Any, kwargs: Any) -> Any:
            return cuts.enter(unit, args, kwargs) if torch.is_grad_enabled() else None

        def returned(module: nn.Module, args: Any, output: Any) -> Any:
            return cuts.returned(unit, mine, output) if torch.is_grad_enabled() else None

        def leave(module: nn.Module, args: Any, output: Any) -> Any:
            return cuts.leave(output) if torch.is_grad_enabled() else None

        handles.append(unit.register_forward_pre_hook(enter, prepend=True, with_kwargs=True))
        handles.append(unit.register_forward_hook(returned, prepend=True))
        handles.append(unit.register_forward_hook(leave))

    for unit in units:
        attach(unit)
    try:
        yield cuts
    finally:
        for handle in handles:
            handle.remove()
    cuts.check()
