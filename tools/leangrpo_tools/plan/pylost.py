"""What statements that are not understood may have changed: exactly that becomes unknown."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from leangrpo_tools.plan.pylibrary import HARMLESS, Library
from leangrpo_tools.plan.pynames import Frame, Leave, Method, Return, is_path
from leangrpo_tools.plan.pyvalues import Entries, Unknown

_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)


class Losses:
    """The part of the evaluator that forgets."""

    def __init__(self) -> None:
        self._spoilt: dict[int, tuple[object, Unknown]] = {}

    def _value(self, node: ast.expr, frame: Frame) -> object:
        raise NotImplementedError

    def _spoil(self, node: ast.stmt, frame: Frame, why: Unknown) -> None:
        """Make unknown what this statement could change, not knowing whether or how often its parts run."""
        inner = list(ast.walk(node))
        for item in inner:
            if isinstance(item, ast.Name) and isinstance(item.ctx, (ast.Store, ast.Del)):
                frame.names[item.id] = why
            elif isinstance(item, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                frame.names[item.name] = why
            elif isinstance(item, ast.alias):
                frame.names[item.asname or item.name.partition(".")[0]] = why
            elif isinstance(item, (ast.Global, ast.Nonlocal)):
                frame.module.names.update(dict.fromkeys(item.names, why))
                self._lose_outer(frame, item.names, why)
        for item in inner:
            if isinstance(item, (ast.Attribute, ast.Subscript)) and isinstance(item.ctx, (ast.Store, ast.Del)):
                self._spoil_part(item, frame, why)
        self._spoil_calls(node, frame, why)
        own = list(_own(node))
        if any(isinstance(item, ast.Return) for item in own):
            raise Return(why)
        if not isinstance(node, (ast.For, ast.While)) and any(isinstance(x, (ast.Break, ast.Continue)) for x in own):
            raise Leave("break", why)

    def _lose_outer(self, frame: Frame, names: list[str], why: Unknown) -> None:
        outer = frame.outer
        while outer is not None:
            outer.names.update({name: why for name in names if name in outer.names})
            outer = outer.outer

    def _spoil_part(self, item: ast.Attribute | ast.Subscript, frame: Frame, why: Unknown) -> None:
        owner = self._value(item.value, frame) if is_path(item.value) else why
        if isinstance(owner, Entries) and isinstance(item, ast.Attribute):
            owner.values[item.attr] = why
        elif isinstance(owner, Unknown):
            self._lose_all(frame, why)
        else:
            self._lose(owner, why)

    def _spoil_calls(self, node: ast.AST, frame: Frame, why: Unknown) -> None:
        """The calls within a statement or expression that is not worked out."""
        for item in ast.walk(node):
            if isinstance(item, ast.Call):
                self._spoil_call(item, frame, why)
            elif isinstance(item, ast.NamedExpr):
                frame.names[item.target.id] = why

    def _spoil_call(self, call: ast.Call, frame: Frame, why: Unknown) -> None:
        callee = self._value(call.func, frame) if is_path(call.func) else why
        if isinstance(callee, Library) and callee.name in HARMLESS:
            return
        if isinstance(callee, Method):
            self._lose(callee.owner, why)
        elif not isinstance(callee, Library):
            self._lose_all(frame, why)
        for argument in [*call.args, *(word.value for word in call.keywords)]:
            for item in ast.walk(argument):
                if isinstance(item, ast.Name) and isinstance(item.ctx, ast.Load):
                    self._lose(self._value(item, frame), why)

    def _lose(self, value: object, why: Unknown) -> None:
        """Forget the content of something that can be changed in place."""
        if isinstance(value, Entries):
            value.lose(why)
        elif isinstance(value, (list, dict)):
            if id(value) in self._spoilt:
                return
            self._spoilt[id(value)] = (value, why)
            for item in list(value.values()) if isinstance(value, dict) else list(value):
                self._lose(item, why)
        elif isinstance(value, tuple):
            for item in value:
                self._lose(item, why)

    def _lose_all(self, frame: Frame | None, why: Unknown) -> None:
        """Forget the content of everything that a function called here could reach."""
        while frame is not None:
            for value in [*frame.names.values(), *frame.module.names.values()]:
                self._lose(value, why)
            frame = frame.outer


def _own(node: ast.AST) -> Iterator[ast.AST]:
    """Nodes that act on the function, and the loop, that `node` stands in: not those of functions and loops in it."""
    yield node
    for name, content in ast.iter_fields(node):
        for item in content if isinstance(content, list) else [content]:
            if not isinstance(item, ast.AST) or isinstance(item, _SCOPES):
                continue
            inner_loop = isinstance(node, (ast.For, ast.While)) and name == "body"
            yield from (x for x in _own(item) if not (inner_loop and isinstance(x, (ast.Break, ast.Continue))))
