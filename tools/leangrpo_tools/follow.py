"""Where the edits of a script's helper files go: to the file that the script itself imports, read as text."""

from __future__ import annotations

import ast
from pathlib import PurePosixPath

from leangrpo_tools.errors import KitError
from leangrpo_tools.recipe import Recipe, Script
from leangrpo_tools.tree import Tree

DEPTH = 4
"""So many packages may pass a name on before it is given up."""


def follow(tree: Tree, recipe: Recipe, scripts: list[str]) -> tuple[Recipe, list[str]]:
    """The recipe for a tree whose scripts take their helper functions from other files, and notices that say so.

    A helper file stays where the recipe has it if the script imports from it, or if it cannot be known. Raises LG306
    where the script takes the functions from several other files.
    """
    moved: dict[str, dict[str, str]] = {}
    notices: list[str] = []
    for name in scripts:
        for helper, functions in helpers(recipe.scripts[name]).items():
            found = sources(tree, recipe.scripts[name].file, functions)
            files = {file for file in found.values() if file is not None}
            if helper in files or not files:
                continue
            if len(files) > 1:
                raise KitError(
                    "LG306",
                    f"{name}: {recipe.scripts[name].file} imports {', '.join(sorted(functions))} from several files: "
                    + ", ".join(sorted(files)),
                    cause=f"the recipe knows one such file, {helper}",
                    fix=f"import them from one file, or put {helper} back and import them from it; or "
                    + without(recipe, scripts, [name]),
                )
            (moved.setdefault(name, {})[helper],) = files
            notices.append(f"{name}: patched in {moved[name][helper]} in place of {helper}: the script imports that")
    return recipe.moved(moved), notices


def helpers(script: Script) -> dict[str, set[str]]:
    """The files beside the script's own that it edits, and the functions in them, as they can be imported."""
    found: dict[str, set[str]] = {}
    for edit in script.edits:
        function = getattr(edit.params, "function", None)
        if edit.file != script.file and function:
            found.setdefault(edit.file, set()).add(function.split(".")[0])
    return found


def sources(tree: Tree, script: str, functions: set[str]) -> dict[str, str | None]:
    """Per module that the script takes one of ``functions`` from: the file that defines it, None if not in the tree."""
    module = _parsed(tree, script)
    if module is None:
        return {}
    found: dict[str, str | None] = {}
    bound: dict[str, str] = {}
    for node in ast.walk(module):
        if isinstance(node, ast.Import):
            bound |= {alias.asname or alias.name: alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            place = "." * node.level + (node.module or "")
            for alias in node.names:
                if alias.name in functions:
                    found[place] = _definition(tree, script, place, alias.name)
                else:
                    bound[alias.asname or alias.name] = f"{place}{'' if place.endswith('.') else '.'}{alias.name}"
    for node in ast.walk(module):
        if isinstance(node, ast.Attribute) and node.attr in functions:
            place = bound.get(ast.unparse(node.value))
            file = _definition(tree, script, place, node.attr) if place else None
            if place and file:  # an attribute of something else may have the same name
                found[place] = file
    return found


def without(recipe: Recipe, scripts: list[str], names: list[str]) -> str:
    """The options that leave scripts out of those chosen; in words if none is left."""
    rest = [f"--script {name}" for name in scripts if name not in names]
    return f"leave {', '.join(names)} out: {' '.join(rest)}" if rest else f"give another of {', '.join(recipe.scripts)}"


def _definition(tree: Tree, importer: str, module: str, name: str, depth: int = DEPTH) -> str | None:
    """The file that defines ``name``, through packages that only pass it on; None if it is not found in the tree."""
    for file in _files(tree, importer, module):
        parsed = _parsed(tree, file)
        if parsed is None:
            continue
        for node in parsed.body:
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and node.name == name:
                return file
        for node in ast.walk(parsed) if depth else ():
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    if (alias.asname or alias.name) == name:
                        place = "." * node.level + (node.module or "")
                        return _definition(tree, file, place, alias.name, depth - 1)
    return None


def _files(tree: Tree, importer: str, module: str) -> list[str]:
    """Where a module could be: relative to the importer, or beside it, in the tree's top or in ``src``."""
    name = module.lstrip(".")
    level = len(module) - len(name)
    here = PurePosixPath(importer).parent
    if level > 1:
        here = PurePosixPath(*here.parts[: len(here.parts) - level + 1])
    bases = [here] if level else [here, PurePosixPath(), PurePosixPath("src")]
    paths = [base.joinpath(*name.split(".")) if name else base for base in bases]
    every = [
        str(path) for base in paths for path in (base.with_name(base.name + ".py"), base / "__init__.py") if base.name
    ]
    return [file for file in dict.fromkeys(every) if (tree.root / file).is_file()]


def _parsed(tree: Tree, file: str) -> ast.Module | None:
    """The file's syntax; None if it is not there, may not be read or is no Python: other errors say so."""
    try:
        content = tree.read(file)
        return ast.parse(content.data) if content is not None else None
    except (KitError, SyntaxError, ValueError, RecursionError):
        return None
