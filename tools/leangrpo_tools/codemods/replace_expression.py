"""Replace an expression, found by its shape.

Before::

    def train(rows, steps):
        order = torch.stack(
            [torch.randperm(len(steps)) for _ in range(rows)]
        ).to(device)

After, with ``pattern: torch.stack([torch.randperm(__n__) for _ in range(__b__)])`` and ``replacement:
lean.step_order(__b__, __n__)``::

    def train(rows, steps):
        order = lean.step_order(rows, len(steps)).to(device)

A name with two underscores on both sides stands for any expression (the same one wherever it comes again) and may be
used in the replacement. Space, line breaks and brackets do not count. Comments inside the replaced text move above
the statement.
"""

from __future__ import annotations

from typing import cast

import libcst as cst

from leangrpo_tools.codemods.base import Found, Match, call_candidates, function_candidates
from leangrpo_tools.codemods.params import ReplaceExpression
from leangrpo_tools.codemods.shape import captures, comments, substitute
from leangrpo_tools.codemods.source import Source, dotted


def find(source: Source, params: ReplaceExpression) -> Found:
    """The expressions of that shape in that function."""
    found = Found(f"`{params.pattern}` in {params.function}")
    pattern = source.expression(params.pattern)
    replacement = source.expression(params.replacement)
    for function in source.functions(params.function):
        for node in source.nodes(function):
            if not isinstance(node, type(pattern)):
                continue
            held = captures(pattern, node)
            if held is None:
                continue
            _add(source, found, node, substitute(replacement, held))
    last = dotted(pattern.func) if isinstance(pattern, cst.Call) else None
    if last:
        found.candidates = call_candidates(source, params.function, last)
    else:
        found.candidates = function_candidates(source, params.function)
    return found


def _add(source: Source, found: Found, node: cst.CSTNode, new: cst.CSTNode) -> None:
    def rewrite(_: cst.CSTNode) -> cst.CSTNode:
        old = cast(cst.BaseExpression, node)
        return new.with_changes(lpar=old.lpar, rpar=old.rpar)

    found.matches.append(Match(node, source.line(node), rewrite))
    lost = comments(node)
    statement = source.statement(node)
    if lost and isinstance(statement, cst.SimpleStatementLine):

        def keep(line: cst.CSTNode) -> cst.CSTNode:
            simple = cast(cst.SimpleStatementLine, line)
            return simple.with_changes(leading_lines=[*simple.leading_lines, *(cst.EmptyLine(comment=c) for c in lost)])

        found.companions.append(Match(statement, source.line(node), keep))
