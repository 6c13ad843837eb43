"""YAML files read strictly: every problem at once, each with its place and line."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from leangrpo_tools.errors import KitError
from leangrpo_tools.reading import MIB, read_text

Model = TypeVar("Model", bound=BaseModel)
Place = tuple["str | int", ...]


def load(path: Path, model: type[Model], code: str, fix: str) -> Model:
    """Read ``path`` into ``model``. Raises ``KitError(code)`` with all problems, one per line."""
    try:
        text = read_text(path, 4 * MIB)
    except (OSError, UnicodeDecodeError) as err:
        raise KitError(code, f"{path} cannot be read: {err}", fix=fix) from err
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        content = yaml.safe_load(text)
    except yaml.MarkedYAMLError as err:
        line = err.problem_mark.line + 1 if err.problem_mark else 0
        what = f"{path}:{line}: not valid YAML: {err.problem}"
        raise KitError(code, what, cause="see the line above it too: indentation and quotes", fix=fix) from err
    except (yaml.YAMLError, ValueError) as err:
        raise KitError(code, f"{path}: not valid YAML: {err}", fix=fix) from err
    problems = [(line, text) for line, text in _doubled(root)]
    result = None
    try:
        result = model.model_validate(content)
    except ValidationError as err:
        for item in err.errors(include_url=False, include_context=False):
            place, line = _locate(root, item["loc"])
            problems.append((line, f"{place}: {_words(item)}"))
    if problems or result is None:
        raise problem_list(code, path, problems, fix)
    return result


def problem_list(code: str, path: Path, problems: list[tuple[int, str]], fix: str) -> KitError:
    """One error that lists every problem of a file in the order of its lines."""
    count = f"{len(problems)} problem{'s' if len(problems) > 1 else ''}"
    lines = [f"  {path.name}:{line}: {text}" for line, text in sorted(problems)]
    return KitError(code, f"{path} has {count}\n" + "\n".join(lines), fix=fix)


def _words(item: Any) -> str:
    message = str(item["msg"]).removeprefix("Value error, ")
    if item["type"] == "extra_forbidden":
        return "unknown name"
    if item["type"] == "string_type" and isinstance(item["input"], (int, float)):
        return f"{message} (found {item['input']!r}: put it in quotes)"
    if item["type"] == "missing":
        return "missing"
    if isinstance(item["input"], (str, int, float, bool)) or item["input"] is None:
        return f"{message} (found {item['input']!r})"
    return message


def _locate(root: Any, loc: Place) -> tuple[str, int]:
    """The dotted place and the line of the deepest node that exists on the way to ``loc``."""
    node, line = root, root.start_mark.line + 1 if root is not None else 1
    shown: list[str] = []
    for step in loc:
        found = None
        if isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                if key.value == str(step):
                    line, found = key.start_mark.line + 1, value
        elif isinstance(node, yaml.SequenceNode) and isinstance(step, int) and step < len(node.value):
            found = node.value[step]
            line = found.start_mark.line + 1
        elif shown and node is not None:
            continue
        if found is None and isinstance(node, yaml.MappingNode) and _is_tag(node, step):
            continue  # pydantic names the chosen member of a union, which is no key of the file
        shown.append(f"[{step}]" if isinstance(step, int) else f".{step}")
        node = found
    return "".join(shown).lstrip(".") or "(the whole file)", line


def _is_tag(node: Any, step: str | int) -> bool:
    return any(key.value == "kind" and getattr(value, "value", None) == step for key, value in node.value)


def _doubled(node: Any, seen: set[int] | None = None) -> list[tuple[int, str]]:
    """Keys given twice in one mapping: YAML would silently keep the last."""
    seen = set() if seen is None else seen
    if node is None or id(node) in seen:
        return []
    seen.add(id(node))
    found: list[tuple[int, str]] = []
    if isinstance(node, yaml.MappingNode):
        names: set[str] = set()
        for key, value in node.value:
            if str(key.value) in names:
                found.append((key.start_mark.line + 1, f"{key.value}: given twice"))
            names.add(str(key.value))
            found += _doubled(value, seen)
    elif isinstance(node, yaml.SequenceNode):
        for value in node.value:
            found += _doubled(value, seen)
    return found
