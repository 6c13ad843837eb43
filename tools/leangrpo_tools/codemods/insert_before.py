"""Insert a statement before another one, or at the top of the block that holds it.

Before::

    def train(optimizer):
        if ready:
            norm = clip()
            optimizer.step()

After, with ``function: train``, ``call: optimizer.step``, ``place: block``, ``statement: lean.flush(optimizer)``::

    def train(optimizer):
        if ready:
            lean.flush(optimizer)
            norm = clip()
            optimizer.step()

``place: statement`` puts it directly above; ``assigns: NAME`` instead of ``call`` looks for an assignment, also to an
item (``samples["rewards"]``). Two anchors in one block are one place. With ``handed_on``, ``scaler.step(optimizer)``
counts as ``optimizer.step()``. ``ahead_of`` are calls that the statement must come before, by their last name: if one
is above the anchor's block, the place is the block around both, unless that is a loop's or function's whole body.
"""

from __future__ import annotations

import libcst as cst

from leangrpo_tools.codemods.base import Found, Match, call_candidates, function_candidates
from leangrpo_tools.codemods.params import InsertBefore
from leangrpo_tools.codemods.shape import assigns
from leangrpo_tools.codemods.source import Source, dotted

_REPEATED = (cst.For, cst.While, cst.FunctionDef, cst.Module)


def find(source: Source, params: InsertBefore) -> Found:
    """The statements above which the new one goes."""
    what = f"{params.call}(...)" if params.call else f"{params.assigns} = ..."
    found = Found(f"{what} in {params.function}")
    new = source.new_statement(params.statement)
    seen: set[int] = set()
    late: list[cst.Call] = []
    for node in _anchors(source, params):
        line = source.statement(node)
        block = source.parent(line) if line is not None else None
        if line is None or not isinstance(block, (cst.IndentedBlock, cst.Module)):
            continue
        too_early = _too_early(source, params, node, block)
        late += too_early
        outer = _around(source, [node, *too_early]) if too_early else block
        if outer is None:
            continue
        place = outer.body[0] if params.place == "block" else line
        if id(place) not in seen:
            seen.add(id(place))
            found.matches.append(Match(place, source.line(node), before=[new]))
    if params.call:
        found.candidates = call_candidates(source, params.function, params.call)
        found.candidates += [
            (source.line(call), f"{dotted(call.func)}( {source.inside(call)}, outside of the block that steps")
            for call in late
        ]
    else:
        every = [node for node in source.binds(params.assigns or "")]
        found.candidates = [(source.line(node), f"{params.assigns} = {source.inside(node)}") for node in every]
        if not source.functions(params.function):
            found.candidates += function_candidates(source, params.function)
    return found


def _anchors(source: Source, params: InsertBefore) -> list[cst.CSTNode]:
    if params.call:
        found = list(source.calls(params.call, params.function))
        if params.handed_on:
            found += source.handed_on(params.call, params.function)
        return list(found)
    return [
        node
        for function in source.functions(params.function)
        for node in source.nodes(function)
        if isinstance(node, (cst.AssignTarget, cst.AnnAssign)) and assigns(source, node, params.assigns or "")
    ]


def _too_early(source: Source, params: InsertBefore, anchor: cst.CSTNode, block: cst.CSTNode) -> list[cst.Call]:
    """Calls that the statement has to precede, and that are above the anchor's block in the same loop or function."""
    if not params.ahead_of:
        return []
    around = next(node for node in source.above(anchor) if isinstance(node, _REPEATED))
    found: list[cst.Call] = []
    for node in source.nodes(around):
        if node is block:
            break
        if not isinstance(node, cst.Call):
            continue
        name = dotted(node.func)
        if name and name.rpartition(".")[2] in params.ahead_of and not _exclusive(source, node, anchor):
            found.append(node)
    return found


def _exclusive(source: Source, one: cst.CSTNode, other: cst.CSTNode) -> bool:
    """Whether two nodes are in different branches of one ``if``, so that never both run."""
    around = {id(node) for node in source.above(other)}
    shared = next(node for node in source.above(one) if id(node) in around)
    return isinstance(shared, cst.If)


def _around(source: Source, nodes: list[cst.CSTNode]) -> cst.IndentedBlock | None:
    """The innermost block that holds all of them; None if it is the whole body of a loop or function."""
    shared: list[cst.CSTNode] = [node for node in source.above(nodes[0]) if isinstance(node, cst.IndentedBlock)]
    for node in nodes[1:]:
        around = {id(item) for item in source.above(node)}
        shared = [block for block in shared if id(block) in around]
    inner = shared[0] if shared else None
    return inner if isinstance(inner, cst.IndentedBlock) and not isinstance(source.parent(inner), _REPEATED) else None
