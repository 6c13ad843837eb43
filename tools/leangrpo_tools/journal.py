"""Change many files so that an interruption is repaired by the next run.

Everything new is staged under ``.leangrpo/stage`` first (texts to remember go to ``.leangrpo/store``), then one journal
file is put in place: from that moment the change is decided, and :func:`recover` completes it. Before that moment
nothing outside ``.leangrpo`` was touched.
"""

from __future__ import annotations

import json
import os
import shutil
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from leangrpo_tools import lost
from leangrpo_tools.config import DEFAULTS
from leangrpo_tools.disk import guard_disk
from leangrpo_tools.errors import KitError
from leangrpo_tools.gitcmd import BASE_REF, GitFailed
from leangrpo_tools.reading import read_regular
from leangrpo_tools.tree import BIGGEST, Content, Tree, sha256

EXCLUDED = ".leangrpo/\n__pycache__/\n"
BEGIN, END = "# leangrpo-kit begin\n", "# leangrpo-kit end\n"


class Operation(BaseModel):
    """One file: its hash now, its hash then (None: absent), its mode and the number of its staged bytes."""

    model_config = ConfigDict(extra="forbid")
    path: str
    before: str | None
    after: str | None
    mode: int
    staged: int | None


class Journal(BaseModel):
    """A decided change. ``head`` moves HEAD (from, to), ``index`` are lines for ``git update-index --index-info``,
    ``refs`` are refs to set or (None) delete."""

    model_config = ConfigDict(extra="forbid")
    kind: Literal["apply", "revert", "merge"]
    operations: list[Operation]
    head: tuple[str, str] | None = None
    index: list[str] = []
    refs: dict[str, str | None] = {}
    vendor: str
    state: str | None = None


def stage(tree: Tree, changes: Mapping[str, Content | None], texts: Iterable[bytes] = ()) -> list[Operation]:
    """Write the new contents under ``.leangrpo/stage`` (None removes a file) and ``texts`` into the store."""
    with guard_disk(tree.root):
        folder = tree.kit / "stage"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        for data in texts:
            kept = tree.path(f"{tree.kit.name}/store/{sha256(data)}")
            kept.parent.mkdir(exist_ok=True)
            if not kept.exists():
                _write(kept, Content(data, 0o644))
        operations = []
        for number, (name, new) in enumerate(sorted(changes.items())):
            old = tree.read(name)
            before = sha256(old.data) if old else None
            if new is None:
                operations.append(Operation(path=name, before=before, after=None, mode=0, staged=None))
                continue
            _write(folder / str(number), new)
            operations.append(Operation(path=name, before=before, after=sha256(new.data), mode=new.mode, staged=number))
        return operations


def commit(tree: Tree, journal: Journal) -> None:
    """Decide the change and carry it out."""
    with guard_disk(tree.root):
        _write(tree.kit / "journal.json", Content(journal.model_dump_json(indent=1).encode(), 0o644))
        _carry_out(tree, journal)


def pending(tree: Tree) -> bool:
    """Whether an earlier run was interrupted after its change was decided."""
    return (tree.kit / "journal.json").is_file()


def recover(tree: Tree) -> str | None:
    """Complete or discard what an interrupted run left. Returns a notice, or None if there was nothing.

    Raises LG309 if a file was changed by someone else in between.
    """
    if not tree.kit.is_dir() or tree.kit.is_symlink():
        return None
    if not pending(tree):
        return _discard(tree)
    journal = _read(tree)
    foreign = []
    for item in journal.operations:
        content = tree.read(item.path)
        # A file that was moved aside is no loss: the run puts its own text there.
        if content is not None and sha256(content.data) not in (item.before, item.after):
            foreign.append(item.path)
    if foreign:
        raise KitError(
            "LG309",
            "an interrupted run cannot be completed: changed since then: " + ", ".join(foreign),
            cause="the files were edited before the interrupted run was completed",
            fix=f"move the edited files aside, run the same command again, then put your edits back "
            f"(earlier text: git -C {tree.root} show refs/leangrpo/base:FILE)",
        )
    with guard_disk(tree.root):
        _carry_out(tree, journal)
    return f"an interrupted {journal.kind} was completed first"


def _read(tree: Tree) -> Journal:
    path = tree.kit / "journal.json"
    try:
        journal = Journal.model_validate_json(read_regular(path, BIGGEST))
    except (OSError, ValidationError) as err:
        raise KitError(
            "LG308",
            f"{path} cannot be used: {err}",
            cause="written by another version of the kit, or damaged",
            fix=f"compare the tree with its base (git -C {tree.root} diff {BASE_REF}), then remove {path}",
        ) from err
    if set(journal.refs) - {BASE_REF}:
        raise KitError("LG308", f"{path} names refs that are not the kit's", fix=f"remove {path}")
    return journal


