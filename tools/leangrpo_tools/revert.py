"""``revert-patch``: put every byte, mode and HEAD back."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from leangrpo_tools import journal, patchplan, snapshot
from leangrpo_tools import state as states
from leangrpo_tools.errors import KitError
from leangrpo_tools.gitcmd import BASE_REF
from leangrpo_tools.tree import Content, Tree, sha256


@dataclass
class RevertResult:
    """What ``revert`` did."""

    upstream: str
    dest: Path
    restored: list[str] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)


def revert(dest: Path) -> RevertResult:
    """Undo the patch in ``dest``. Raises LG301 if it is not patched and LG302 if a patched file was edited."""
    tree = Tree(dest)
    with tree.lock():
        return _revert(tree)


def _revert(tree: Tree) -> RevertResult:
    repaired = journal.recover(tree)
    if repaired and states.load(tree) is None and "revert" in repaired:
        return RevertResult("", tree.root, notices=[repaired])
    state = states.require(tree)
    patchplan.refuse_edited(tree, state, "revert-patch")
    result = RevertResult(state.upstream, tree.root, notices=[repaired] if repaired else [])
    changes: dict[str, Content | None] = {}
    for name, item in state.files.items():
        if item.before is None:
            changes[name] = None
            result.removed.append(name)
            continue
        old = tree.blob(state.base, name)
        if old is None or sha256(old.data) != item.before:
            raise KitError(
                "LG308",
                f"the earlier text of {name} is not in {state.base}",
                cause="the repository was cleaned up, or the state file is damaged",
                fix=f"git -C {tree.root} log --all -- {name}",
            )
        now = tree.read(name)
        # The user may have changed the mode since; otherwise it is the one from before the patch.
        changes[name] = Content(old.data, now.mode if now else item.mode)
        result.restored.append(name)
    for name in changes:
        tree.check_writable(name)
    head, lines = None, []
    made = tree.made_at()
    if state.patch is not None and made is not None:
        if tree.detached() and tree.head() == state.patch:
            _, lines = snapshot.make_tree(tree.git, state.base, changes)
            head = (state.patch, state.base)
        else:
            result.notices.append("HEAD has moved since the patch and was left alone; only the files were restored")
    journal.commit(
        tree,
        journal.Journal(
            kind="revert",
            operations=journal.stage(tree, changes),
            head=head,
            index=lines,
            refs={BASE_REF: made},
            vendor=state.vendor,
        ),
    )
    if tree.path(state.vendor).exists():
        result.notices.append(f"{state.vendor} holds files that are not the kit's and was left there")
    return result
