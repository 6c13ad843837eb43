"""Bring new texts into a tree whose files may have been edited since the patch: three-way merges, never an overwrite.

A file that the kit wrote and nobody edited gets its new text. An edited one is merged: the base is what the kit wrote.
Where edits and patch changed the same lines, the file gets markers, the state file remembers the merge, and the command
ends with LG302. Once the markers are gone, the text that was merged in is the base, so that running the same command
again (or another one) goes on from there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from leangrpo_tools import journal, merge, store
from leangrpo_tools import state as states
from leangrpo_tools.errors import KitError
from leangrpo_tools.state import FileState, Merge, State
from leangrpo_tools.tree import Content, Tree, sha256

Places = list[tuple[int, int, str]]


@dataclass
class Reconciled:
    """What to write (None: remove), and the edited files: ``merged`` with the new text, or ``left`` as they are.

    ``unfinished`` are files with the markers of an earlier merge; ``conflicts`` hold new ones, with the text to write.
    """

    changes: dict[str, Content | None] = field(default_factory=dict)
    merged: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    unfinished: dict[str, Places] = field(default_factory=dict)
    conflicts: dict[str, tuple[merge.Merged, Content, bytes]] = field(default_factory=dict)


def reconcile(tree: Tree, state: State | None, targets: Mapping[str, Content | None]) -> Reconciled:
    """Work out what each file becomes; nothing is written. None as a target removes the file, unless it was edited."""
    result = Reconciled()
    for name, target in targets.items():
        now, item = tree.read(name), state.files.get(name) if state else None
        if now is not None and state is not None and item is not None:
            _file(tree, state, name, now, item, target, result)
        elif now != target:
            result.changes[name] = target
    return result


def _file(
    tree: Tree, state: State, name: str, now: Content, item: FileState, target: Content | None, result: Reconciled
) -> None:
    digest, base = sha256(now.data), item.after
    if item.merge and digest != item.merge.ours:
        places = merge.unresolved(name, now.data, store.get(tree, item.merge.ours, name))
        if places:
            result.unfinished[name] = places
            return
        base = item.merge.theirs
    if target is None:
        if digest == item.after:
            result.changes[name] = None
        else:
            result.left.append(name)
        return
    wanted = sha256(target.data)
    if digest == wanted:
        return
    if item.before and not item.merge and digest != base and standing(tree, state, name, now.data) == "unpatched":
        base = item.before  # the text from before the patch was put back (git checkout), and the patch is wanted again
    if digest == base:
        result.changes[name] = replace(target, mode=now.mode)
        return
    result.merged.append(name)
    if base == wanted:
        return
    before = store.get(tree, base, name, state.base if base == item.before else state.patch)
    made = merge.merge(name, now.data, before, target.data)
    if made.places:
        result.conflicts[name] = (made, now, target.data)
    else:
        result.changes[name] = Content(made.data, now.mode)


def settle(tree: Tree, state: State | None, result: Reconciled, command: str, *, write: bool = True) -> None:
    """Do nothing if all is decided. Otherwise mark the conflicts in the files and raise LG302.

    ``command`` is the command line that goes on once they are resolved.
    """
    if result.unfinished:
        raise _conflict(tree, result.unfinished, command, "an earlier merge is not finished")
    if not result.conflicts or state is None:
        return
    places = {name: made.places for name, (made, _, _) in result.conflicts.items()}
    if not write:
        raise _conflict(tree, places, command, "there would be conflicts; nothing was written")
    files, changes, texts = dict(state.files), {}, []
    for name, (made, now, theirs) in result.conflicts.items():
        tree.check_writable(name)
        note = Merge(ours=sha256(now.data), theirs=sha256(theirs), marked=sha256(made.data))
        files[name] = files[name].model_copy(update={"merge": note})
        changes[name] = Content(made.data, now.mode)
        texts += [now.data, theirs]
    _write(tree, state.model_copy(update={"files": files}), changes, texts)
    raise _conflict(tree, places, command, "conflicts are marked in the files, everything else is as it was")


def abort(tree: Tree, state: State) -> list[str]:
    """Put back the texts from before a merge that left conflicts. What was changed since then is kept beside them."""
    changes: dict[str, Content | None] = {}
    files = dict(state.files)
    for name, item in state.files.items():
        if item.merge is None:
            continue
        now = tree.read(name)
        tree.check_writable(name)
        files[name] = item.model_copy(update={"merge": None})
        if now is not None and sha256(now.data) not in (item.merge.marked, item.merge.ours):
            changes[_free(tree, f"{name}.unmerged")] = now
        changes[name] = Content(store.get(tree, item.merge.ours, name), now.mode if now else item.mode)
    if not changes:
        raise KitError("LG301", f"no merge is open in {tree.root}", fix=f"leangrpo check {tree.root}")
    _write(tree, state.model_copy(update={"files": files}), changes, [])
    return sorted(changes)


def _free(tree: Tree, name: str) -> str:
    """The name, with a number behind it if there is such a file."""
    names = [name, *(f"{name}{number}" for number in range(2, 100))]
    return next(item for item in names if tree.read(item) is None)


def standing(tree: Tree, state: State, name: str, now: bytes) -> Literal["edited", "changed", "unpatched"]:
    """What became of the patch in a file that was edited: it is whole, changed itself, or gone.

    Whole means that taking it out and merging it in again gives the file; gone that taking it out changes nothing.
    """
    item = state.files[name]
    if item.before is None:
        return "changed"
    after = store.get(tree, item.after, name, state.patch)
    before = store.get(tree, item.before, name, state.base)
    without = merge.merge(name, now, after, before)
    if without.places:
        return "changed"
    if without.data == now:
        return "unpatched"
    return "edited" if merge.merge(name, without.data, before, after).data == now else "changed"


def standings(tree: Tree, state: State) -> dict[str, str]:
    """:func:`standing` of each edited file."""
    texts = {name: tree.read(name) for name in states.edited(tree, state)}
    return {name: standing(tree, state, name, text.data) for name, text in texts.items() if text}


def _write(tree: Tree, state: State, changes: Mapping[str, Content | None], texts: list[bytes]) -> None:
    operations = journal.stage(tree, changes, texts)
    text = states.dump(state).decode()
    journal.commit(tree, journal.Journal(kind="merge", operations=operations, vendor=state.vendor, state=text))


def _conflict(tree: Tree, places: dict[str, Places], command: str, what: str) -> KitError:
    lines = [f"  {name}:{start}-{end}: {why}" for name, found in places.items() for start, end, why in found]
    return KitError(
        "LG302",
        "\n".join([f"edits and patch changed the same lines; {what}", *lines]),
        cause="you edited what the patch put there, or lines beside it",
        fix=f"edit these lines until they are as you want them, then run {command}\n"
        f"     to undo the merge instead: revert-patch {tree.root} --abort",
    )
