"""``revert-patch``: put every byte, mode and HEAD back, and keep what was edited since."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

from leangrpo_tools import journal, reconcile, snapshot, store
from leangrpo_tools import state as states
from leangrpo_tools.gitcmd import BASE_REF
from leangrpo_tools.state import State
from leangrpo_tools.tree import Content, Tree

CALLS = re.compile(rb"\b_leangrpo\b|\blean\.[a-z_]+\(")


@dataclass
class RevertResult:
    """What ``revert`` did: files that were restored (edits kept in those of ``merged``), removed, or left there."""

    upstream: str
    dest: Path
    restored: list[str] = field(default_factory=list)
    merged: list[str] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)


def revert(dest: Path, *, abort: bool = False) -> RevertResult:
    """Take the patch in ``dest`` out; edits made since then stay.

    Args:
        dest: the patched tree.
        abort: instead, put back the texts from before a merge that left conflicts.

    Raises LG301 if it is not patched and LG302 if edits and patch changed the same lines: these are marked then.
    """
    tree = Tree(dest)
    with tree.lock():
        return _revert(tree, abort)


def _revert(tree: Tree, abort: bool) -> RevertResult:
    repaired = journal.recover(tree)
    if repaired and states.load(tree) is None and "revert" in repaired:
        return RevertResult("", tree.root, notices=[repaired])
    state = states.require(tree)
    result = RevertResult(state.upstream, tree.root, notices=[repaired] if repaired else [])
    if abort:
        back = reconcile.abort(tree, state)
        result.notices.append("as before the merge: " + ", ".join(back))
        return result
    originals: dict[str, Content | None] = {}
    for name, item in state.files.items():
        if item.before is None:
            originals[name] = None
        else:
            now = tree.read(name)
            data = store.get(tree, item.before, name, state.base)
            # The user may have changed the mode since; otherwise it is the one from before the patch.
            originals[name] = Content(data, now.mode if now else item.mode)
    done = reconcile.reconcile(tree, state, originals)
    for name in done.changes:
        tree.check_writable(name)
    reconcile.settle(tree, state, done, f"revert-patch {tree.root}")
    result.restored = [name for name, content in originals.items() if content is not None]
    result.removed = [name for name, content in originals.items() if content is None and name not in done.left]
    result.merged = done.merged
    _notices(tree, state, done, originals, result)
    head, lines = None, []
    made = tree.made_at()
    if state.patch is not None and made is not None:
        if tree.detached() and tree.head() == state.patch:
            _, lines = snapshot.make_tree(tree.git, state.base, originals)
            head = (state.patch, made)
        else:
            result.notices.append("HEAD has moved since the patch and was left alone; only the files were restored")
    journal.commit(
        tree,
        journal.Journal(
            kind="revert",
            operations=journal.stage(tree, done.changes),
            head=head,
            index=lines,
            refs={BASE_REF: made} if tree.is_repo else {},
            vendor=state.vendor,
        ),
    )
    if not done.left and tree.path(state.vendor).exists():
        result.notices.append(f"{state.vendor} holds files that are not the kit's and was left there")
    return result


def _notices(
    tree: Tree,
    state: State,
    done: reconcile.Reconciled,
    originals: dict[str, Content | None],
    result: RevertResult,
) -> None:
    for name in done.merged:
        result.notices.append(f"{name}: your edits were kept")
    if done.left:
        result.notices.append(f"edited since the patch and left there: {', '.join(done.left)}")
    for name, content in originals.items():
        final = done.changes.get(name, tree.read(name))
        if content is None or final is None or final.data == content.data:
            continue
        calls = [
            number
            for number, line in enumerate(final.data.split(b"\n"), 1)
            if CALLS.search(line) and line not in content.data
        ]
        if calls:
            where = ", ".join(map(str, calls))
            result.notices.append(f"{name}: still calls the runtime, which is gone: line {where}")
