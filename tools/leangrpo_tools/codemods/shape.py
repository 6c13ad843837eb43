"""Compare syntax trees by shape, with placeholders."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import libcst as cst

from leangrpo_tools.codemods.source import Source

_IGNORED = {"lpar", "rpar", "comma", "semicolon", "equal", "leading_lines", "trailing_whitespace", "header", "footer"}


def placeholder(node: object) -> str | None:
    """The name of a placeholder ``__name__``, else None."""
    if isinstance(node, cst.Name) and len(node.value) > 4 and node.value.startswith("__") and node.value.endswith("__"):
        return node.value
    return None


def captures(pattern: cst.CSTNode, node: cst.CSTNode) -> dict[str, cst.CSTNode] | None:
    """What each placeholder of ``pattern`` stands for in ``node``, or None if the shapes differ."""
    held: dict[str, cst.CSTNode] = {}
    return held if _same(pattern, node, held) else None


def _same(pattern: Any, node: Any, held: dict[str, cst.CSTNode]) -> bool:
    name = placeholder(pattern)
    if name and isinstance(node, cst.BaseExpression):
        known = held.setdefault(name, node)
        return known is node or _same(known, node, {})
    if isinstance(pattern, cst.CSTNode):
        if type(pattern) is not type(node):
            return False
        fields = [item for item in pattern.__dataclass_fields__ if item not in _IGNORED and "whitespace" not in item]
        return all(_same(getattr(pattern, item), getattr(node, item), held) for item in fields)
    if isinstance(pattern, (list, tuple)):
        if not isinstance(node, (list, tuple)) or len(pattern) != len(node):
            return False
        return all(_same(one, other, held) for one, other in zip(pattern, node, strict=True))
    return pattern == node


def assigns(source: Source, node: cst.AssignTarget | cst.AnnAssign, target: str) -> bool:
    """Whether an assignment is to that target, by shape: a name, an attribute, an item."""
    return captures(source.expression(target), node.target) is not None


def substitute(node: cst.CSTNode, held: dict[str, cst.CSTNode]) -> cst.CSTNode:
    """``node`` with its placeholders filled in."""

    class Fill(cst.CSTTransformer):
        def leave_Name(self, original_node: cst.Name, updated_node: cst.Name) -> cst.BaseExpression:
            found = held.get(placeholder(original_node) or "")
            return found.deep_clone() if isinstance(found, cst.BaseExpression) else updated_node

    result = node.visit(Fill())
    assert isinstance(result, cst.CSTNode)
    return result


def comments(node: cst.CSTNode) -> Sequence[cst.Comment]:
    """The comments inside a node, in the order of the text."""
    found: list[cst.Comment] = []

    class Collect(cst.CSTVisitor):
        def visit_Comment(self, node: cst.Comment) -> None:
            found.append(node)

    node.visit(Collect())
    return found
