"""Give a call one more keyword argument, behind its last one.

Before::

    def sample(prompts):
        draw(
            prompts,
            steps,
        )

After, with ``function: sample``, ``call: draw``, ``name: lean_rows``, ``value: rows``::

    def sample(prompts):
        draw(
            prompts,
            steps,
            lean_rows=rows,
        )
"""

from __future__ import annotations

from typing import cast

import libcst as cst

from leangrpo_tools.codemods.base import Found, Match, NameTaken, call_candidates
from leangrpo_tools.codemods.lists import append, lone_generator
from leangrpo_tools.codemods.params import AddArgument
from leangrpo_tools.codemods.source import Source


def find(source: Source, params: AddArgument) -> Found:
    """The calls of that name in that function."""
    found = Found(f"{params.call}(...) in {params.function}")
    tight = cst.AssignEqual(cst.SimpleWhitespace(""), cst.SimpleWhitespace(""))
    new = cst.Arg(keyword=cst.Name(params.name), value=source.expression(params.value), equal=tight)

    def rewrite(node: cst.CSTNode) -> cst.CSTNode:
        call = cast(cst.Call, node)
        args = append(lone_generator(call.args), new, "whitespace_after_arg", call.whitespace_before_args)
        return call.with_changes(args=args)

    for call in source.calls(params.call, params.function):
        if any(arg.keyword is not None and arg.keyword.value == params.name for arg in call.args):
            raise NameTaken(params.name, [source.line(call)])
        found.matches.append(Match(call, source.line(call), rewrite))
    found.candidates = call_candidates(source, params.function, params.call)
    return found
