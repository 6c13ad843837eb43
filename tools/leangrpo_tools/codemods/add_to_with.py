"""Add a context to the ``with`` statement around a call.

Before::

    def train(prompts):
        with torch.no_grad():
            # one rollout
            rewards, latents = sample(prompts)

After, with ``call: sample``, ``beside: torch.no_grad()``, ``context: lean.rollout(len(prompts))``::

    def train(prompts):
        with torch.no_grad(), lean.rollout(len(prompts)):
            # one rollout
            rewards, latents = sample(prompts)

``beside`` says which of the ``with`` statements around the call is meant, by the shape of one of its contexts; the
innermost such one. Two calls in it are one place. Unlike ``wrap_in_with`` this moves no line of upstream's.
"""

from __future__ import annotations

from typing import cast

import libcst as cst

from leangrpo_tools.codemods.base import Found, Match, call_candidates
from leangrpo_tools.codemods.params import AddToWith
from leangrpo_tools.codemods.shape import captures
from leangrpo_tools.codemods.source import Source


def find(source: Source, params: AddToWith) -> Found:
    """The ``with`` statements around that call in that function."""
    found = Found(f"`with {params.beside}:` around {params.call}(...) in {params.function}")
    beside = source.expression(params.beside)

    def rewrite(node: cst.CSTNode) -> cst.CSTNode:
        statement = cast(cst.With, node)
        items = list(statement.items)
        items[-1] = items[-1].with_changes(comma=cst.Comma(whitespace_after=cst.SimpleWhitespace(" ")))
        return statement.with_changes(items=[*items, cst.WithItem(source.expression(params.context))])

    seen: set[int] = set()
    for call in source.calls(params.call, params.function):
        for node in source.above(call):
            if isinstance(node, cst.With) and any(captures(beside, item.item) is not None for item in node.items):
                if id(node) not in seen:
                    seen.add(id(node))
                    found.matches.append(Match(node, source.line(node), rewrite))
                break
    found.candidates = call_candidates(source, params.function, params.call)
    return found
