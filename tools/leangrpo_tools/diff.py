"""``diff-patch``: what the patch changed, as git shows it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from leangrpo_tools import state as states
from leangrpo_tools import store
from leangrpo_tools.textdiff import diff as text_diff
from leangrpo_tools.tree import Content, Tree


@dataclass
class DiffResult:
    """The text, and the files that were left out of it."""

    dest: Path
    text: bytes
    left_out: list[str] = field(default_factory=list)
    edited: list[str] = field(default_factory=list)
    vendor: str = ""


def diff(dest: Path, *, stat: bool = False, colour: bool = False, everything: bool = False) -> DiffResult:
    """The difference between the base and the tree, in the files that the kit patched or added.

    Edits made after the patch are part of it. The vendored runtime is left out unless ``everything``.
    """
    tree = Tree(dest)
    state = states.require(tree)
    pairs: dict[str, tuple[Content | None, Content | None]] = {}
    left_out: list[str] = []
    for name, item in sorted(state.files.items()):
        if item.before is None and not everything:
            left_out.append(name)
            continue
        old = None
        if item.before is not None:
            old = Content(store.get(tree, item.before, name, state.base), 0o755 if item.mode & 0o100 else 0o644)
        new = tree.read(name)
        if old is not None and new is not None:
            # git keeps one bit of the mode: compare that, not the user's umask.
            new = Content(new.data, 0o755 if new.mode & 0o100 else 0o644)
        pairs[name] = (old, new)
    text = text_diff(pairs, stat=stat, colour=colour)
    return DiffResult(tree.root, text, left_out, states.edited(tree, state), state.vendor)
