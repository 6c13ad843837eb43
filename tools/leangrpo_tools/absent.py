"""What to say of scripts and files that a recipe names and a tree has not."""

from __future__ import annotations

import difflib
import os
import re
from pathlib import Path, PurePosixPath

from leangrpo_tools import follow
from leangrpo_tools.errors import KitError
from leangrpo_tools.recipe import Recipe, Script
from leangrpo_tools.tree import BIGGEST, Tree

LOOKED_AT = 3000
"""So many files and folders are looked at, so that a huge folder takes no time."""


def scripts(tree: Tree, recipe: Recipe, names: list[str]) -> dict[str, str]:
    """Of the named scripts, those whose file is not in the tree, with that file."""
    files = {name: recipe.scripts[name].file for name in names}
    return {name: file for name, file in files.items() if not os.path.lexists(tree.root / file)}


def missing(tree: Tree, recipe: Recipe, names: list[str], files: list[str]) -> KitError:
    """LG306 for files of the named scripts: the script itself, or a file that it imports."""
    lines, causes, fixes, out = [], [], [], []
    for name in names:
        script = recipe.scripts[name]
        if script.file in files:
            lines.append(f"{name}: {script.file} is missing")
            others = candidates(tree, recipe, script)
            if others:
                causes.append(f"{' or '.join(others[:3])} may be {name}: its functions have the same names")
                fixes.append(f"--script-as {name}={others[0]}")
            else:
                causes.append(f"no Python file here has the functions of {name}")
                out.append(name)
            continue
        for helper, functions in follow.helpers(script).items():
            if helper in files:
                called = ", ".join(sorted(functions))
                lines.append(f"{name}: {script.file} is here, but {helper} is missing, which has {called}")
                modules = sorted(follow.sources(tree, script.file, functions))
                causes.append(
                    f"{script.file} imports {called} from {', '.join(modules)}, which is no file of this tree"
                    if modules
                    else f"{script.file} does not import {called} by name, so the file that has it is not known"
                )
                out.append(name)
    if out:
        fixes.append(f"put the file back; or {follow.without(recipe, names, out)}")
    return KitError("LG306", "nothing was written\n" + "\n".join(lines), cause="; ".join(causes), fix="; ".join(fixes))


def nothing(tree: Tree, recipe: Recipe) -> KitError:
    """LG306 for a tree with none of the upstream's scripts: what the folder seems to be, and where the scripts are."""
    what = f"{tree.root} has none of {recipe.upstream}'s scripts"
    other = _checkout(tree, recipe)
    if other is not None:
        where = "above" if tree.root.is_relative_to(other) else "below"
        return KitError("LG306", what, cause=f"they are in a folder {where} it", fix=f"--tree {other}")
    for script in recipe.scripts.values():
        found = candidates(tree, recipe, script)
        if found:
            return KitError(
                "LG306",
                what,
                cause=f"{found[0]} has the functions of {script.name}; it was renamed, or is another trainer",
                fix=f"--script-as {script.name}={found[0]}",
            )
    count = len(_python(tree.root))
    seems = f"it has {count} Python files, none with the functions of such a script" if count else "it has no Python"
    return KitError("LG306", what, cause=seems, fix=f"apply-patch {recipe.upstream} DEST makes a checkout of its own")


def package(tree: Tree, recipe: Recipe) -> KitError:
    """LG306 for a tree without the package in which the runtime would lie."""
    folder = PurePosixPath(recipe.vendor).parent
    return KitError(
        "LG306",
        f"there is no folder {folder} in {tree.root}",
        cause="the scripts import their runtime from there; the package was renamed",
        fix="--no-vendor, and the kit installed where training runs: then the scripts import the installed runtime",
    )


def candidates(tree: Tree, recipe: Recipe, script: Script) -> list[str]:
    """Files that have the functions which the script's edits are made in, those with a similar name first."""
    functions = [getattr(edit.params, "function", None) for edit in script.edits if edit.file == script.file]
    heads = {function.split(".")[0] for function in functions if function}
    wanted = [re.compile(rf"^[ \t]*(async[ \t]+def|def|class)[ \t]+{head}\b".encode(), re.M) for head in heads]
    known = {other.file for other in recipe.scripts.values()} | {left.file for left in recipe.refused.values()}
    found = []
    for file in _python(tree.root):
        try:
            data = (tree.root / file).read_bytes() if file not in known else b""
        except OSError:
            continue
        if wanted and all(pattern.search(data) for pattern in wanted):
            found.append(file)
    return sorted(found, key=lambda file: -difflib.SequenceMatcher(None, file, script.file).ratio())


def _python(root: Path) -> list[str]:
    """Python files below a folder that are not too large; links, hidden folders and vendored runtimes are left out."""
    found, seen = [], 0
    for folder, inner, files in os.walk(root):
        inner[:] = sorted(name for name in inner if not name.startswith(".") and name != "_leangrpo")
        seen += len(files) + len(inner)
        for file in sorted(files):
            path = Path(folder, file)
            if file.endswith(".py") and path.is_file() and not path.is_symlink() and path.stat().st_size <= BIGGEST:
                found.append(path.relative_to(root).as_posix())
        if seen > LOOKED_AT:
            break
    return found


def _checkout(tree: Tree, recipe: Recipe) -> Path | None:
    """A folder above or below the tree that has one of the scripts; above, up to the top of the repository."""
    files = [script.file for script in recipe.scripts.values()]
    top = Path(tree.top).resolve() if tree.top is not None else None
    above = [folder for folder in tree.root.parents if top is not None and folder.resolve().is_relative_to(top)]
    below, seen = [], 0
    for folder, inner, _ in os.walk(tree.root):
        inner[:] = sorted(name for name in inner if not name.startswith("."))
        below.append(Path(folder))
        seen += len(inner)
        if seen > LOOKED_AT:
            break
    return next((folder for folder in [*above, *below] if any((folder / file).is_file() for file in files)), None)
