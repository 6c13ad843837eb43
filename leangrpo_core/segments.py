"""Cuts in a graph, and the pieces that they leave of it.

A cut is an alias of the tensor with a graph of its own: one node that keeps the gradient it is sent. Nothing is copied,
an in-place operation works on an alias as on any result, and one that would spoil a saved tensor still raises.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

Key = tuple[Node, int]


class Cut:
    """Where the gradient of one tensor arrives.

    Attributes:
        mark: that of the call whose graph it belongs to. Not the call: its graph leads back here by ways that Python's
            garbage collector does not see, so a graph that is never walked would never be freed.
    """

    def __init__(self, call: "Call") -> None:
        self.mark = call.mark
        self.grad: Tensor | None = None
        self.closed = False  # a later walk that only wakes FSDP2 sends zeros

    def add(self, grad: Tensor | None) -> None:
        if grad is not None and not self.closed:
            self.grad = grad if self.grad is None else self.grad + grad

    def collect(self) -> Tensor | None:
        grad, self.grad = self.grad, None
        return grad


class Call:
    """One run of a unit, of the network itself, or (`unit` is None) of the code around the network.

    Attributes:
        parent: the call whose code made this one.
        inputs: each argument's place in the parent's graph, and the cut that stands for it in this one.
        outputs: each result's place in this graph, and the cut that stands for it in the parent's.
        inner: for a call with units inside, a cut of its results below the tensors that FSDP2 watches; else empty.
        wake: such a watched tensor. A call with units inside is walked in pieces, and a backward that starts here as
            well runs FSDP2's hooks for the piece.
        owed: gradients of places in this graph that have not been walked yet.
    """

    def __init__(self, unit: nn.Module | None, parent: "Call | None") -> None:
        self.unit, self.parent = unit, parent
        self.mark = object()
        self.nests = False
        self.arguments: list[tuple[Tensor, int]] = []  # while it runs: with their versions
        self.inputs: list[tuple[GradientEdge, Cut]] = []
        self.outputs: list[tuple[GradientEdge, Cut]] = []
        self.inner: list[tuple[GradientEdge, Cut]] = []
        self.wake: tuple[GradientEdge, Tensor] | None = None
        self.owed: dict[Key, tuple[GradientEdge, Tensor]] = {}

    def owe(self, edge: GradientEdge, grad: Tensor | None) -> None:
        """Adds to the gradient of a place in this graph."""
        if grad is None:
            return
        cut = cut_at(edge.node)
        if cut is not None:  # no operation in between
            cut.add(grad)
            return
        key = (edge.node, edge.output_nr)
        self.owed[key] = (edge, self.owed[key][1] + grad if key in self.owed else grad)


class _Alias(torch.autograd.Function):
    """The tensor in `box` as the result of a node without a past. `anchor` makes autograd record the node."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, cut: Cut, box: list[Tensor]) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.cut = cut
        return box.pop()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.cut.add(grads[0])
        return None, None, None


def cut_at(node: Node) -> Cut | None:
    """The cut that `node` is, or None."""
    cut = getattr(node, "cut", None)
    return cut if isinstance(cut, Cut) else None


def swap(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """`value` with its tensors changed. What is no known container stays as it is; `Cuts.check` finds what that hid."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, tuple):
        items = [swap(item, change) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if type(value) is list:
        return [swap(item, change) for item in value]
    if type(value) is dict:
        return {key: swap(item, change) for key, item in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):  # also named results of diffusers
        names = [field.name for field in dataclasses.fields(value) if field.init]
        return dataclasses.replace(value, **{name: swap(getattr(value, name), change) for name in names})
    return value


def cutter(
    made: list[tuple[GradientEdge, Cut]], call: Call, originals: list[tuple[Tensor, int]]
) -> Callable[[Tensor], Tensor]:
    """A function that cuts each tensor it is given off its past. The cuts belong to `call` and are noted in `made`."""
    aliases: dict[int, tuple[Tensor, Tensor]] = {}  # a tensor passed twice is one tensor behind the cut too

    def change(tensor: Tensor) -> Tensor:
        if not tensor.requires_grad:
            return tensor
        if id(tensor) not in aliases:
            cut = Cut(call)
            anchor = torch.zeros((), requires_grad=True)
            aliases[id(tensor)] = tensor, _Alias.apply(anchor, cut, [tensor.detach()])  # type: ignore[assignment]
            made.append((get_gradient_edge(tensor), cut))
            originals.append((tensor, tensor._version))
        return aliases[id(tensor)][1]

    return change


def between(starts: Sequence[Node], wanted: set[Cut]) -> tuple[set[Node], list[GradientEdge]]:
    """The nodes on a way from `starts` to a wanted cut, and where ways out of them lead."""
    users: dict[Node, list[Node]] = {node: [] for node in starts}
    ends: list[Node] = []
    todo = list(users)
    while todo:
        node = todo.pop()
        cut = cut_at(node)
        if cut is not None:
            if cut in wanted:
                ends.append(node)
            continue
        for parent, _ in node.next_functions:
            if parent is not None:
                if parent not in users:
                    users[parent] = []
                    todo.append(parent)
                users[parent].append(node)
    inside: set[Node] = set()
    while ends:
        for node in users[ends.pop()]:
            if node not in inside:
                inside.add(node)
                ends.append(node)
    ways = dict.fromkeys(way for node in users if node in inside for way in node.next_functions)
    return inside, [GradientEdge(node, place) for node, place in ways if node is not None and node not in inside]


def apart(border: set[Node]) -> bool:
    """Whether no place of the border lies behind another."""
    todo = [parent for node in border for parent, _ in node.next_functions if parent is not None]
    seen: set[Node] = set()
    while todo:
        node = todo.pop()
        if node in border:
            return False
        if node not in seen:
            seen.add(node)
            todo.extend(parent for parent, _ in node.next_functions if parent is not None)
    return True