def _discard(tree: Tree) -> str | None:
    """Remove what a run left that was interrupted before its change was decided."""
    if lost.is_lost(tree):
        return None  # the store may be all that there is of the earlier texts
    no_state = not (tree.kit / "state.json").exists()
    left = [
        item
        for item in tree.kit.iterdir()
        if item.name == "stage" or item.suffix == ".new" or (no_state and item.name == "store")
    ]
    for item in left:
        shutil.rmtree(item) if item.is_dir() and not item.is_symlink() else item.unlink()
    if not any(tree.kit.iterdir()):
        tree.kit.rmdir()
    return "an earlier run was interrupted before it changed anything: its leftovers were removed" if left else None


def _carry_out(tree: Tree, journal: Journal) -> None:
    """Idempotent: every step can be repeated after an interruption."""
    for item in journal.operations:
        path = tree.path(item.path)
        if item.staged is None:
            path.unlink(missing_ok=True)
            continue
        staged = tree.kit / "stage" / str(item.staged)
        if staged.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            os.replace(staged, path)
    for name, value in journal.refs.items():
        if value is not None:
            _git(tree, "update-ref", name, value)
    if journal.head and tree.head() == journal.head[0]:
        tree.git.run("update-index", "--add", "--index-info", stdin="".join(journal.index).encode())
        _git(tree, "update-ref", "--no-deref", "-m", f"leangrpo-kit: {journal.kind}", "HEAD", journal.head[1])
    for name, value in journal.refs.items():
        if value is None:
            _git(tree, "update-ref", "-d", name)
    if journal.state is not None:
        exclude(tree, True)
        if not (tree.kit / "config.yaml").exists():
            _write(tree.kit / "config.yaml", Content(DEFAULTS.encode(), 0o644))
        _write(tree.kit / "state.json", Content(journal.state.encode(), 0o644))
        _forget(tree, journal.state)
        (tree.kit / "journal.json").unlink()
        shutil.rmtree(tree.kit / "stage", ignore_errors=True)
        return
    _remove_vendored(tree, journal.vendor)
    exclude(tree, False)
    for item in tree.kit.iterdir():
        if item.name != "journal.json":
            shutil.rmtree(item) if item.is_dir() and not item.is_symlink() else item.unlink()
    (tree.kit / "journal.json").unlink()
    tree.kit.rmdir()


def _git(tree: Tree, *args: str) -> None:
    try:
        tree.git.run(*args)
    except GitFailed as err:
        raise KitError(
            "LG110",
            f"{err}",
            cause="another git command holds a lock, or the repository is damaged",
            fix=f"git -C {tree.root} status, then run the same command again",
        ) from err


def _forget(tree: Tree, state: str) -> None:
    """Remove texts from the store that the state does not need any more."""
    files = json.loads(state)["files"].values()
    needed = {value for item in files for value in (item["before"], item["after"], *(item["merge"] or {}).values())}
    for path in tree.path(f"{tree.kit.name}/store").glob("*"):
        if path.name not in needed:
            path.unlink()


def _remove_vendored(tree: Tree, vendor: str) -> None:
    """Compiled files and then empty folders; files that are not the kit's stay."""
    root = tree.path(vendor)
    for base, _, names in os.walk(root, topdown=False):
        folder = Path(base)
        if folder.name == "__pycache__":
            for name in names:
                (folder / name).unlink()
        if not any(folder.iterdir()):
            folder.rmdir()


def exclude(tree: Tree, on: bool) -> None:
    """Add the kit's lines to the repository's ``info/exclude``, or take them out again; without one, the kit's folder
    excludes itself (it may lie in a larger repository)."""
    if not tree.is_repo:
        if on:
            _write(tree.kit / ".gitignore", Content(b"*\n", 0o644))
        return
    path = tree.root / tree.git.text("rev-parse", "--git-path", "info/exclude")
    old = read_regular(path, BIGGEST) if path.is_file() else b""
    begin, end = BEGIN.encode(), END.encode()
    start = old.find(begin)
    new = old
    if on and start < 0:
        gap = b"" if not old or old.endswith(b"\n") else b"\n"
        new = old + gap + begin + EXCLUDED.encode() + end
    elif not on and start >= 0:
        new = old[:start] + old[old.index(end, start) + len(end) :]
    if new != old and not path.is_symlink() and not path.parent.is_symlink():
        path.parent.mkdir(parents=True, exist_ok=True)
        _write(path, Content(new, stat.S_IMODE(path.stat().st_mode) if old else 0o644))


def _write(path: Path, content: Content) -> None:
    """Write a file of the kit's own folder: temporary file, flushed to the disk, renamed. Links are not followed."""
    temp = path.with_name(path.name + ".new")
    temp.unlink(missing_ok=True)
    with open(temp, "xb") as out:
        out.write(content.data)
        out.flush()
        os.fsync(out.fileno())
    temp.chmod(content.mode)
    os.replace(temp, path)
