"""Texts of patched files, kept under ``.leangrpo/store`` by their hash: before the patch, after it, before a merge."""

from __future__ import annotations

from contextlib import suppress

from leangrpo_tools.errors import KitError
from leangrpo_tools.reading import read_regular
from leangrpo_tools.tree import BIGGEST, Tree, sha256


def has(tree: Tree, digest: str, name: str, commit: str | None = None) -> bool:
    """Whether `get` would find that text."""
    try:
        get(tree, digest, name, commit)
    except KitError:
        return False
    return True


def get(tree: Tree, digest: str, name: str, commit: str | None = None) -> bytes:
    """The text with that hash, from the store or else from a commit. Raises LG308 when it is in neither."""
    path = tree.path(f"{tree.kit.name}/store/{digest}")
    data = b""
    with suppress(OSError):
        data = read_regular(path, BIGGEST)
    if sha256(data) == digest:
        return data
    old = tree.blob(commit, name)
    if old is not None and sha256(old.data) == digest:
        return old.data
    raise KitError(
        "LG308",
        f"the earlier text of {name} is not in {path.parent}",
        cause=f"files were deleted from {tree.kit}, or the state file is damaged",
        fix=f"restore {tree.kit} from a backup, or take the patch out by hand: diff-patch shows it in a fresh checkout",
    )
