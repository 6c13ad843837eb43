"""Patched trees whose state file is gone: how they are known, and the way back without it."""

from __future__ import annotations

import shlex
from pathlib import Path

from leangrpo_tools.gitcmd import BASE_REF
from leangrpo_tools.tree import Tree

CALLED = "_leangrpo|leangrpo_core"
"""What the scripts that are patched have, as a pattern: the name of the runtime that they import."""
VENDORED = "VENDORED.txt"
"""The file in a copied runtime that says whose it is."""


def is_lost(tree: Tree) -> bool:
    """Whether the tree looks patched, by what an apply that went to its end leaves, and has no state file."""
    if (tree.kit / "state.json").exists() or (tree.kit / "journal.json").exists():
        return False
    return (tree.kit / "config.yaml").exists() or bool(_runtimes(tree))


def way_out(tree: Tree) -> str:
    """How to get an unpatched tree back without a state: from git, from the store, or afresh."""
    runtimes, root = _runtimes(tree), shlex.quote(str(tree.root))
    rest = " ".join(shlex.quote(str(path)) for path in (tree.kit, *(tree.root / folder for folder in runtimes)))
    base = tree.git.maybe("rev-parse", "--verify", "--quiet", BASE_REF) if tree.is_repo else None
    if base is not None:
        if base == tree.made_at():
            back = f"git -C {root} checkout --detach {BASE_REF}"
        else:
            others = "".join(f" ':!{folder.as_posix()}'" for folder in runtimes)
            back = f"git -C {root} grep --untracked -lzE '{CALLED}' -- '*.py'{others} | "
            back += f"xargs -0 git -C {root} restore --source={BASE_REF} --"
        return (
            f"restore it from a backup; or save your edits of patched files, then: {back} && rm -rf {rest}; "
            f"then apply-patch again"
        )
    if (tree.kit / "store").is_dir():
        return (
            f"restore it from a backup; or copy the files' earlier texts back, which are among {tree.kit}/store/* "
            f"(grep -LE '{CALLED}' names them), then: rm -rf {rest}; then apply-patch again"
        )
    return "restore it from a backup, or apply-patch a fresh copy of the tree"


def _runtimes(tree: Tree) -> list[Path]:
    """The folders inside the tree that hold a copied runtime."""
    return sorted(mark.parent.relative_to(tree.root) for mark in tree.root.glob(f"*/_leangrpo/{VENDORED}"))
