"""The two trees a rehearsal runs in: copies of the patched one and of what it was before the patch."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

from leangrpo_tools import lock, store, wheel
from leangrpo_tools import recipe as recipes
from leangrpo_tools import state as states
from leangrpo_tools.errors import KitError
from leangrpo_tools.tree import Tree

CODE = {".py", ".yaml", ".yml", ".json", ".toml", ".txt", ".cfg", ".md", ".sh"}
BIGGEST = 4 << 20


@dataclasses.dataclass(frozen=True)
class Trees:
    """Folders with the unpatched and the patched code, the upstream's name, the rehearsal's module, the script's file
    as the user's tree names it."""

    native: Path
    patched: Path
    upstream: str
    rehearsal: str
    file: str
    notes: list[str]


def export(root: Path, folder: Path, script: str, *, upstream: str | None = None) -> Trees:
    """Copies the patched tree at `root` below `folder`, twice, and takes the patch out of one copy.

    Both copies hold the working tree's files as they are now, the user's edits of other files included. Raises LG301
    for a tree that is not patched, LG310 if it is patched for another upstream than the one meant (in any case), LG203
    for a script that the patch does not cover, LG401 for one that the kit cannot rehearse.
    """
    tree = Tree(root)
    state = states.require(tree)
    if upstream is not None and upstream.lower() != state.upstream.lower():
        raise KitError(
            "LG310", f"{root} is patched for {state.upstream}, not {upstream}",
            cause="the name does not go with the tree", fix=f"name {state.upstream}, or another tree",
        )  # fmt: skip
    found = recipes.load(state.upstream).find(script)
    if found.name not in state.scripts:
        raise KitError(
            "LG203", f"{root} is not patched for {found.name}", cause=f"patched: {', '.join(state.scripts)}",
            fix=f"apply-patch {state.upstream} --tree {root} --script {found.name}",
        )  # fmt: skip
    if not found.rehearsal:
        raise KitError(
            "LG401", f"{state.upstream} {found.name} has no rehearsal", cause=found.not_rehearsed,
            fix="the patch applies; in training, LEANGRPO_AUDIT=first compares it with a native recomputation",
        )  # fmt: skip
    edited = sorted(states.edited(tree, state))
    notes = [f"{tree.root}: edited since it was patched, and compared as it is: {', '.join(edited)}"] if edited else []
    own = state.script_files.get(found.name, found.file)
    trees = Trees(folder / "native", folder / "patched", state.upstream, found.rehearsal, own, notes)
    names = [*_listed(tree, state), *state.files]
    config = states.path(tree).parent
    names += [str(file.relative_to(tree.root)) for file in config.rglob("*") if file.is_file()]
    for name in state.files:
        tree.path(name)  # a damaged state file must not reach outside
    for name in dict.fromkeys(names):
        source = tree.root / name
        if not source.is_file() or source.is_symlink():
            continue
        for target in (trees.native / name, trees.patched / name):
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)
    for name, item in state.files.items():
        before = None if item.before is None else store.get(tree, item.before, name, state.base)
        if before is not None:
            (trees.native / name).write_bytes(before)
        else:
            (trees.native / name).unlink(missing_ok=True)
    shutil.rmtree(trees.native / config.name, ignore_errors=True)
    if own != found.file:
        # The rehearsal starts the script under the name that it has upstream.
        for copy in (trees.native, trees.patched):
            (copy / found.file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(copy / own, copy / found.file)
    return trees


def _listed(tree: Tree, state: states.State) -> list[str]:
    """Tracked files, and untracked ones that look like code; data and checkpoints stay where they are."""
    if not tree.is_repo:
        found = [path for top in _tops(tree, state) for path in (top, *top.rglob("*"))]
        found = [path for path in found if path.suffix in CODE and not path.is_symlink()]
        return [str(path.relative_to(tree.root)) for path in found if ".git" not in path.parts and _small(path)]
    tracked = tree.git.run("ls-files", "-z").decode("utf-8", "surrogateescape").split("\0")
    others = tree.git.run("ls-files", "-z", "--others", "--exclude-standard").decode("utf-8", "surrogateescape")
    names = [name for name in tracked if name]
    names += [name for name in others.split("\0") if name and Path(name).suffix in CODE]
    return [name for name in names if _small(tree.root / name)]


def _tops(tree: Tree, state: states.State) -> list[Path]:
    """Where to look for code: in a folder of installed packages, which may hold gigabytes, only at the
    patched project."""
    entry = lock.load().upstreams.get(state.upstream)
    if not isinstance(entry, lock.PypiEntry) or wheel.installed_version(tree.root, entry) is None:
        return [tree.root]
    names = (wheel.top_names(tree.root, entry) or set()) | {name.split("/")[0] for name in state.files}
    return [tree.root / name for name in sorted(names)]


def _small(file: Path) -> bool:
    try:
        return file.stat().st_size <= BIGGEST
    except OSError:
        return False
