"""Single changes of a Python file, by the names in it: what an editing mistake in a patched script looks like."""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence

Edit = Callable[[ast.Module], int]
"""Changes a module in place; returns in how many places."""


def edited(source: str, edits: Sequence[Edit]) -> str:
    """The source with all edits made. LookupError if one of them finds nothing."""
    module = ast.parse(source)
    for number, edit in enumerate(edits):
        if not edit(module):
            raise LookupError(f"edit {number} finds nothing")
    return ast.unparse(ast.fix_missing_locations(module))


def _in(module: ast.Module, function: str) -> ast.AST:
    if not function:
        return module
    return next(node for node in ast.walk(module) if isinstance(node, ast.FunctionDef) and node.name == function)


def _expression(text: str, old: ast.expr | None = None) -> ast.expr:
    """An expression, in which `_` stands for the old one."""
    made = ast.parse(text, mode="eval").body
    if old is None:
        return made

    class Fill(ast.NodeTransformer):
        def visit_Name(self, node: ast.Name) -> ast.expr:
            return old if node.id == "_" else node  # type: ignore[return-value]

    return Fill().visit(made)


def _calls(node: ast.AST, name: str) -> list[ast.Call]:
    return [found for found in ast.walk(node) if isinstance(found, ast.Call) and ast.unparse(found.func) == name]


def keyword(call: str, name: str, value: str, function: str = "") -> Edit:
    """Another value of a keyword argument."""

    def edit(module: ast.Module) -> int:
        found = [word for at in _calls(_in(module, function), call) for word in at.keywords if word.arg == name]
        for word in found:
            word.value = _expression(value, word.value)
        return len(found)

    return edit


def argument(call: str, place: int, value: str, function: str = "") -> Edit:
    """Another value of a positional argument."""

    def edit(module: ast.Module) -> int:
        found = [at for at in _calls(_in(module, function), call) if len(at.args) > place]
        for at in found:
            at.args[place] = _expression(value, at.args[place])
        return len(found)

    return edit


def value(call: str, text: str, function: str = "") -> Edit:
    """Another value in place of a call's, of which `_` stands for the call."""

    def edit(module: ast.Module) -> int:
        done = 0

        class Replace(ast.NodeTransformer):
            def visit_Call(self, node: ast.Call) -> ast.expr:
                nonlocal done
                self.generic_visit(node)
                if ast.unparse(node.func) != call:
                    return node
                done += 1
                return _expression(text, node)

        Replace().visit(_in(module, function))
        return done

    return edit


def assigned(target: str, text: str, function: str = "") -> Edit:
    """Another value of an assignment."""

    def edit(module: ast.Module) -> int:
        found = [
            node
            for node in ast.walk(_in(module, function))
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == target
        ]
        for node in found:
            node.value = _expression(text, node.value)
        return len(found)

    return edit


def name(old: str, new: str, function: str = "") -> Edit:
    """Another dotted name."""

    def edit(module: ast.Module) -> int:
        done = 0

        class Replace(ast.NodeTransformer):
            def generic_visit(self, node: ast.AST) -> ast.AST:
                nonlocal done
                super().generic_visit(node)
                if isinstance(node, (ast.Attribute, ast.Name)) and ast.unparse(node) == old:
                    done += 1
                    return _expression(new)
                return node

        Replace().visit(_in(module, function))
        return done

    return edit


def condition(test: str, text: str, function: str = "") -> Edit:
    """Another test of an `if`."""

    def edit(module: ast.Module) -> int:
        found = [
            node
            for node in ast.walk(_in(module, function))
            if isinstance(node, ast.If) and ast.unparse(node.test) == test
        ]
        for node in found:
            node.test = _expression(text, node.test)
        return len(found)

    return edit


def _statements(call: str, change: Callable[[ast.stmt], list[ast.stmt]], function: str) -> Edit:
    def edit(module: ast.Module) -> int:
        done = 0
        for node in ast.walk(_in(module, function)):
            for field in ("body", "orelse"):
                block = getattr(node, field, None)
                if not isinstance(block, list) or not block:
                    continue
                made: list[ast.stmt] = []
                for line in block:
                    simple = isinstance(line, (ast.Expr, ast.Assign, ast.AugAssign, ast.Return))
                    hit = simple and bool(_calls(line, call))
                    done += hit
                    made += change(line) if hit else [line]
                block[:] = made or [ast.Pass()]
        return done

    return edit


def drop(call: str, function: str = "") -> Edit:
    """Without the statements that call this."""
    return _statements(call, lambda line: [], function)


def twice(call: str, function: str = "") -> Edit:
    """With those statements twice."""
    return _statements(call, lambda line: [line, line], function)


def after(call: str, text: str, function: str = "") -> Edit:
    """With another statement behind those."""
    return _statements(call, lambda line: [line, *ast.parse(text).body], function)


def before(call: str, text: str, function: str = "") -> Edit:
    """With another statement in front of those."""
    return _statements(call, lambda line: [*ast.parse(text).body, line], function)


def begins(function: str, text: str) -> Edit:
    """With another statement first in a function."""

    def edit(module: ast.Module) -> int:
        _in(module, function).body[:0] = ast.parse(text).body  # type: ignore[attr-defined]
        return 1

    return edit
