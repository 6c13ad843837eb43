"""``.leangrpo/state.json``: what was patched, from what, to what."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from leangrpo_tools import lost
from leangrpo_tools.errors import KitError
from leangrpo_tools.reading import read_text
from leangrpo_tools.tree import BIGGEST, Tree, sha256


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class Merge(_Strict):
    """A merge that left conflicts in a file: hashes of its text before, of what was merged in, and with the markers."""

    ours: str
    theirs: str
    marked: str


class FileState(_Strict):
    """sha256 before (None: the kit added the file) and after the patch, and the permission bits."""

    before: str | None
    after: str
    mode: int
    merge: Merge | None = None


class State(_Strict):
    """The state of a patched tree.

    ``commit`` and ``tree`` are HEAD's at the time of the patch, ``base`` is the commit that ``refs/leangrpo/base``
    names, and ``patch`` the patch's own commit in a checkout that the kit made; all are None where there is no git.
    ``script_files`` are the scripts that have other names here, ``anchors`` the lines chosen by hand.
    ``vendored``: the runtime was copied to ``vendor``; otherwise the tree imports an installed ``leangrpo_core``.
    """

    format: Literal[1] = 1
    kit: str
    upstream: str
    commit: str | None
    tree: str | None
    recipe: str
    vendor: str
    vendored: bool = True
    scripts: list[str]
    base: str | None
    patch: str | None
    script_files: dict[str, str] = {}
    anchors: dict[str, list[int]] = {}
    files: dict[str, FileState]


def path(tree: Tree) -> Path:
    """The state file."""
    return tree.kit / "state.json"


def load(tree: Tree) -> State | None:
    """The state of a tree, or None if it is not patched. Raises LG308 for a lost, damaged or newer state file."""
    try:
        text = read_text(path(tree), BIGGEST)
    except (FileNotFoundError, NotADirectoryError) as err:
        if lost.is_lost(tree):
            raise KitError(
                "LG308",
                f"{tree.root} is patched, but {path(tree)} is gone, which says what was patched; nothing was changed",
                cause=f"it was deleted, or this is a copy of a patched tree without {tree.kit.name}",
                fix=lost.way_out(tree),
            ) from err
        return None
    except (OSError, UnicodeDecodeError) as err:
        raise _unreadable(tree, getattr(err, "strerror", None) or str(err)) from err
    try:
        return State.model_validate_json(text)
    except ValidationError as err:
        first = err.errors(include_url=False, include_context=False)[0]
        place = ".".join(map(str, first["loc"])) or "the whole file"
        raise _unreadable(tree, f"{place}: {first['msg']}") from err


def require(tree: Tree) -> State:
    """The state of a tree that must be patched. Raises LG301."""
    state = load(tree)
    if state is None:
        raise KitError(
            "LG301",
            f"{tree.root} is not patched",
            cause="never patched, or reverted already",
            fix="apply-patch NAME --tree " + str(tree.root),
        )
    return state


def dump(state: State) -> bytes:
    """The bytes of the state file."""
    return (json.dumps(state.model_dump(), indent=1, sort_keys=True) + "\n").encode()


def edited(tree: Tree, state: State) -> list[str]:
    """The patched files that are there with other bytes than those that the kit wrote."""
    found = []
    for name, item in state.files.items():
        content = tree.read(name)
        if content is not None and item.merge is None and sha256(content.data) != item.after:
            found.append(name)
    return found


def missing(tree: Tree, state: State) -> list[str]:
    """The patched files that are gone. Nothing of the user's is in them, so they may be put back or left away."""
    return [name for name in state.files if tree.read(name) is None]


def _unreadable(tree: Tree, detail: str) -> KitError:
    return KitError(
        "LG308",
        f"{path(tree)} cannot be used: {detail}; nothing was changed",
        cause="written by a newer version of the kit, or damaged: what was patched, and how, is not known",
        fix=f"if a newer kit wrote it, use that one; else {lost.way_out(tree)}",
    )
