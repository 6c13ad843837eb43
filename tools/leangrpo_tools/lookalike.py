"""Which upstream a tree belongs to, by the state of its patch or by the files it has; nothing of it is read."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

from leangrpo_tools import lock
from leangrpo_tools import recipe as recipes
from leangrpo_tools import state as states
from leangrpo_tools.errors import KitError
from leangrpo_tools.recipe import Recipe
from leangrpo_tools.tree import Tree

SYMPTOMS = {"LG201", "LG203", "LG306"}
"""What a recipe says to the tree of another upstream: no such place, script or file."""


@contextmanager
def named(asked: str, root: Path) -> Iterator[None]:
    """Turn an error that comes of another upstream's tree into LG310, which names that upstream."""
    try:
        yield
    except KitError as err:
        if err.code not in SYMPTOMS or not root.is_dir():
            raise
        tree = Tree(root)
        state = states.load(tree)
        if state is not None:
            other, words = state.upstream, "is patched for"
        else:
            other, words = looks_like(tree.root, asked), "looks like"
        if other is None or other == asked:
            raise
        raise KitError(
            "LG310",
            f"{root} {words} {other}, not {asked}; nothing was written",
            cause="the name does not go with the tree: " + err.what.splitlines()[0],
            fix=f"{'revert-patch' if state else f'apply-patch {other} --tree'} {shlex.quote(str(root))}",
        ) from err


def looks_like(root: Path, asked: str) -> str | None:
    """The upstream with the most files here, of those with a script here where ``asked`` has nothing of its own."""
    known = {name: recipes.load(name) for name in lock.load().upstreams}
    mine = _files(known[asked])
    found: dict[str, int] = {}
    for name, recipe in known.items():
        theirs = _files(recipe)
        scripts = [script.file for script in recipe.scripts.values()]
        if name == asked or not _there(root, scripts) or not _there(root, [_package(recipe)]):
            continue
        if not _there(root, mine - theirs):
            found[name] = len(_there(root, theirs - mine))
    best = max(found, key=lambda name: found[name], default=None)
    return best if best is not None and found[best] else None


def _files(recipe: Recipe) -> set[str]:
    """Paths by which an upstream is known: its package, its scripts and launch files."""
    scripts = [path for script in recipe.scripts.values() for path in (script.file, *script.launch)]
    return {_package(recipe), *scripts, *(left.file for left in recipe.refused.values())}


def _package(recipe: Recipe) -> str:
    return PurePosixPath(recipe.vendor).parent.as_posix()


def _there(root: Path, names: set[str] | list[str]) -> list[str]:
    return [name for name in names if (root / name).exists()]
