"""What a codemod returns: the places it would change, and where it looked when it found too few."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field

import libcst as cst

from leangrpo_tools.codemods.source import Source


@dataclass
class Match:
    """One place: the node that is rewritten, how, and what goes before it.

    ``rewrite`` gets the node with all inner edits made. ``before`` are statements put in front of it; only statements
    of a block can have them, and ``after`` likewise.
    """

    node: cst.CSTNode
    line: int
    rewrite: Callable[[cst.CSTNode], cst.CSTNode] = lambda node: node
    before: list[cst.BaseStatement] = field(default_factory=list)
    after: list[cst.BaseStatement] = field(default_factory=list)


@dataclass
class Found:
    """All matches of one edit, and near misses as (line, words) for the message when their number is wrong."""

    anchor: str
    matches: list[Match] = field(default_factory=list)
    candidates: list[tuple[int, str]] = field(default_factory=list)
    companions: list[Match] = field(default_factory=list)
    """Changes that go with the matches without being counted."""

    def keep(self, lines: Collection[int]) -> None:
        """Leave only what is on these lines."""
        self.matches = [match for match in self.matches if match.line in lines]
        self.companions = [match for match in self.companions if match.line in lines]


class NameTaken(Exception):
    """The name that an edit would introduce already means something in the file."""

    def __init__(self, name: str, lines: list[int]) -> None:
        super().__init__(name)
        self.name = name
        self.lines = lines


def refuse_taken(source: Source, name: str, root: cst.CSTNode | None = None) -> None:
    """Raise :class:`NameTaken` if ``name`` is bound in the file, or inside ``root``."""
    bound = source.binds(name, root)
    if bound:
        raise NameTaken(name, sorted({source.line(node) for node in bound}))


def function_candidates(source: Source, name: str) -> list[tuple[int, str]]:
    """For a function that is missing or doubled: those of that name, else all of them."""
    found = source.functions(name) or source.functions()
    return [(source.line(item), f"def {source.path(item)}") for item in found]


def call_candidates(source: Source, function: str, callee: str) -> list[tuple[int, str]]:
    """Calls of ``callee`` anywhere, or of something with the same last name; the functions if there are none."""
    last = callee.rsplit(".", 1)[-1]
    found = source.calls(callee)
    if not found:
        ends = (node for node in source.nodes() if isinstance(node, cst.Call))
        found = [node for node in ends if _last(node.func) == last]
    listed = [
        (source.line(call), f"{cst.Module([]).code_for_node(call.func)}( {source.inside(call)}") for call in found
    ]
    if not source.functions(function):
        listed += function_candidates(source, function)
    return listed


def _last(node: cst.BaseExpression) -> str | None:
    if isinstance(node, cst.Name):
        return node.value
    return node.attr.value if isinstance(node, cst.Attribute) else None
