"""Walks many held graphs of one FSDP2 network unit by unit: the last unit of all graphs, then the one before it.

Each unit is then gathered once and its gradient reduced once, with two units and the network itself gathered at a time
and no gradient of the whole network. Graph by graph, every unit is gathered and reduced once per graph.

At the end of every backward FSDP2 looks after all units. So as few as possible are made: two per unit, where gradients
are added up in single precision or better. Low-precision ones are walked graph by graph, between which FSDP2 itself
adds them up in the precision in which it reduces them.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.distributed.tensor import DTensor

from .cutting import Cuts, units_of
from .guard import FSDPModule
from .segments import Call, apart, between

Stage = tuple[nn.Module, bool, list[Call]]
Owed = tuple[GradientEdge, Tensor]

_LOW = (torch.bfloat16, torch.float16)
_SWITCHES = (
    "set_requires_gradient_sync",
    "set_reshard_after_backward",
    "set_is_last_backward",
    "set_modules_to_backward_prefetch",
)


def supports(net: nn.Module) -> str:
    """Why held graphs of `net` cannot be walked unit by unit, or gradients would be rounded unlike upstream's."""
    units = units_of(net)
    if not isinstance(net, FSDPModule):
        return "only parts of the network are sharded, not the network itself"
    missing = [name for name in _SWITCHES if not hasattr(net, name)]
    if missing:
        return f"this torch's FSDP2 has no {missing[0]}"
    if not _walks_from_edges():
        return "this torch cannot start a backward within a graph"
    if any(getattr(module, "_compiled_call_impl", None) or hasattr(module, "_orig_mod") for module in net.modules()):
        return "a compiled network runs without the hooks that would cut its graph"
    for p in net.parameters():
        if isinstance(p, DTensor) and p.device_mesh.device_type != p.to_local().device.type:
            return "parameters are offloaded to the CPU"
    states = [_state(unit) for unit in units]
    policies: list[Any] = [getattr(state, "_mp_policy", None) for state in states]
    if None in policies:
        return "this torch does not say in which precision FSDP2 reduces"
    if len({id(state) for state in states}) < len(units):
        return "several modules are sharded as one unit"
    stored = {p.dtype for p in net.parameters() if p.requires_grad}
    reduced = {policy.reduce_dtype or policy.param_dtype for policy in policies}
    low = [dtype for dtype in _LOW if dtype in stored | reduced]
    # Upstream rounds after every backward, this once.
    return f"gradients would be added up in {low[0]} otherwise than upstream" if low else ""


def _walks_from_edges() -> bool:
    """Whether a backward can start at a place in a graph; torch before 2.6 wants tensors."""
    leaf = torch.zeros((), requires_grad=True)
    try:
        with torch.enable_grad():
            torch.autograd.backward([get_gradient_edge(leaf * 1)], [torch.ones(())])
    except (AttributeError, RuntimeError, TypeError):
        return False
    return leaf.grad is not None


def unreduced(net: nn.Module) -> int:
    """How many weights have a gradient that waits for its reduction; 0, too, where this torch does not say."""
    found = 0
    for p in _weights(net):
        whole = getattr(getattr(p, "_unsharded_param", None), "grad", None)
        found += whole is not None or getattr(p, "unsharded_accumulated_grad", None) is not None
    return found


def forget_gradients(net: nn.Module) -> None:
    """Drops gradients that wait for their reduction."""
    for p in _weights(net):
        if getattr(p, "_unsharded_param", None) is not None:
            p._unsharded_param.grad = None
        if getattr(p, "unsharded_accumulated_grad", None) is not None:
            p.unsharded_accumulated_grad = None


def _weights(net: nn.Module) -> list[Any]:
    """FSDP2's own books on each weight."""
    states = [_state(unit) for unit in units_of(net)]
    groups = [getattr(s, "_fsdp_param_groups", None) or [getattr(s, "_fsdp_param_group", None)] for s in states]
    return [p for group in itertools.chain(*groups) for p in getattr(group, "fsdp_params", ())]


def _state(unit: nn.Module) -> Any:
    return getattr(unit, "_get_fsdp_state", lambda: None)()


