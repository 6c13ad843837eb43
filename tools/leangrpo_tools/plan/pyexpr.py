"""Expressions and calls of a config, worked out over plain values."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from pathlib import Path

from leangrpo_tools.plan import pylibrary
from leangrpo_tools.plan.pylibrary import BUILTINS, HARMLESS, File, Library
from leangrpo_tools.plan.pylost import Losses
from leangrpo_tools.plan.pynames import Frame, Function, Method, Module, Return, first_unknown, unreadable
from leangrpo_tools.plan.pyvalues import (
    Entries,
    Refused,
    Unknown,
    binary,
    compare,
    formatted,
    holds_unknown,
    is_plain,
    merge_all,
    method,
    unary,
)

STEPS = 200_000
"""Statements and expressions after which a config is taken not to end."""
_DEPTH = 40


class Expressions(Losses):
    """The part of the evaluator that works out values. `root` as in Evaluator."""

    def __init__(self, root: Path) -> None:
        super().__init__()
        self.root = root.resolve()
        self._steps = 0
        self._depth = 0
        self.last_names: dict[str, dict[str, object]] = {}
        """Names of each function when it was last left."""

    def load(self, path: Path) -> Module:
        """Walk a file."""
        raise NotImplementedError

    def _block(self, body: list[ast.stmt], frame: Frame) -> None:
        raise NotImplementedError

    def _count(self, node: ast.AST, frame: Frame) -> None:
        self._steps += 1
        if self._steps > STEPS:
            line = getattr(node, "lineno", 1)
            raise unreadable(f"{frame.module.path}:{line}: the config does not end within {STEPS} steps")

    def _inside(self, path: Path) -> bool:
        return path.resolve().is_relative_to(self.root)

    def _truth(self, node: ast.expr, frame: Frame) -> bool | Unknown:
        return self._truth_of(self._value(node, frame), node, frame)

    def _truth_of(self, value: object, node: ast.expr, frame: Frame) -> bool | Unknown:
        if isinstance(value, Unknown):
            return value
        if isinstance(value, Entries):
            return bool(value.values) if value.others is None else value.others
        return bool(value) if is_plain(value) else frame.unknown(node)

    def _value(self, node: ast.expr, frame: Frame) -> object:
        self._count(node, frame)
        try:
            value = self._worked_out(node, frame)
        except Refused:
            return frame.unknown(node)
        known = self._spoilt.get(id(value))
        return known[1] if known is not None and known[0] is value else value

    def _worked_out(self, node: ast.expr, frame: Frame) -> object:
        match node:
            case ast.Constant():
                return node.value
            case ast.Name():
                return self._name(node.id, frame)
            case ast.Attribute():
                return self._attribute(self._value(node.value, frame), node.attr)
            case ast.Call():
                return self._call(node, frame)
            case ast.Subscript():
                return self._item(node, frame)
            case ast.BinOp():
                left, right = self._value(node.left, frame), self._value(node.right, frame)
                return first_unknown(left, right) or binary(node.op, left, right)
            case ast.UnaryOp(op=ast.Not()):
                truth = self._truth(node.operand, frame)
                return truth if isinstance(truth, Unknown) else not truth
            case ast.UnaryOp():
                value = self._value(node.operand, frame)
                return value if isinstance(value, Unknown) else unary(node.op, value)
            case ast.BoolOp():
                return self._either(node, frame)
            case ast.Compare():
                return self._comparison(node, frame)
            case ast.IfExp():
                test = self._truth(node.test, frame)
                if not isinstance(test, Unknown):
                    return self._value(node.body if test else node.orelse, frame)
                for part in (node.body, node.orelse):
                    self._spoil_calls(part, frame, test)
                return test
            case ast.Tuple() | ast.List() if not any(isinstance(item, ast.Starred) for item in node.elts):
                items = [self._value(item, frame) for item in node.elts]
                return tuple(items) if isinstance(node, ast.Tuple) else items
            case ast.Dict() if all(key is not None for key in node.keys):
                return self._dict(node, frame)
            case ast.JoinedStr():
                return self._text(node, frame)
        self._spoil_calls(node, frame, frame.unknown(node))
        raise Refused

    def _name(self, name: str, frame: Frame) -> object:
        looked: Frame | None = frame
        while looked is not None:
            if name in looked.names:
                return looked.names[name]
            looked = looked.outer
        if name in frame.module.names:
            return frame.module.names[name]
        if name in BUILTINS:
            return Library(f"builtins.{name}")
        raise Refused

    def _attribute(self, owner: object, name: str) -> object:
        match owner:
            case Unknown():
                return owner
            case Entries() if name in owner.values:
                return owner.values[name]
            case Entries() if name in ("get", "update", "lock", "unlock", "unlocked", "keys"):
                return Method(owner, name)
            case Entries() if owner.others is not None:
                return owner.others
            case Module() if name in owner.names:
                return owner.names[name]
            case Library():
                return Library(f"{owner.name}.{name}")
            case File(spec=True) if name in ("loader", "exec_module", "load_module"):
                return Method(owner, name) if name != "loader" else owner
            case File(spec=False):
                return self._attribute(self._opened(owner), name)
            case str() | list() | tuple() | dict():
                return Method(owner, name)
        raise Refused

    def _item(self, node: ast.Subscript, frame: Frame) -> object:
        owner, key = self._value(node.value, frame), None
        if isinstance(node.slice, ast.Slice):
            parts = [
                self._value(part, frame) if part else None
                for part in (node.slice.lower, node.slice.upper, node.slice.step)
            ]
            unknown = first_unknown(owner, *parts)
            if unknown or not isinstance(owner, (str, list, tuple)):
                return unknown or frame.unknown(node)
            whole = [part for part in parts if part is None or isinstance(part, int)]
            if len(whole) < 3 or whole[2] == 0:
                raise Refused
            return owner[slice(*whole)]
        key = self._value(node.slice, frame)
        if unknown := first_unknown(owner, key):
            return unknown
        if isinstance(owner, Entries) and isinstance(key, str):
            return self._attribute(owner, key) if key in owner.values or owner.others else frame.unknown(node)
        if isinstance(owner, (str, list, tuple, dict)):
            try:
                return owner[key]  # type: ignore[index]
            except (LookupError, TypeError) as err:
                raise Refused from err
        raise Refused

    def _either(self, node: ast.BoolOp, frame: Frame) -> object:
        value: object = None
        for place, part in enumerate(node.values):
            value = self._value(part, frame)
            truth = self._truth_of(value, part, frame)
            if isinstance(truth, Unknown):
                for later in node.values[place + 1 :]:
                    self._spoil_calls(later, frame, truth)
                return truth
            if truth != isinstance(node.op, ast.And):
                break
        return value

    def _comparison(self, node: ast.Compare, frame: Frame) -> object:
        left = self._value(node.left, frame)
        for kind, other in zip(node.ops, node.comparators, strict=True):
            right = self._value(other, frame)
            if unknown := first_unknown(left, right):
                return unknown
            if isinstance(right, Entries):
                if right.others or not isinstance(kind, (ast.In, ast.NotIn)):
                    raise Refused
                right = list(right.values)
            if not compare(kind, left, right):
                return False
            left = right
        return True

    def _dict(self, node: ast.Dict, frame: Frame) -> object:
        made: dict[object, object] = {}
        for key, value in zip(node.keys, node.values, strict=True):
            name = self._value(key, frame) if key else None
            if not isinstance(name, (str, int, float, bool, type(None))):
                return name if isinstance(name, Unknown) else frame.unknown(node)
            made[name] = self._value(value, frame)
        return made

    def _text(self, node: ast.JoinedStr, frame: Frame) -> object:
        parts: list[str] = []
        for part in node.values:
            if isinstance(part, ast.FormattedValue):
                value = self._value(part.value, frame)
                spec = self._text(part.format_spec, frame) if isinstance(part.format_spec, ast.JoinedStr) else ""
                if unknown := first_unknown(value, spec):
                    return unknown
                parts.append(formatted(value, part.conversion, str(spec)))
            elif isinstance(part, ast.Constant):
                parts.append(str(part.value))
        return "".join(parts)

    def _call(self, node: ast.Call, frame: Frame) -> object:
        callee = self._value(node.func, frame)
        given = [self._value(item, frame) for item in node.args]
        named = {word.arg or "**": self._value(word.value, frame) for word in node.keywords}
        spread = "**" in named or any(isinstance(item, ast.Starred) for item in node.args)
        result: object = None
        try:
            if spread:
                raise Refused
            if isinstance(callee, Function):
                return self._enter(callee, given, named, node)
            if isinstance(callee, Method):
                return self._method(callee, given, named)
            if isinstance(callee, Library):
                if callee.name == "builtins.globals":
                    return frame.module.names
                if unknown := first_unknown(*given, *named.values()):
                    result = unknown
                    raise Refused
                made = pylibrary.call(callee.name, self.root, given, named)
                return made
        except Refused:
            pass
        if not (isinstance(callee, Library) and callee.name in HARMLESS):
            why = frame.unknown(node)
            for value in [*given, *named.values()]:
                self._lose(value, why)
            if isinstance(callee, Method):
                self._lose(callee.owner, why)
            elif not isinstance(callee, Library):
                self._lose_all(frame, why)
        return result or (callee if isinstance(callee, Unknown) else frame.unknown(node))

    def _opened(self, file: object) -> object:
        if not isinstance(file, File):
            raise Refused
        path = self.root / file.path
        if not self._inside(path) or not path.is_file():
            raise Refused
        return self.load(path)

    def _method(self, bound: Method, given: list[object], named: dict[str, object]) -> object:
        owner = bound.owner
        if isinstance(owner, File):
            # exec_module fills what module_from_spec made; that file is loaded when it is looked into
            return None if bound.name == "exec_module" else self._opened(owner)
        if isinstance(owner, Entries):
            return self._entries_method(owner, bound.name, given, named)
        compares = isinstance(owner, str) or bound.name in ("index", "count", "remove", "sort")
        if named or (compares and holds_unknown([owner, *given])):
            raise Refused
        called = method(owner, bound.name)
        try:
            done = called(*given)
        except (TypeError, ValueError, LookupError) as err:
            raise Refused from err
        return [*done] if bound.name in ("keys", "values", "items") and isinstance(done, Iterable) else done

    def _entries_method(self, owner: Entries, name: str, given: list[object], named: dict[str, object]) -> object:
        if name == "get" and given and isinstance(given[0], str):
            fallback = owner.others or (given[1] if len(given) > 1 else None)
            return owner.values.get(given[0], fallback)
        if name == "update" and all(isinstance(item, (dict, Entries)) for item in given):
            for item in [*given, named]:
                if isinstance(item, (dict, Entries)):
                    merge_all(owner, item)
            return None
        if name in ("lock", "unlock"):
            return owner
        raise Refused

    def _is_unlocking(self, node: ast.expr, frame: Frame) -> bool:
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute) or node.args:
            return False
        owner = self._value(node.func.value, frame)
        return isinstance(owner, Entries) and node.func.attr in ("unlocked", "ignore_type")

    def _enter(self, function: Function, given: list[object], named: dict[str, object], node: ast.AST) -> object:
        arguments = function.node.args
        places = [item.arg for item in (*arguments.posonlyargs, *arguments.args)]
        names = {*places, *(item.arg for item in arguments.kwonlyargs)}
        values = function.defaults | dict(zip(places, given, strict=False)) | named
        if len(given) > len(places) or set(values) != names or self._depth >= _DEPTH:
            raise Refused
        frame = Frame(function.home.module, dict(values), function.home)
        self._depth += 1
        try:
            self._block(function.node.body, frame)
            return None
        except Return as done:
            return done.value
        finally:
            self._depth -= 1
            self.last_names[function.node.name] = frame.names
