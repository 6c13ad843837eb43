"""``apply-patch``: fetch if needed, transform in memory, write all files together."""

from __future__ import annotations

import tempfile
import time
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path

from leangrpo_tools import __version__, fetch, journal, lock, patchplan, snapshot, vendor
from leangrpo_tools import recipe as recipes
from leangrpo_tools import state as states
from leangrpo_tools.errors import KitError
from leangrpo_tools.gitcmd import BASE_REF
from leangrpo_tools.lock import GitEntry
from leangrpo_tools.patchplan import Plan
from leangrpo_tools.recipe import Recipe
from leangrpo_tools.state import FileState, State
from leangrpo_tools.tree import Content, Tree, sha256


@dataclass
class ApplyResult:
    """What ``apply`` did. ``diff`` is filled by a dry run, ``edits`` lists the places by file."""

    upstream: str
    dest: Path
    scripts: list[str]
    changed: bool = False
    dry_run: bool = False
    commit: str | None = None
    base: str | None = None
    patch: str | None = None
    notices: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    files: dict[str, str] = field(default_factory=dict)
    edits: dict[str, list[dict[str, object]]] = field(default_factory=dict)
    diff: bytes = b""
    fetch_seconds: float = 0.0
    patch_seconds: float = 0.0

    def to_json(self) -> dict[str, object]:
        """Plain data for ``--json``."""
        plain: dict[str, object] = {**self.__dict__, "ok": True, "dest": str(self.dest)}
        plain["diff"] = self.diff.decode("utf-8", "replace")
        return plain


def apply(
    name: str,
    dest: Path | str | None = None,
    *,
    source: str | None = None,
    tree: Path | str | None = None,
    scripts: list[str] | None = None,
    dry_run: bool = False,
) -> ApplyResult:
    """Patch a checkout of the upstream ``name``.

    Args:
        name: the upstream, in any case.
        dest: where the kit keeps its own checkout; by default a folder named after the upstream. Made if absent.
        source: URL or path to fetch from instead of the lock's.
        tree: patch this checkout of the user's own instead. HEAD, index and branches stay as they are.
        scripts: names from the recipe; by default all of them, or what a patched tree has already.
        dry_run: write nothing (except to the cache) and fill ``diff``.
    """
    locked = lock.load()
    upstream = locked.find(name)
    recipe = recipes.load(upstream)
    wanted = [recipe.find(script).name for script in scripts or []]
    if tree is not None:
        if dest is not None or source is not None:
            raise KitError("LG103", "--tree goes with neither DEST nor --source", fix="leave them out")
        return _patch(Tree(Path(tree)), recipe, wanted, locked.upstreams[upstream], dry_run)
    folder = Path(dest or upstream)
    entry = locked.upstreams[upstream]
    start = time.monotonic()
    if not _ours(folder):
        if dry_run:
            with tempfile.TemporaryDirectory(prefix="leangrpo-") as temp:
                fetch.checkout(upstream, entry, Path(temp) / "tree", source)
                seconds = time.monotonic() - start
                result = _patch(Tree(Path(temp) / "tree"), recipe, wanted, entry, dry_run)
                result.dest, result.fetch_seconds = folder, seconds
                return result
        fetch.checkout(upstream, entry, folder, source)
    seconds = time.monotonic() - start
    result = _patch(Tree(folder), recipe, wanted, entry, dry_run)
    result.fetch_seconds = seconds
    return result


def _ours(folder: Path) -> bool:
    """Whether a checkout that the kit made is there (patched or reverted)."""
    if not (folder / ".git").is_dir():
        return False
    try:
        tree = Tree(folder)
    except KitError:
        return False
    return tree.made_at() is not None


def _patch(tree: Tree, recipe: Recipe, wanted: list[str], entry: lock.Entry, dry_run: bool) -> ApplyResult:
    with nullcontext() if dry_run else tree.lock():
        return _patch_alone(tree, recipe, wanted, entry, dry_run)


