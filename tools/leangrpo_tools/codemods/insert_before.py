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
item (``samples["rewards"]``). Two anchors in one block are one place.
"""

from __future__ import annotations

import libcst as cst

from leangrpo_tools.codemods.base import Found, Match, call_candidates, function_candidates
from leangrpo_tools.codemods.params import InsertBefore
from leangrpo_tools.codemods.shape import assigns
from leangrpo_tools.codemods.source import Source


def find(source: Source, params: InsertBefore) -> Found:
    """The statements above which the new one goes."""
    what = f"{params.call}(...)" if params.call else f"{params.assigns} = ..."
    found = Found(f"{what} in {params.function}")
    new = source.new_statement(params.statement)
    seen: set[int] = set()
    for node in _anchors(source, params):
        line = source.statement(node)
        block = source.parent(line) if line is not None else None
        if line is None or not isinstance(block, (cst.IndentedBlock, cst.Module)):
            continue
        place = block.body[0] if params.place == "block" else line
        if id(place) not in seen:
            seen.add(id(place))
            found.matches.append(Match(place, source.line(node), before=[new]))
    if params.call:
        found.candidates = call_candidates(source, params.function, params.call)
    else:
        every = [node for node in source.binds(params.assigns or "")]
        found.candidates = [(source.line(node), f"{params.assigns} = {source.inside(node)}") for node in every]
        if not source.functions(params.function):
            found.candidates += function_candidates(source, params.function)
    return found


def _anchors(source: Source, params: InsertBefore) -> list[cst.CSTNode]:
    if params.call:
        return list(source.calls(params.call, params.function))
    return [
        node
        for function in source.functions(params.function)
        for node in source.nodes(function)
        if isinstance(node, (cst.AssignTarget, cst.AnnAssign)) and assigns(source, node, params.assigns or "")
    ]
