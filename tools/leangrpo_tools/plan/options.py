"""Upstream's argparse options, read from the source of its training script with ast: never imported or run."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Option:
    """One `add_argument` call: the names, whether it takes a value, and its default where that is a literal."""

    names: tuple[str, ...]
    takes_value: bool
    default: object


def read_options(source: str) -> dict[str, Option] | None:
    """Options of the script by their names without dashes; None where the source has a syntax error."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return None
    found: dict[str, Option] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "add_argument":
            option = _option(node)
            found.update(dict.fromkeys((name.lstrip("-") for name in option.names), option))
    return found


def _option(call: ast.Call) -> Option:
    names = [arg.value for arg in call.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)]
    keywords = {word.arg: word.value for word in call.keywords}
    action = _literal(keywords.get("action"))
    takes_value = action not in ("store_true", "store_false", "store_const", "count")
    fallback = None if takes_value else action == "store_false"
    default = _literal(keywords["default"]) if "default" in keywords else fallback
    return Option(tuple(name for name in names if name.startswith("--")), takes_value, default)


def _literal(node: ast.expr | None) -> object:
    try:
        return ast.literal_eval(node) if node is not None else None
    except ValueError:
        return None


def find_program(launch: Path, program: str) -> Path | None:
    """The training script in the tree that the launch file lies in, if it lies in one."""
    for folder in launch.resolve().parents:
        if (folder / program).is_file():
            return folder / program
    return None


def root_of(source: Path | None, program: str) -> Path:
    """The tree that a training script lies in; the current folder where it is not at hand."""
    return source.parents[len(Path(program).parts) - 1] if source and not Path(program).is_absolute() else Path.cwd()
