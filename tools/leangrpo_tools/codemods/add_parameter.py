"""Give a function one more parameter, with a default, behind its last one.

Before::

    def step(
        latents,
        grpo_sample,
    ):

After, with ``name: lean_rows`` and ``default: None``::

    def step(
        latents,
        grpo_sample,
        lean_rows=None,
    ):

Calls that do not know the parameter stay valid: it goes before ``**kwargs``, and behind ``*args`` it is keyword-only.
Refused when the function already uses the name.
"""

from __future__ import annotations

from typing import cast

import libcst as cst

from leangrpo_tools.codemods.base import Found, Match, function_candidates, refuse_taken
from leangrpo_tools.codemods.lists import append
from leangrpo_tools.codemods.params import AddParameter
from leangrpo_tools.codemods.source import Source


def find(source: Source, params: AddParameter) -> Found:
    """The functions of that name."""
    found = Found(f"def {params.function}")
    new = cst.Param(
        name=cst.Name(params.name),
        default=source.expression(params.default),
        equal=cst.AssignEqual(cst.SimpleWhitespace(""), cst.SimpleWhitespace("")),
    )

    def rewrite(node: cst.CSTNode) -> cst.CSTNode:
        function = cast(cst.FunctionDef, node)
        return function.with_changes(params=_with(function, new))

    for function in source.functions(params.function):
        refuse_taken(source, params.name, function)
        found.matches.append(Match(function, source.line(function), rewrite))
    found.candidates = function_candidates(source, params.function)
    return found


def _with(function: cst.FunctionDef, new: cst.Param) -> cst.Parameters:
    old, opening = function.params, function.whitespace_before_params
    if old.star_kwarg is not None:
        # Something follows in any case, so the new one takes a comma and the space of its neighbour.
        new = new.with_changes(comma=cst.Comma(whitespace_after=cst.SimpleWhitespace(" ")))
    tail = "whitespace_after_param"
    if isinstance(old.star_arg, (cst.Param, cst.ParamStar)):
        if old.kwonly_params:
            return old.with_changes(kwonly_params=_append(old.kwonly_params, new, opening, old))
        star = old.star_arg
        if not isinstance(star.comma, cst.Comma):
            star = star.with_changes(comma=cst.Comma(whitespace_after=cst.SimpleWhitespace(" ")))
        return old.with_changes(star_arg=star, kwonly_params=[new])
    if not old.params and old.posonly_params:
        mark = old.posonly_ind
        if isinstance(mark, cst.ParamSlash) and isinstance(mark.comma, cst.Comma):
            return old.with_changes(params=[new])
        mark = cst.ParamSlash(comma=cst.Comma(whitespace_after=cst.SimpleWhitespace(" ")))
        return old.with_changes(posonly_ind=mark, params=[new])
    if old.star_kwarg is not None:
        return old.with_changes(params=_append(old.params, new, opening, old))
    return old.with_changes(params=append(list(old.params), new, tail, opening))


def _append(
    items: object, new: cst.Param, opening: cst.BaseParenthesizableWhitespace, old: cst.Parameters
) -> list[cst.Param]:
    known = list(cast("list[cst.Param]", items))
    if old.star_kwarg is None:
        return append(known, new, "whitespace_after_param", opening)
    if not known:
        return [new]
    last = known[-1]
    comma = last.comma if isinstance(last.comma, cst.Comma) else cst.Comma(whitespace_after=cst.SimpleWhitespace(" "))
    return [*known[:-1], last.with_changes(comma=comma), new.with_changes(comma=comma)]