def _patch_alone(tree: Tree, recipe: Recipe, wanted: list[str], entry: lock.Entry, dry_run: bool) -> ApplyResult:
    start = time.monotonic()
    result = ApplyResult(recipe.upstream, tree.root, [], dry_run=dry_run, commit=tree.head())
    if dry_run and journal.pending(tree):
        raise KitError("LG309", "an earlier run was interrupted", fix="run it again without --dry-run first")
    repaired = None if dry_run else journal.recover(tree)
    result.notices += [repaired] if repaired else []
    state = states.load(tree)
    if state is not None and state.upstream != recipe.upstream:
        raise KitError(
            "LG310",
            f"{tree.root} is patched for {state.upstream}",
            fix=f"revert-patch {tree.root}, or choose another folder",
        )
    had = state.scripts if state else []
    chosen = [script for script in recipe.scripts if script in {*had, *(wanted or had or recipe.scripts)}]
    result.scripts = chosen
    result.warnings = [text for script in chosen for text in recipe.scripts[script].warnings]
    pinned = tree.made_at() or (entry.commit if isinstance(entry, GitEntry) else None)
    if state is None and pinned is not None and result.commit != pinned:
        result.notices.append(
            f"HEAD is {result.commit}, the pin is {pinned}: patched by its anchors, all of them match"
        )
    if state is not None and _is_current(recipe, chosen, state) and not states.missing(tree, state):
        edited = states.edited(tree, state)
        if edited:
            result.notices.append("patched already; edited since then and left alone: " + ", ".join(edited))
        result.base, result.patch, result.commit = state.base, state.patch, state.commit
        result.patch_seconds = time.monotonic() - start
        return result
    plan = patchplan.make(tree, recipe, chosen, state)
    if state is not None:
        patchplan.refuse_edited(tree, state, "apply-patch")
    result.edits = plan.places
    result.files = {name: "added" if plan.before[name] is None else "edited" for name in sorted(plan.after)}
    result.files |= {name: "removed" for name in plan.removed}
    result.changed = True
    if dry_run:
        from leangrpo_tools.textdiff import diff

        shown = {name: (plan.before[name], plan.after[name]) for name in plan.places}
        result.diff = diff({name: pair for name, pair in shown.items()})
    else:
        _write(tree, recipe, plan, state, result)
    result.patch_seconds = time.monotonic() - start
    return result


def _is_current(recipe: Recipe, chosen: list[str], state: State) -> bool:
    """Whether this kit would write the very same files again."""
    core = {name: sha256(content.data) for name, content in vendor.files(recipe.vendor).items()}
    had = {name: item.after for name, item in state.files.items() if item.before is None}
    return (state.kit, state.recipe, state.scripts, had) == (__version__, recipe.sha256, chosen, core)


def _write(tree: Tree, recipe: Recipe, plan: Plan, state: State | None, result: ApplyResult) -> None:
    originals = {name: plan.before[name] for name in plan.places}
    own = _kit_commits(tree, state, originals)
    if own is not None:
        base = own
    else:
        start = state.base if state else tree.head()
        pre, _ = snapshot.make_tree(tree.git, start, originals)
        parent = tree.git.maybe("rev-parse", "--verify", "--quiet", f"{start}^") if state else start
        base = snapshot.make_commit(tree.git, pre, parent, f"{recipe.upstream} before leangrpo-kit")
    changes: dict[str, Content | None] = {**plan.after, **dict.fromkeys(plan.removed)}
    patch, head, lines = None, None, []
    if own is not None:
        new, lines = snapshot.make_tree(tree.git, base, changes)
        message = f"leangrpo-kit {__version__}: {recipe.upstream} {', '.join(plan.scripts)}"
        patch = snapshot.make_commit(tree.git, new, base, message)
        head = (tree.head() or "", patch)
    else:
        result.notices.append("HEAD, index and branches were left alone; the files' earlier text is in " + BASE_REF)
    record = State(
        kit=__version__,
        upstream=recipe.upstream,
        commit=state.commit if state else tree.head(),
        tree=state.tree if state else tree.git.maybe("rev-parse", "--verify", "--quiet", "HEAD^{tree}"),
        recipe=recipe.sha256,
        vendor=recipe.vendor,
        scripts=plan.scripts,
        base=base,
        patch=patch,
        files={
            name: FileState(
                before=sha256(old.data) if (old := plan.before[name]) else None,
                after=sha256(content.data),
                mode=content.mode,
            )
            for name, content in plan.after.items()
        },
    )
    operations = journal.stage(tree, changes)
    journal.commit(
        tree,
        journal.Journal(
            kind="apply",
            operations=operations,
            head=head,
            index=lines,
            refs={BASE_REF: base},
            vendor=recipe.vendor,
            state=states.dump(record).decode(),
        ),
    )
    result.base, result.patch = base, patch


def _kit_commits(tree: Tree, state: State | None, originals: dict[str, Content | None]) -> str | None:
    """The base commit if the patch is to be a commit: a checkout that the kit made, not moved, files not edited."""
    base = tree.made_at()
    if base is None or not tree.detached() or tree.head() != (state.patch if state else base):
        return None
    for name, content in originals.items():
        old = tree.blob(base, name)
        if old is None or content is None or old.data != content.data or old.git_mode != content.git_mode:
            return None
    return base
