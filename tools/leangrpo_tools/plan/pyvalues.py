"""Values of a config that is read and not run: plain Python data, ConfigDicts, and what is not known and why.

Plain data (numbers, texts, lists, tuples, dicts) stands for itself. Operators and methods work on it through this
module, which refuses what could take long or fill the memory, since the text may be anyone's.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

_LARGEST = 100_000
"""Characters or items of a value, and bits of a number, that are still worked out."""


@dataclass(frozen=True)
class Unknown:
    """A value that the text alone does not give: the expression that stops it, and where that stands."""

    why: str
    file: Path
    line: int

    @property
    def place(self) -> str:
        """File and line, as compilers write it."""
        return f"{self.file}:{self.line}"


class Entries:
    """An `ml_collections.ConfigDict`: named entries, in the order in which they were made."""

    def __init__(self) -> None:
        self.values: dict[str, object] = {}
        self.others: Unknown | None = None
        """Set once code that is not understood may have changed anything here: what then holds for all other names."""

    def put(self, name: str, value: object) -> None:
        """Assign as a ConfigDict does: a dict becomes entries, a whole number in place of a fraction a fraction."""
        if isinstance(value, dict):
            value = made_of(value)
        if isinstance(self.values.get(name), float) and type(value) is int:
            value = float(value)
        self.values[name] = value

    def lose(self, why: Unknown, seen: set[int] | None = None) -> None:
        """Forget every entry, those of entries within too."""
        seen = set() if seen is None else seen
        if id(self) in seen:
            return
        seen.add(id(self))
        for value in self.values.values():
            if isinstance(value, Entries):
                value.lose(why, seen)
        self.values = {name: value for name, value in self.values.items() if isinstance(value, Entries)}
        self.others = why

    def leaves(self, before: str = "") -> dict[str, object]:
        """Every value by its dotted name."""
        found: dict[str, object] = {}
        for name, value in self.values.items():
            found |= value.leaves(f"{before}{name}.") if isinstance(value, Entries) else {before + name: value}
        return found


def made_of(content: dict[object, object]) -> Entries:
    """Entries from a dict, dicts within it included."""
    made = Entries()
    for name, value in content.items():
        made.put(str(name), value)
    return made


def merge_all(owner: Entries, other: dict[str, object] | Entries) -> None:
    """Merge as `ConfigDict.update` does: entries within are updated, others replaced."""
    for name, value in (other.values if isinstance(other, Entries) else other).items():
        inner = owner.values.get(name)
        if isinstance(inner, Entries) and isinstance(value, (dict, Entries)):
            merge_all(inner, value)
        else:
            owner.put(name, value)
    if isinstance(other, Entries) and other.others:
        owner.others = other.others


def copied(value: object) -> object:
    """A deep copy of plain data or entries. Raises Refused for anything else."""
    if isinstance(value, Entries):
        made = Entries()
        made.values, made.others = {name: copied(item) for name, item in value.values.items()}, value.others
        return made
    if isinstance(value, dict):
        return {key: copied(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)([copied(item) for item in value])
    if value is None or isinstance(value, (str, int, float, Unknown)):
        return value
    raise Refused


class Refused(Exception):
    """What was asked is an error in Python, or not worked out here."""


_BINARY: dict[type[ast.operator], Callable[..., object]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.Pow: operator.pow, ast.BitOr: operator.or_,
    ast.BitAnd: operator.and_, ast.BitXor: operator.xor,
}  # fmt: skip
_UNARY: dict[type[ast.unaryop], Callable[..., object]] = {
    ast.USub: operator.neg, ast.UAdd: operator.pos, ast.Not: operator.not_, ast.Invert: operator.invert,
}  # fmt: skip
_COMPARE: dict[type[ast.cmpop], Callable[..., object]] = {
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt,
    ast.GtE: operator.ge, ast.Is: operator.is_, ast.IsNot: operator.is_not,
    ast.In: lambda one, many: operator.contains(many, one),
    ast.NotIn: lambda one, many: not operator.contains(many, one),
}  # fmt: skip
_METHODS: dict[type, frozenset[str]] = {
    list: frozenset(
        ["append", "extend", "insert", "pop", "remove", "clear", "sort", "reverse", "copy", "index", "count"]
    ),
    tuple: frozenset(["index", "count"]),
    dict: frozenset(["get", "keys", "values", "items", "update", "pop", "setdefault", "clear", "copy"]),
    str: frozenset(
        {"join", "split", "lower", "upper", "strip", "lstrip", "rstrip", "startswith", "endswith"}
        | {"removeprefix", "removesuffix"}
    ),
}
_SPEC = re.compile(r"[<>^]?0?\d{0,3},?(\.\d{1,2})?[a-zA-Z%]?")


def binary(kind: ast.operator, left: object, right: object) -> object:
    """`left kind right`. Raises Refused."""
    _plain(left, right)
    if size(left) + size(right) > _LARGEST:
        raise Refused
    if isinstance(kind, (ast.Mult, ast.Pow)):
        _check_growth(isinstance(kind, ast.Pow), left, right)
    if isinstance(kind, ast.Mod) and isinstance(left, str):
        raise Refused
    return _tried(_BINARY.get(type(kind)), left, right)


def unary(kind: ast.unaryop, value: object) -> object:
    """`kind value`. Raises Refused."""
    if not isinstance(kind, ast.Not):
        _plain(value)
    return _tried(_UNARY.get(type(kind)), value)


def compare(kind: ast.cmpop, left: object, right: object) -> object:
    """`left kind right`. Raises Refused, also where something within is not known."""
    entries = isinstance(left, Entries) or isinstance(right, Entries)
    if holds_unknown(left) or holds_unknown(right) or (entries and not isinstance(kind, (ast.Is, ast.IsNot))):
        raise Refused
    return _tried(_COMPARE.get(type(kind)), left, right)


def method(value: object, name: str) -> Callable[..., object]:
    """A method of plain data, one without surprises. Raises Refused."""
    if name not in _METHODS.get(type(value), ()) or size(value) > _LARGEST:
        raise Refused
    return getattr(value, name)


def formatted(value: object, conversion: int, spec: str) -> str:
    """One field of an f-string. Raises Refused."""
    if not isinstance(value, (str, int, float, bool, type(None))) or not _SPEC.fullmatch(spec):
        raise Refused
    shown = value if conversion == -1 else {"s": str, "r": repr, "a": ascii}[chr(conversion)](value)
    return str(_tried(format, shown, spec))


def is_plain(value: object) -> bool:
    """Whether it stands for itself; what is within may still be unknown."""
    return value is None or isinstance(value, (str, bytes, int, float, list, tuple, dict, set, range))


def holds_unknown(value: object, depth: int = 20) -> bool:
    """Whether something in this value is not known, or is no data at all."""
    if isinstance(value, Entries):
        return False
    if not is_plain(value) or depth == 0:
        return True
    items = list(value.values()) if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return any(holds_unknown(item, depth - 1) for item in items)


def size(value: object) -> int:
    """Characters, items or bits."""
    if isinstance(value, (str, bytes, list, tuple, dict, set, range)):
        return len(value)
    return value.bit_length() if isinstance(value, int) else 1


def _check_growth(power: bool, left: object, right: object) -> None:
    if power:
        if not isinstance(right, (int, float)) or abs(right) * max(size(left), 1) > _LARGEST:
            raise Refused
        return
    for many, count in ((left, right), (right, left)):
        if isinstance(many, (str, bytes, list, tuple)) and isinstance(count, int) and size(many) * count > _LARGEST:
            raise Refused


def _plain(*values: object) -> None:
    for value in values:
        if not isinstance(value, (int, float, str, bytes, list, tuple, dict, set)):
            raise Refused


def _tried(function: Callable[..., object] | None, *values: object) -> object:
    if function is None:
        raise Refused
    try:
        return function(*values)
    except (TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as err:
        raise Refused from err
