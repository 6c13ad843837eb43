"""Whether a tree is at the pin: by the commit of its HEAD or, for a wheel, by the version of the project in it."""

from __future__ import annotations

from leangrpo_tools import wheel
from leangrpo_tools.errors import KitError
from leangrpo_tools.lock import Entry, GitEntry, PypiEntry
from leangrpo_tools.state import State
from leangrpo_tools.tree import Tree


def compare(tree: Tree, entry: Entry, state: State | None, *, strict: bool) -> str | None:
    """A notice for a tree that is patched for the first time and is not at the pin, else None.

    Raises LG312 for every tree that is not at the pin if that is ``strict``.
    """
    if isinstance(entry, PypiEntry):
        # A folder of installed packages has no commit, and a checkout of the project's repository not the wheel's.
        version, pinned = wheel.installed_version(tree.root, entry), entry.release
        found = f"{entry.project} {version}" if version else None
        where = f"this tree has {found or 'no known version of ' + entry.project}"
    else:
        head = tree.head()
        found = state.commit if state and head == state.patch else head
        pinned = entry.commit if isinstance(entry, GitEntry) else tree.made_at()
        where = f"HEAD is {found}" if found else "the commit of this tree is not known"
    if found == pinned and pinned is not None:
        return None
    if strict:
        return_to = (
            f", or: git -C {tree.root} checkout {pinned}" if tree.is_repo and isinstance(entry, GitEntry) else ""
        )
        no_commit = not tree.is_repo and not isinstance(entry, PypiEntry)
        raise KitError(
            "LG312",
            f"{where}, the pin is {pinned or 'not a commit'}",
            cause=f"{tree.root} is no git repository" if no_commit else "--strict-pin takes nothing else",
            fix=f"leave --strict-pin out{return_to}",
        )
    if state is None and pinned is not None:
        return f"{where}, the pin is {pinned}: the patch goes by its anchors"
    return None
