"""Put the statement that makes a call into a ``with`` block.

Before::

    def train(prompts):
        # one rollout
        rewards, latents = sample(prompts)

After, with ``function: train``, ``call: sample``, ``context: lean.rollout(rows=len(prompts))``::

    def train(prompts):
        # one rollout
        with lean.rollout(rows=len(prompts)):
            rewards, latents = sample(prompts)

Comments above the statement stay where they are. A statement that shares its line with an ``if`` or another statement
does not match.
"""

from __future__ import annotations

from typing import cast

import libcst as cst

from leangrpo_tools.codemods.base import Found, Match, call_candidates
from leangrpo_tools.codemods.params import WrapInWith
from leangrpo_tools.codemods.source import Source


def find(source: Source, params: WrapInWith) -> Found:
    """The statements in that function that make that call."""
    found = Found(f"a statement that calls {params.call}(...) in {params.function}")

    def rewrite(node: cst.CSTNode) -> cst.CSTNode:
        line = cast(cst.SimpleStatementLine, node)
        return cst.With(
            items=[cst.WithItem(source.expression(params.context))],
            body=cst.IndentedBlock([line.with_changes(leading_lines=[])]),
            leading_lines=line.leading_lines,
        )

    seen: set[int] = set()
    for call in source.calls(params.call, params.function):
        line = source.statement(call)
        if isinstance(line, cst.SimpleStatementLine) and len(line.body) == 1 and id(line) not in seen:
            seen.add(id(line))
            found.matches.append(Match(line, source.line(line), rewrite))
    found.candidates = call_candidates(source, params.function, params.call)
    return found