def _computes_low(net: nn.Module) -> bool:
    """Whether gradients of a gathered weight come in low precision."""
    policies = [getattr(_state(unit), "_mp_policy", None) for unit in units_of(net)]
    dtypes = {getattr(policy, "param_dtype", None) for policy in policies} | {p.dtype for p in net.parameters()}
    return not dtypes.isdisjoint(_LOW)


def walk_layer_major(net: nn.Module, graphs: Sequence[tuple[Cuts, Sequence[Tensor], Sequence[Tensor]]]) -> None:
    """Adds the gradients of all `graphs` to the parameters. Each graph is freed unit by unit on the way.

    Every rank must have at least one graph; how many may differ. FSDP2's switches for backward are left on.

    Args:
        graphs: for each held forward its cuts, its results and their cotangents.

    Raises:
        ValueError: a graph cannot be walked unit by unit; nothing has been walked then.
    """
    reason = next((cuts.refusal for cuts, _, _ in graphs if cuts.refusal), "")
    if reason:
        raise ValueError(reason)
    for cuts, outs, grads in graphs:
        for out, grad in zip(outs, grads, strict=True):
            cuts.outer.owe(get_gradient_edge(out), grad)
    stages = _schedule([cuts for cuts, _, _ in graphs])
    for cuts, _, _ in graphs:
        cuts.refuse("walked before")
    one_by_one = _computes_low(net)
    with _Switches(net) as switches:
        for place, (unit, entered, calls) in enumerate(stages):
            ahead = (other for other, inside, _ in stages[place + 1 :] if not inside and other is not unit)
            switches.prefetch(unit, next(ahead, unit))
            if entered:
                _walk_rest(unit, calls, switches, one_by_one)
            else:
                for call in calls:
                    if call.parent is not None:
                        switches.prefetch(call.parent.unit, unit)
                for group in [[call] for call in calls] if one_by_one else [calls]:
                    _reach(group)
            calls.clear()
        owed = [entry for cuts, _, _ in graphs for entry in cuts.outer.owed.values()]
        for cuts, _, _ in graphs:
            cuts.outer.owed = {}
        _backward([], owed)


def _schedule(held: Sequence[Cuts]) -> list[Stage]:
    """What to walk together, in an order that is backward for each graph. Takes the events."""
    left = [cuts.events for cuts in held]
    rank: dict[Any, int] = {}
    for events in sorted(left, key=len, reverse=True):
        for call, _ in events:
            rank.setdefault(call.unit, len(rank))
    stages: list[Stage] = []
    while any(left):
        # The unit that comes last in the forward; all graphs reach its results before any is walked through it.
        heads = [(events[-1][0].unit, events[-1][1]) for events in left if events]
        unit, entered = max(heads, key=lambda head: (rank[head[0]], not head[1]))
        together = [events for events in left if events and events[-1][0].unit is unit and events[-1][1] is entered]
        stages.append((unit, entered, [events.pop()[0] for events in together]))  # type: ignore[arg-type]
    return stages


def _reach(calls: Sequence[Call]) -> None:
    """Walks what of the parents' graphs was computed from the results of `calls`, so that their gradients are complete.

    All that is owed there has come in, since it was computed after the call: those nodes are walked once. The walk
    stops at their border, for what was not computed from the call may yet be owed more.
    """
    parents: list[Call] = []
    starts: list[Owed] = []
    border: dict[GradientEdge, Call] = {}  # graphs share the nodes of weights only
    for call in calls:
        parent = call.parent
        assert parent is not None
        wanted = {cut for _, cut in call.outputs or call.inner}
        inside, edges = between([node for node, _ in parent.owed], wanted)
        owed = [parent.owed.pop(key) for key in list(parent.owed) if key[0] in inside]
        if owed and not apart({edge.node for edge in edges}):
            # Autograd would go on from one place of the border to the next. So walk on to the end, maybe there again.
            _backward([parent], owed, again=True)
        elif owed:
            parents.append(parent)
            starts += owed
            border |= dict.fromkeys(edges, parent)
    if starts:
        # Autograd leaves out what is not on a way to the border.
        awake = [parent.wake for parent in parents if parent.wake is not None]
        edges = list(dict.fromkeys([*border, *(edge for edge, _ in awake)]))
        given = [*awake, *starts]
        grads = torch.autograd.grad([edge for edge, _ in given], edges, [grad for _, grad in given], allow_unused=True)
        weights = []
        for edge, grad in zip(edges, grads, strict=True):
            if edge not in border or grad is None:
                continue
            if edge.node.next_functions:
                border[edge].owe(edge, grad)
            else:
                weights.append((edge, grad))
        _backward(parents if weights else [], weights)
    watched = [call for call in calls if call.outputs and call.inner]
    _backward(
        [], [(edge, grad) for call in watched for edge, cut in call.outputs if (grad := cut.collect()) is not None]
    )
    for call in calls:
        for edge, cut in call.inner or call.outputs:
            call.owe(edge, cut.collect())
            cut.closed = True
        call.outputs, call.inner = [], []


