"""Names while a config is walked, and the two errors that end the walk."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from pathlib import Path

from leangrpo_tools.errors import KitError
from leangrpo_tools.plan.pyvalues import Unknown


@dataclass
class Module:
    """A file whose text was walked: its names."""

    path: Path
    names: dict[str, object] = field(default_factory=dict)


@dataclass
class Frame:
    """Names of one call, or of a module; `outer` is where others are looked up."""

    module: Module
    names: dict[str, object]
    outer: Frame | None = None

    def unknown(self, node: ast.AST) -> Unknown:
        """What this expression or statement leaves behind where it is not worked out."""
        return Unknown(f"`{short(node)}`", self.module.path, getattr(node, "lineno", 1))


@dataclass
class Function:
    """A function of the config, not called yet."""

    node: ast.FunctionDef
    home: Frame
    defaults: dict[str, object]


@dataclass(frozen=True)
class Method:
    """A method that is looked up and not called yet."""

    owner: object
    name: str


class Return(Exception):
    """A function is left with this value."""

    def __init__(self, value: object) -> None:
        self.value = value


class Leave(Exception):
    """`break` or `continue`; `unknown` says that it is not known whether that happens."""

    def __init__(self, kind: str, unknown: Unknown | None = None) -> None:
        self.kind, self.unknown = kind, unknown


def first_unknown(*values: object) -> Unknown | None:
    """The first value that is not known, if any."""
    return next((value for value in values if isinstance(value, Unknown)), None)


def is_path(node: ast.expr) -> bool:
    """A name, or attributes and literal items of one: looking it up changes nothing."""
    while isinstance(node, (ast.Attribute, ast.Subscript)):
        if isinstance(node, ast.Subscript) and not isinstance(node.slice, ast.Constant):
            return False
        node = node.value
    return isinstance(node, ast.Name)


def short(node: ast.AST) -> str:
    """The source of a node in one line, cut where it is long."""
    text = " ".join(ast.unparse(node).split())
    return text if len(text) <= 70 else text[:67] + "..."


def unreadable(what: str) -> KitError:
    """LG508."""
    fix = "correct the file, or give another: --preset FILE:NAME"
    return KitError("LG508", what, cause="the config is read as text and never run", fix=fix)


def stops(frame: Frame, node: ast.AST, what: str, said: object) -> KitError:
    """LG505: upstream would stop at this statement."""
    place = f"{frame.module.path}:{getattr(node, 'lineno', 1)}"
    cause = f"upstream stops there: {said}" if isinstance(said, str) and said else "upstream stops there"
    return KitError("LG505", f"{place}: {what}", cause=cause, fix="change the preset so that it does not come to this")
