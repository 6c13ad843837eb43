"""Works out what a Python config assigns, from its text: nothing is imported or executed.

It walks the statements of a function as Python would, over plain values (`pyvalues`). What it does not understand
leaves what that could have changed unknown, with file and line, and it goes on: most entries of a config do not matter
to a plan. An assertion that is known to fail ends it, as it ends upstream.
"""

from __future__ import annotations

import ast
from pathlib import Path

from leangrpo_tools.plan.pyexpr import STEPS, Expressions
from leangrpo_tools.plan.pylibrary import Library
from leangrpo_tools.plan.pynames import Frame, Function, Leave, Module, Return, short, stops, unreadable
from leangrpo_tools.plan.pyvalues import Entries, Unknown, is_plain
from leangrpo_tools.reading import MIB, read_regular


class Evaluator(Expressions):
    """Walks the files of one tree.

    Args:
        root: the tree; files outside it are not read. Also the folder in which upstream's command is run.
    """

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self._modules: dict[Path, Module] = {}

    def load(self, path: Path) -> Module:
        """Walk a file. Raises LG508 where it cannot be read or is no Python."""
        path = path.resolve()
        if path in self._modules:
            return self._modules[path]
        try:
            tree = ast.parse(read_regular(path, MIB).decode("utf-8-sig"))
        except OSError as err:
            raise unreadable(f"{path}: {err.strerror or err}") from err
        except SyntaxError as err:
            raise unreadable(f"{path}:{err.lineno or 1}: {err.msg}") from err
        except (ValueError, RecursionError, MemoryError) as err:
            raise unreadable(f"{path}: it is no Python text: {type(err).__name__}") from err
        module = self._modules[path] = Module(path, {"__file__": str(path), "__name__": "config"})
        try:
            self._block(tree.body, Frame(module, module.names))
        except RecursionError as err:
            raise unreadable(f"{path}: expressions in it are nested too deeply") from err
        return module

    def call(self, module: Module, name: str, given: list[object]) -> object:
        """The value that a function of the module returns. Raises LG508 if there is none of this name."""
        function = module.names.get(name)
        if isinstance(function, Unknown):
            raise unreadable(f"{function.place}: what {name} is, is not known without running {function.why}")
        if not isinstance(function, Function):
            known = ", ".join(sorted(key for key, value in module.names.items() if isinstance(value, Function)))
            raise unreadable(f"{module.path}: there is no function {name}; it has {known or 'none'}")
        try:
            return self._enter(function, given, {}, function.node)
        except RecursionError as err:
            raise unreadable(f"{module.path}: calls in it are nested too deeply") from err

    def _block(self, body: list[ast.stmt], frame: Frame) -> None:
        for node in body:
            self._count(node, frame)
            self._statement(node, frame)

    def _statement(self, node: ast.stmt, frame: Frame) -> None:
        match node:
            case ast.Expr():
                self._value(node.value, frame)
            case ast.Assign():
                value = self._value(node.value, frame)
                known = is_plain(value) or isinstance(value, (Entries, Unknown))
                for target in node.targets:
                    kept = value if known or isinstance(target, ast.Name) else frame.unknown(node.value)
                    self._store(target, kept, frame)
            case ast.AnnAssign():
                if node.value is not None:
                    self._store(node.target, self._value(node.value, frame), frame)
            case ast.AugAssign():
                both = ast.BinOp(_loaded(node.target), node.op, node.value)
                made = self._value(ast.copy_location(both, node), frame)
                self._lose(self._value(both.left, frame), frame.unknown(node))  # a list is extended in place
                self._store(node.target, made, frame)
            case ast.FunctionDef():
                frame.names[node.name] = self._function(node, frame)
            case ast.Import() | ast.ImportFrom():
                self._import(node, frame)
            case ast.Return():
                raise Return(self._value(node.value, frame) if node.value else None)
            case ast.If():
                test = self._truth(node.test, frame)
                if isinstance(test, Unknown):
                    self._spoil(node, frame, test)
                else:
                    self._block(node.body if test else node.orelse, frame)
            case ast.While() | ast.For():
                self._loop(node, frame)
            case ast.Assert():
                if self._truth(node.test, frame) is False:
                    said = self._value(node.msg, frame) if node.msg else ""
                    raise stops(frame, node, f"`{short(node)}` does not hold", said)
            case ast.Raise():
                raise stops(frame, node, f"`{short(node)}` is reached", "")
            case ast.Break() | ast.Continue():
                raise Leave("break" if isinstance(node, ast.Break) else "continue")
            case ast.With() if all(self._is_unlocking(item.context_expr, frame) for item in node.items):
                self._block(node.body, frame)
            case ast.Try() if node.handlers and all(_catches_import(handler) for handler in node.handlers):
                self._block([*node.body, *node.orelse, *node.finalbody], frame)  # taken to be importable
            case ast.Pass():
                pass
            case _:
                self._spoil(node, frame, frame.unknown(node))

    def _loop(self, node: ast.While | ast.For, frame: Frame) -> None:
        if isinstance(node, ast.For):
            many = self._value(node.iter, frame)
            if not isinstance(many, (list, tuple, dict, range, str)):
                return self._spoil(node, frame, many if isinstance(many, Unknown) else frame.unknown(node))
            turns = iter(list(many) if len(many) <= STEPS else many)
        left = False
        while True:
            self._count(node, frame)
            if isinstance(node, ast.For):
                try:
                    self._store(node.target, next(turns), frame)
                except StopIteration:
                    break
            else:
                test = self._truth(node.test, frame)
                if isinstance(test, Unknown):
                    return self._spoil(node, frame, test)
                if not test:
                    break
            try:
                self._block(node.body, frame)
            except Leave as leave:
                if leave.unknown:
                    return self._spoil(node, frame, leave.unknown)
                left = leave.kind == "break"
                if left:
                    break
        if not left:
            self._block(node.orelse, frame)

    def _store(self, target: ast.expr, value: object, frame: Frame) -> None:
        match target:
            case ast.Name():
                frame.names[target.id] = value
            case ast.Attribute():
                owner = self._value(target.value, frame)
                if isinstance(owner, Entries):
                    owner.put(target.attr, value)
                elif isinstance(owner, Module):
                    owner.names[target.attr] = value
                elif isinstance(owner, Unknown):
                    self._lose_all(frame, owner)  # it may be any of those that are known
            case ast.Subscript():
                owner, key = self._value(target.value, frame), self._value(target.slice, frame)
                if isinstance(owner, Unknown):
                    self._lose_all(frame, owner)
                elif isinstance(owner, Entries) and isinstance(key, str):
                    owner.put(key, value)
                elif isinstance(owner, list) and isinstance(key, int) and -len(owner) <= key < len(owner):
                    owner[key] = value
                elif isinstance(owner, dict) and isinstance(key, (str, int, float, bool)):
                    owner |= {key: value}
                else:
                    self._lose(owner, frame.unknown(target))
            case ast.Tuple() | ast.List() if not any(isinstance(item, ast.Starred) for item in target.elts):
                parts = list(value) if isinstance(value, (list, tuple, str)) else []
                unknown = value if isinstance(value, Unknown) else frame.unknown(target)
                for place, item in enumerate(target.elts):
                    self._store(item, parts[place] if len(parts) == len(target.elts) else unknown, frame)
            case _:
                for item in ast.walk(target):
                    if isinstance(item, ast.Name):
                        frame.names[item.id] = frame.unknown(target)

    def _function(self, node: ast.FunctionDef, frame: Frame) -> object:
        plain = not (node.decorator_list or node.args.vararg or node.args.kwarg)
        if not plain or any(isinstance(item, (ast.Yield, ast.YieldFrom)) for item in ast.walk(node)):
            return frame.unknown(node)
        late = [*node.args.posonlyargs, *node.args.args][::-1][: len(node.args.defaults)][::-1]
        pairs = [
            *zip(late, node.args.defaults, strict=True),
            *zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True),
        ]
        return Function(node, frame, {arg.arg: self._value(value, frame) for arg, value in pairs if value is not None})

    def _import(self, node: ast.Import | ast.ImportFrom, frame: Frame) -> None:
        if isinstance(node, ast.Import):
            for item in node.names:
                own = self._own_module(item.name, frame) if item.asname or "." not in item.name else None
                first = item.name if item.asname else item.name.partition(".")[0]
                frame.names[item.asname or first] = own or Library(first)
            return
        for item in node.names:
            origin = node.module or ""
            value: object = Library(f"{origin}.{item.name}" if origin else item.name)
            module = self._own_module(origin, frame, node.level) if origin else None
            if item.name == "*":
                if module is not None:
                    frame.names.update(module.names)
                continue
            if module is not None:
                value = module.names.get(item.name, frame.unknown(node))
            else:
                value = self._own_module(f"{origin}.{item.name}".strip("."), frame, node.level) or value
            frame.names[item.asname or item.name] = value

    def _own_module(self, name: str, frame: Frame, level: int = 0) -> Module | None:
        start = frame.module.path.parents[level - 1] if level else self.root
        path = start.joinpath(*name.split(".")).with_suffix(".py")
        return self.load(path) if self._inside(path) and path.is_file() else None


def _loaded(target: ast.expr) -> ast.expr:
    """The target of an augmented assignment as an expression that reads it."""
    match target:
        case ast.Name():
            made: ast.expr = ast.Name(target.id, ast.Load())
        case ast.Attribute():
            made = ast.Attribute(target.value, target.attr, ast.Load())
        case ast.Subscript():
            made = ast.Subscript(target.value, target.slice, ast.Load())
        case _:
            return target
    return ast.copy_location(made, target)


def _catches_import(handler: ast.ExceptHandler) -> bool:
    kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return all(isinstance(kind, ast.Name) and kind.id in ("ImportError", "ModuleNotFoundError") for kind in kinds)