def _walk_rest(unit: nn.Module, calls: Sequence[Call], switches: "_Switches", one_by_one: bool) -> None:
    """Walks what remains of `unit` in all graphs, and reduces its gradient with the last of them.

    The last one goes alone: FSDP2 reduces as soon as the backward leaves the unit in one of the graphs.
    """
    live = [call for call in calls if call.owed or call.wake]
    before = [[call] for call in live[:-1]] if one_by_one else [live[:-1]]
    for group in [*before, live[-1:]]:
        if group and group[-1] is live[-1]:
            switches.reduce(unit)
        owed = [entry for call in group for entry in call.owed.values()]
        for call in group:
            call.owed = {}
        _backward(group, owed)
    switches.hold(unit)
    for call in calls:
        if call.parent is not None:
            for edge, cut in call.inputs:
                call.parent.owe(edge, cut.collect())
        call.inputs, call.wake = [], None


def _backward(calls: Sequence[Call], owed: Sequence[Owed], again: bool = False) -> None:
    """A backward from what is owed, and from where it makes FSDP2's hooks run for `calls`."""
    # Those first: the hooks must run before what needs the weights.
    given = [*(call.wake for call in calls if call.wake is not None), *owed]
    if given:
        torch.autograd.backward([edge for edge, _ in given], [grad for _, grad in given], retain_graph=again)


class _Switches:
    """FSDP2's switches for backward: off, except while a unit's last graph is walked."""

    def __init__(self, net: nn.Module) -> None:
        self._net = net
        self._prefetch: list[tuple[Any, list[Any]]] = []

    def __enter__(self) -> "_Switches":
        if isinstance(self._net, FSDPModule):
            self._set(self._net, False, recurse=True)
            self._net.set_is_last_backward(False)  # else each of many backward calls drops what was prefetched
            for unit in units_of(self._net):
                # No public way to read what was set. Without it FSDP2 guesses from the order of forwards, which no-grad
                # forwards in between make a wrong guess: one gathering more than needed.
                state = _state(unit)
                if hasattr(state, "_states_to_backward_prefetch"):
                    self._prefetch.append((state, state._states_to_backward_prefetch))
        return self

    def __exit__(self, *error: object) -> None:
        if isinstance(self._net, FSDPModule):
            self._set(self._net, True, recurse=True)
            self._net.set_is_last_backward(True)
        for state, modules in self._prefetch:
            state._states_to_backward_prefetch = modules

    @staticmethod
    def _set(unit: nn.Module, on: bool, recurse: bool) -> None:
        if isinstance(unit, FSDPModule):
            unit.set_requires_gradient_sync(on, recurse=recurse)
            unit.set_reshard_after_backward(on, recurse=recurse)

    def reduce(self, unit: nn.Module) -> None:
        """From now on gradients of `unit` are reduced; those of all units where the network itself is walked last."""
        self._set(unit, True, recurse=unit is self._net)
        if unit is self._net and isinstance(unit, FSDPModule):
            unit.set_is_last_backward(True)

    def hold(self, unit: nn.Module) -> None:
        if unit is not self._net:
            self._set(unit, False, recurse=False)

    def prefetch(self, unit: nn.Module | None, upcoming: nn.Module) -> None:
        """What to gather while `unit` is walked; itself if nothing."""
        if self._prefetch and isinstance(unit, FSDPModule) and isinstance(upcoming, FSDPModule):
            unit.set_modules_to_backward_prefetch([upcoming])
