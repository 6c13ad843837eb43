"""The syntax tree of a bash text, by tree-sitter, with a bound on the work."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from leangrpo_tools.errors import KitError

if TYPE_CHECKING:
    from tree_sitter import Node

_MOST = 100_000
_LEAVES = ("command", "variable_assignment", "variable_assignments", "declaration_command", "unset_command")


class TooLong(Exception):
    """The file takes too much work."""


class Work:
    """Steps that may still be taken; counted, not timed, so that a result does not depend on the machine."""

    def __init__(self) -> None:
        self.left = _MOST

    def spend(self, steps: int) -> None:
        """Take steps. Raises TooLong."""
        self.left -= steps
        if self.left < 0:
            raise TooLong


def parse(source: bytes, work: Work) -> tuple[Node, bytes]:
    """The root, and the text that was parsed. Raises TooLong, LG501 without the parser.

    The parser takes a line of several assignments as the beginning of the next line's command: there, a semicolon is
    written after each of them.
    """
    try:
        from tree_sitter import Language, Parser
        from tree_sitter_bash import language
    except ImportError as err:
        fix = "pip install tree-sitter tree-sitter-bash"
        raise KitError("LG501", "launch files cannot be read here", cause=str(err), fix=fix) from err

    def late(*_: object) -> bool:
        work.left -= 1
        return work.left < 0

    while True:
        text = source
        try:
            root = Parser(Language(language())).parse(
                lambda at, _, text=text: text[at : at + 65536], progress_callback=late
            ).root_node  # fmt: skip
        except ValueError as err:
            raise TooLong from err
        ends = list(_line_ends(root, source))
        if not ends:
            return root, source
        work.spend(len(ends))
        for end in reversed(ends):
            source = source[:end] + b";" + source[end:]


def _line_ends(node: Node, source: bytes) -> Iterator[int]:
    """Where an assignment is the last one of a line, and the parser reads on."""
    for left, right in itertools.pairwise([child for child in node.children if child.type != "comment"]):
        gap = source[left.end_byte : right.start_byte]
        line_end = not gap.startswith(b";") and re.search(rb"(?<!\\)(\\\\)*\n", gap)
        if node.type in ("command", "variable_assignments") and left.type == "variable_assignment" and line_end:
            yield left.end_byte
    for child in node.children:
        yield from _line_ends(child, source)


def first_error(root: Node) -> int | None:
    """The row of the first statement that was not understood."""
    if root.type != "ERROR":
        return next((child.start_point[0] for child in root.children if _broken(child)), None)
    node: Node | None = root
    row = 0
    while node is not None:
        row = node.start_point[0]
        node = next((child for child in node.children if child.has_error or child.is_missing), None)
    return row


def _broken(node: Node) -> bool:
    return node.type == "ERROR" or node.is_missing


def understood(node: Node, source: bytes) -> bool:
    """Whether the parser took in the whole statement, inner ones aside."""
    if node.has_error and (node.type in _LEAVES or any(map(_broken, node.children))):
        return False
    pairs = list(itertools.pairwise(node.children))
    touching = [left.type for left, right in pairs if left.end_byte == right.start_byte]
    if node.type == "command" and "variable_assignment" in touching:
        return False
    gaps = [(left.end_byte, right.start_byte) for left, right in pairs]
    gaps += [(node.children[-1].end_byte, node.end_byte)] if node.children else []
    return not any(re.sub(rb"[ \t\n]|\\\n", b"", source[start:end]) for start, end in gaps)
