"""A Python file as codemods see it: the syntax tree, who encloses whom, and line numbers."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import libcst as cst
from libcst._nodes.internal import CodegenState

_SPACE = (
    cst.BaseParenthesizableWhitespace,
    cst.TrailingWhitespace,
    cst.EmptyLine,
    cst.Comment,
    cst.Newline,
    cst.Comma,
)
_TARGETS = (cst.AssignTarget, cst.AnnAssign, cst.AugAssign, cst.For, cst.CompFor, cst.NamedExpr)
_BINDERS = (*_TARGETS, cst.AsName, cst.Param, cst.FunctionDef, cst.ClassDef, cst.ImportAlias)


def dotted(node: cst.CSTNode) -> str | None:
    """``a.b.c`` for names and attributes of names, else None."""
    if isinstance(node, cst.Name):
        return node.value
    if isinstance(node, cst.Attribute):
        base = dotted(node.value)
        return f"{base}.{node.attr.value}" if base else None
    return None


@dataclass
class Source:
    """One parsed file. Nodes are compared by identity; the tree is never changed in place."""

    module: cst.Module
    _parent: dict[int, cst.CSTNode] = field(default_factory=dict)
    _nodes: list[cst.CSTNode] = field(default_factory=list)
    _span: dict[int, tuple[int, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._walk()
        # Nodes are listed outer before inner, so what is inside a node is the stretch that follows it.
        size = dict.fromkeys(map(id, self._nodes), 1)
        for node in reversed(self._nodes[1:]):
            size[id(self._parent[id(node)])] += size[id(node)]
        self._span = {id(node): (place, place + size[id(node)]) for place, node in enumerate(self._nodes)}

    def _walk(self) -> None:
        stack: list[cst.CSTNode] = [self.module]
        while stack:
            node = stack.pop()
            self._nodes.append(node)
            inner: list[cst.CSTNode] = []
            for name in node.__dataclass_fields__:
                value = getattr(node, name)
                if isinstance(value, cst.CSTNode):
                    inner.append(value)
                elif isinstance(value, (list, tuple)):
                    inner.extend(item for item in value if isinstance(item, cst.CSTNode))
            inner = [item for item in inner if not isinstance(item, _SPACE)]
            for item in inner:
                self._parent[id(item)] = node
            stack.extend(reversed(inner))

    @cached_property
    def _printed(self) -> tuple[str, dict[int, int]]:
        """The text of the tree, and for each node the line on which its text begins.

        libcst's own position metadata costs five times as much; which line something is on is all we need.
        """
        state = _Printer(default_indent=self.module.default_indent, default_newline=self.module.default_newline)
        self.module._codegen(state)
        line, lines = 1, []
        for token in state.tokens:
            lines.append(line)
            line += _newlines(token)
        lines.append(line)
        return "".join(state.tokens), {key: lines[place] for key, place in state.starts.items()}

    @property
    def text(self) -> str:
        """The text of the tree, printed again."""
        return self._printed[0]

    def shown(self, line: int) -> str:
        """The words on a line, for a message."""
        lines = re.split("\r\n|\r|\n", self.text)
        return lines[line - 1].strip() if 0 < line <= len(lines) else ""

    def line(self, node: cst.CSTNode) -> int:
        """The line, from 1, on which a node of this tree starts: its first line of code, not of comments."""
        first: cst.CSTNode = node
        if isinstance(node, (cst.FunctionDef, cst.ClassDef)):
            first = node.name
        elif isinstance(node, cst.SimpleStatementLine):
            first = node.body[0]
        skipped = len(getattr(first, "leading_lines", ()))
        return self._printed[1].get(id(first), 0) + skipped

    def parent(self, node: cst.CSTNode) -> cst.CSTNode | None:
        """The node that directly holds ``node``."""
        return self._parent.get(id(node))

    def above(self, node: cst.CSTNode) -> Iterator[cst.CSTNode]:
        """The nodes around ``node``, from the inside out."""
        current = self.parent(node)
        while current is not None:
            yield current
            current = self.parent(current)

    def nodes(self, root: cst.CSTNode | None = None) -> Iterator[cst.CSTNode]:
        """All nodes in the order of the text, or those inside ``root``."""
        start, end = self._span[id(root or self.module)]
        yield from self._nodes[start:end]

    def path(self, function: cst.FunctionDef) -> str:
        """The qualified name, classes and outer functions included."""
        outer = [item.name.value for item in self.above(function) if isinstance(item, (cst.FunctionDef, cst.ClassDef))]
        return ".".join([*reversed(outer), function.name.value])

    @cached_property
    def _functions(self) -> list[cst.FunctionDef]:
        return [node for node in self._nodes if isinstance(node, cst.FunctionDef)]

    @cached_property
    def _calls(self) -> list[cst.Call]:
        return [node for node in self._nodes if isinstance(node, cst.Call)]

    @cached_property
    def _binders(self) -> list[cst.CSTNode]:
        return [node for node in self._nodes if isinstance(node, _BINDERS)]

    def functions(self, name: str | None = None) -> list[cst.FunctionDef]:
        """All functions, or those whose qualified name is ``name`` or ends in ``.name``."""
        found = self._functions
        if name is None:
            return found
        return [item for item in found if f".{self.path(item)}".endswith(f".{name}")]

    def calls(self, callee: str, function: str | None = None) -> list[cst.Call]:
        """Calls of ``callee`` (dotted text), everywhere or inside the functions of that name."""
        found = [call for call in self._calls if dotted(call.func) == callee]
        if function is None:
            return found
        around = {id(item) for item in self.functions(function)}
        return [call for call in found if any(id(item) in around for item in self.above(call))]

    def handed_on(self, callee: str, function: str) -> list[cst.Call]:
        """Calls inside those functions that make the call of ``a.b`` for it: ``other.b(a)``."""
        owner, _, method = callee.rpartition(".")
        around = {id(item) for item in self.functions(function)}
        return [
            call
            for call in self._calls
            if (dotted(call.func) or "").endswith(f".{method}")
            and call.args
            and dotted(call.args[0].value) == owner
            and any(id(item) in around for item in self.above(call))
        ]

    def inside(self, node: cst.CSTNode) -> str:
        """The function a node is in, in words."""
        for item in self.above(node):
            if isinstance(item, cst.FunctionDef):
                return f"in {self.path(item)}"
        return "outside any function"

    def statement(self, node: cst.CSTNode) -> cst.BaseStatement | None:
        """The innermost whole statement (a line or a compound statement) that holds ``node``.

        None for what shares its line with the ``if`` or ``for`` above it: nothing can be put before that.
        """
        for item in (node, *self.above(node)):
            if isinstance(item, cst.SimpleStatementSuite):
                return None
            if isinstance(item, cst.BaseStatement):
                return item
        return None

    def binds(self, name: str, root: cst.CSTNode | None = None) -> list[cst.CSTNode]:
        """Where ``name`` is assigned, imported, defined or taken as a parameter."""
        found: list[cst.CSTNode] = []
        start, end = self._span[id(root or self.module)]
        for node in self._binders:
            if not start <= self._span[id(node)][0] < end:
                continue
            if isinstance(node, _TARGETS):
                targets = node.target
            elif isinstance(node, (cst.AsName, cst.Param, cst.FunctionDef, cst.ClassDef)):
                targets = node.name
            elif isinstance(node, cst.ImportAlias) and node.asname is None:
                targets = node.name
                while isinstance(targets, cst.Attribute) and isinstance(self.parent(node), cst.Import):
                    targets = targets.value
            else:
                continue
            if any(isinstance(item, cst.Name) and item.value == name for item in _names(targets)):
                found.append(node)
        return found

    def fragment(self, text: str) -> str:
        """A recipe's text with this file's newline and indentation instead of ``\\n`` and four spaces."""
        lines = []
        for line in text.strip("\n").split("\n"):
            body = line.lstrip(" ")
            depth, rest = divmod(len(line) - len(body), 4)
            lines.append(self.module.default_indent * depth + " " * rest + body)
        return self.module.default_newline.join(lines)

    def expression(self, text: str) -> cst.BaseExpression:
        """Parse a recipe's expression in this file's style."""
        return cst.parse_expression(self.fragment(text), config=self.module.config_for_parsing)

    def new_statement(self, text: str) -> cst.BaseStatement:
        """Parse a recipe's statement in this file's style."""
        return cst.parse_statement(self.fragment(text), config=self.module.config_for_parsing)


class _Printer(CodegenState):
    """Prints a tree and notes at which token each node began."""

    def __init__(self, **style: Any) -> None:
        super().__init__(**style)
        self.starts: dict[int, int] = {}

    def before_codegen(self, node: cst.CSTNode) -> None:
        self.starts[id(node)] = len(self.tokens)


def _newlines(token: str) -> int:
    """Line ends in a token: a string literal or a line break may hold several."""
    return token.count("\n") + token.count("\r") - token.count("\r\n")


def _names(target: cst.CSTNode) -> Iterator[cst.CSTNode]:
    if isinstance(target, (cst.Tuple, cst.List)):
        for element in target.elements:
            yield from _names(element.value)
    elif isinstance(target, cst.StarredElement):
        yield from _names(target.value)
    else:
        yield target
