"""Patched trees whose state file is gone: how they are known, and the way back without it."""

from __future__ import annotations

import re
import shlex
from collections import Counter
from pathlib import Path

from leangrpo_tools.gitcmd import BASE_REF
from leangrpo_tools.tree import BIGGEST, Tree

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
    earlier = _earlier(tree, runtimes)
    if earlier:
        back = " && ".join(f"cp {shlex.quote(str(text))} {shlex.quote(str(file))}" for file, text in earlier.items())
        return f"restore it from a backup; or save your edits of patched files, then: {back} && rm -rf {rest}; " + (
            "then apply-patch again"
        )
    return "restore it from a backup, or apply-patch a fresh copy of the tree"


def _runtimes(tree: Tree) -> list[Path]:
    """The folders inside the tree that hold a copied runtime."""
    return sorted(mark.parent.relative_to(tree.root) for mark in tree.root.glob(f"*/_leangrpo/{VENDORED}"))


def _earlier(tree: Tree, runtimes: list[Path]) -> dict[Path, Path]:
    """Per patched file the text in the store that it was made from: the one with the most of its words."""
    pattern = re.compile(CALLED.encode())
    texts = {path: path.read_bytes() for path in sorted((tree.kit / "store").glob("*")) if path.is_file()}
    before = {path: _words(text) for path, text in texts.items() if not pattern.search(text)}
    found: dict[Path, Path] = {}
    if not before:
        return found
    # In a folder of installed packages, which may hold gigabytes, only the project with the runtime is looked at.
    installed = any(tree.root.glob("*.dist-info"))
    tops = [tree.root / folder.parts[0] for folder in runtimes] if installed else [tree.root]
    for file in sorted(file for top in tops for file in top.rglob("*.py")):
        inner = file.relative_to(tree.root)
        if inner.parts[0].startswith(".") or any(inner.is_relative_to(folder) for folder in runtimes):
            continue
        data = file.read_bytes() if file.is_file() and not file.is_symlink() and file.stat().st_size <= BIGGEST else b""
        if pattern.search(data):
            after = _words(data)
            found[file] = max(before, key=lambda path: (before[path] & after).total() - (before[path] - after).total())
    return found


def _words(text: bytes) -> Counter[bytes]:
    return Counter(re.findall(rb"\w+", text))
