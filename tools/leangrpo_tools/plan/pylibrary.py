"""What a config may call: a few functions without side effects, and loading another file of its own tree.

A name from an import is a `Library` until it is called: `os.path.join` is only text. Functions that are not listed
here are never called; their result is not known.
"""

from __future__ import annotations

import math
import os.path
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from leangrpo_tools.plan.pyvalues import Entries, Refused, copied, holds_unknown, made_of, size


@dataclass(frozen=True)
class Library:
    """Something that is imported or built in, by its dotted name."""

    name: str


@dataclass(frozen=True)
class File:
    """A Python file that is loaded as a module once something in it is used; `spec`: its import spec or loader."""

    path: str
    spec: bool = False


BUILTINS = frozenset(
    {"int", "float", "bool", "str", "len", "abs", "min", "max", "round", "sum", "range", "tuple", "list", "dict"}
    | {"sorted", "print", "repr", "globals", "isinstance"}
)
HARMLESS = frozenset({"builtins.print", "builtins.repr", "builtins.len", "builtins.str", "builtins.isinstance"})
"""Functions that change none of what they are given."""
_PURE: dict[str, Callable[..., object]] = {
    **{f"builtins.{made.__name__}": made for made in (int, float, bool, abs, min, max, round, sum, range, sorted)},
    **{f"builtins.{made.__name__}": made for made in (tuple, list, dict, str)},
    **{f"math.{made.__name__}": made for made in (math.ceil, math.floor, math.sqrt, math.log2, math.gcd, math.prod)},
    **{f"os.path.{name}": getattr(os.path, name) for name in ("join", "dirname", "basename", "normpath")},
}
_CONFIG_DICTS = (
    "ml_collections.ConfigDict",
    "ml_collections.config_dict.ConfigDict",
    "ml_collections.FrozenConfigDict",
)
_LOADERS = ("imp.load_source", "importlib.util.spec_from_file_location", "importlib.machinery.SourceFileLoader")
_ITEMS = 100_000


def call(name: str, root: Path, given: list[object], named: dict[str, object]) -> object:
    """The result of a library function.

    Args:
        name: its dotted name.
        root: the folder in which upstream's command is run, for `os.getcwd()`.
        given: positional arguments; `named`: keyword arguments. Known values.

    Returns:
        The value, Entries, or a File for what loads one.

    Raises:
        Refused: not a function that is known here, or Python would raise.
    """
    if name in _CONFIG_DICTS:
        return _config_dict(given, named)
    if name == "os.getcwd":
        return str(root)
    if name in _LOADERS:
        path = named.get("location", named.get("path", given[1] if len(given) > 1 else None))
        if isinstance(path, str):
            return File(path, spec=name != "imp.load_source")
    if name == "importlib.util.module_from_spec" and len(given) == 1 and isinstance(given[0], File):
        return File(given[0].path)
    if name == "builtins.len" and len(given) == 1 and isinstance(given[0], (str, list, tuple, dict, range)):
        return len(given[0])
    if name == "builtins.print":
        return None
    if name == "os.path.abspath" and len(given) == 1 and isinstance(given[0], str):
        return os.path.normpath(os.path.join(root, given[0]))
    if name == "copy.deepcopy" and len(given) == 1:
        return copied(given[0])
    return _pure(name, given, named)


def _config_dict(given: list[object], named: dict[str, object]) -> object:
    if not given:
        return Entries()
    if isinstance(given[0], dict):
        return made_of(given[0])
    if isinstance(given[0], Entries):
        return copied(given[0])
    raise Refused


def _pure(name: str, given: list[object], named: dict[str, object]) -> object:
    function = _PURE.get(name)
    values = [*given, *named.values()]
    plain = all(isinstance(value, (str, int, float, list, tuple, dict, range, type(None))) for value in values)
    if function is None or not plain or any(holds_unknown(value) for value in values):
        raise Refused
    if any(isinstance(value, (str, list, tuple, dict, range)) and size(value) > _ITEMS for value in values):
        raise Refused
    try:
        return function(*given, **named)
    except (TypeError, ValueError, ArithmeticError, LookupError) as err:
        raise Refused from err
