"""Hand a call over to a wrapper: what was called becomes the first argument, the old arguments follow unchanged.

Before::

    def step(network, x):
        y = network(
            x,  # the state
            scale=2,
        )

After, with ``function: step``, ``call: network``, ``wrapper: lean.rollout_call``, ``arguments: [rows, i]``::

    def step(network, x):
        y = lean.rollout_call(
            network, rows, i,
            x,  # the state
            scale=2,
        )

``keywords`` go behind the last positional argument. Of several such calls ``assigns: NAME`` means those whose statement
assigns that name, and ``outside: CONTEXT`` those that are in no ``with CONTEXT(...)`` block.
"""

from __future__ import annotations

from typing import cast

import libcst as cst

from leangrpo_tools.codemods.base import Found, Match, call_candidates
from leangrpo_tools.codemods.lists import lone_generator, without_comment
from leangrpo_tools.codemods.params import WrapCall
from leangrpo_tools.codemods.shape import assigns
from leangrpo_tools.codemods.source import Source, dotted

_SPACE = cst.SimpleWhitespace(" ")


def find(source: Source, params: WrapCall) -> Found:
    """The calls of that name in that function."""
    to = f"{params.assigns} = " if params.assigns else ""
    without = f" outside of {params.outside}(...)" if params.outside else ""
    found = Found(f"{to}{params.call}(...) in {params.function}{without}")

    def rewrite(node: cst.CSTNode) -> cst.CSTNode:
        return _wrapped(source, cast(cst.Call, node), params)

    for call in source.calls(params.call, params.function):
        if not _meant(source, call, params):
            continue
        found.matches.append(Match(call, source.line(call), rewrite))
    found.candidates = call_candidates(source, params.function, params.call)
    return found


def _meant(source: Source, call: cst.Call, params: WrapCall) -> bool:
    around = list(source.above(call))
    if params.assigns is not None:
        statement = next((node for node in around if isinstance(node, (cst.Assign, cst.AnnAssign))), None)
        targets = statement.targets if isinstance(statement, cst.Assign) else [statement] if statement else []
        if not any(assigns(source, target, params.assigns) for target in targets):
            return False
    items = [item.item for node in around if isinstance(node, cst.With) for item in node.items]
    return not any(isinstance(item, cst.Call) and dotted(item.func) == params.outside for item in items)


def _wrapped(source: Source, call: cst.Call, params: WrapCall) -> cst.Call:
    bare = call.func.with_changes(lpar=[], rpar=[])
    lead = [cst.Arg(value) for value in (bare, *map(source.expression, params.arguments))]
    tight = cst.AssignEqual(cst.SimpleWhitespace(""), cst.SimpleWhitespace(""))
    extra = [
        cst.Arg(keyword=cst.Name(name), value=source.expression(value), equal=tight)
        for name, value in params.keywords.items()
    ]
    old = lone_generator(call.args)
    positional = max((n + 1 for n, arg in enumerate(old) if arg.keyword is None and arg.star != "**"), default=0)
    if positional == 0:
        lead, extra = [*lead, *extra], []
    opening = without_comment(call.whitespace_before_args)
    between = opening if isinstance(opening, cst.ParenthesizedWhitespace) else _SPACE
    comma = cst.Comma(whitespace_after=_SPACE)
    lead = [arg.with_changes(comma=comma) for arg in lead]
    if old:
        lead[-1] = lead[-1].with_changes(comma=cst.Comma(whitespace_after=between))
    else:
        lead[-1] = lead[-1].with_changes(comma=cst.MaybeSentinel.DEFAULT)
    if extra:
        old = _insert(old, positional, extra)
    wrapper = source.expression(params.wrapper)
    return call.with_changes(func=wrapper, args=[*lead, *old])


def _insert(old: list[cst.Arg], place: int, extra: list[cst.Arg]) -> list[cst.Arg]:
    """``extra`` behind the first ``place`` arguments, on the line of the last of them."""
    before, last, behind = old[: place - 1], old[place - 1], old[place:]
    comma = cst.Comma(whitespace_after=_SPACE)
    extra = [arg.with_changes(comma=comma) for arg in extra]
    closing = {"comma": last.comma, "whitespace_after_arg": last.whitespace_after_arg}
    extra[-1] = extra[-1].with_changes(**closing)
    last = last.with_changes(comma=comma, whitespace_after_arg=cst.SimpleWhitespace(""))
    return [*before, last, *extra, *behind]
