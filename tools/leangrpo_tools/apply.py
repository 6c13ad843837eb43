"""``apply-patch``: fetch if needed, transform in memory, write all files together."""

from __future__ import annotations

import shlex
import tempfile
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

from leangrpo_tools import __version__, fetch, journal, lock, lookalike, patchplan, pin, snapshot, vendor
from leangrpo_tools import bundle as bundles
from leangrpo_tools import recipe as recipes
from leangrpo_tools import state as states
from leangrpo_tools.choices import Choices, adapt, parse
from leangrpo_tools.errors import KitError
from leangrpo_tools.gitcmd import BASE_REF
from leangrpo_tools.patchplan import Plan
from leangrpo_tools.recipe import Recipe
from leangrpo_tools.reconcile import reconcile, settle, standings
from leangrpo_tools.selection import ApplyResult, Wish, select
from leangrpo_tools.state import FileState, State
from leangrpo_tools.tree import Content, Tree, sha256


def apply(
    name: str,
    dest: Path | str | None = None,
    *,
    source: str | None = None,
    tree: Path | str | None = None,
    scripts: list[str] | None = None,
    script_as: Sequence[str] = (),
    anchors: Sequence[str] = (),
    allow_partial: bool = False,
    strict_pin: bool = False,
    dry_run: bool = False,
    bundle: Path | str | None = None,
    vendored: bool | None = None,
) -> ApplyResult:
    """Patch a checkout of the upstream ``name``.

    Args:
        name: the upstream, in any case.
        dest: where the kit keeps its own checkout; by default a folder named after the upstream. Made if absent.
        source: URL or path to fetch from instead of the lock's.
        tree: patch this checkout of the user's own instead. HEAD, index and branches stay as they are.
        scripts: names from the recipe; by default all of them, or what a patched tree has already.
        script_as: ``SCRIPT=FILE`` for scripts that have another name in this tree; chooses the script, too.
        anchors: ``EDIT=LINE,...``: which places are meant where more match than the recipe expects.
        allow_partial: patch the scripts that can be patched, and say why the others cannot.
        strict_pin: raise LG312 unless the tree is at the pinned commit, or has the pinned version.
        dry_run: write nothing (except to the cache) and fill ``diff``.
        bundle: a file made by ``leangrpo bundle``, to take the upstream from instead of the network.
        vendored: copy the runtime into the tree, or import an installed one; by default as it is, or a copy.
    """
    locked = lock.load()
    upstream = locked.find(name)
    recipe = recipes.load(upstream)
    with lookalike.named(upstream, Path(tree or dest or upstream)):
        choices = parse(recipe, scripts or [], script_as, anchors)
    wish = Wish(choices, dry_run, allow_partial, strict_pin, vendored)
    if tree is not None:
        if dest is not None or source is not None or bundle is not None:
            raise KitError("LG103", "--tree goes with none of DEST, --source and --bundle", fix="leave them out")
        return _patch(Tree(Path(tree)), recipe, wish, locked.upstreams[upstream])
    folder = Path(dest or upstream)
    entry = locked.upstreams[upstream]
    start = time.monotonic()
    if bundle is not None:
        if source is not None:
            raise KitError("LG103", "--bundle does not go with --source", fix="leave one of them out")
        bundles.use(Path(bundle), upstream, entry)
    fresh = not _ours(folder)
    if fresh:
        unused = fetch.unused(upstream, entry, source)
        if dry_run:
            with tempfile.TemporaryDirectory(prefix="leangrpo-") as temp:
                fetch.checkout(upstream, entry, Path(temp) / "tree", source)
                seconds = time.monotonic() - start
                result = _patch(Tree(Path(temp) / "tree"), recipe, wish, entry)
                result.dest, result.fetch_seconds = folder, seconds
                result.notices += unused
                return result
        fetch.checkout(upstream, entry, folder, source)
    else:
        unused = [f"--source was not used: {folder} is a checkout at the pin already"] if source else []
    seconds = time.monotonic() - start
    result = _patch(Tree(folder), recipe, wish, entry)
    result.fetch_seconds = seconds
    result.notices += unused
    if fresh and isinstance(entry, lock.GitEntry):
        missing = [path for path in entry.exclude if not (folder / path).exists()]
        if missing:
            result.notices.append(
                f"not checked out, since some mirrors lack large files: {', '.join(missing)}; to have them: "
                f"git -C {folder} sparse-checkout disable"
            )
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


def _patch(tree: Tree, recipe: Recipe, wish: Wish, entry: lock.Entry) -> ApplyResult:
    with lookalike.named(recipe.upstream, tree.root), nullcontext() if wish.dry_run else tree.lock():
        return _patch_alone(tree, recipe, wish, entry)


def _patch_alone(tree: Tree, recipe: Recipe, wish: Wish, entry: lock.Entry) -> ApplyResult:
    start = time.monotonic()
    result = ApplyResult(recipe.upstream, tree.root, [], dry_run=wish.dry_run, commit=tree.head())
    if wish.dry_run and journal.pending(tree):
        raise KitError("LG309", "an earlier run was interrupted", fix="run it again without --dry-run first")
    repaired = None if wish.dry_run else journal.recover(tree)
    result.notices += [repaired] if repaired else []
    state = states.load(tree)
    if state is not None and state.upstream != recipe.upstream:
        raise KitError(
            "LG310",
            f"{tree.root} is patched for {state.upstream}",
            fix=f"revert-patch {shlex.quote(str(tree.root))}; or give another folder",
        )
    moved = pin.compare(tree, entry, state, strict=wish.strict_pin)
    result.notices += [moved] if moved else []
    recipe, choices = adapt(recipe, wish.choices, state, tree.root)
    if not (wish.vendored if wish.vendored is not None else state is None or state.vendored):
        recipe = recipe.without_vendor()
    had = state.scripts if state else []
    recipe, chosen = select(tree, recipe, wish, choices, state, result)
    others = [
        script
        for script in recipe.scripts
        if script not in {*chosen, *result.absent} and not (wish.choices.scripts or result.skipped)
    ]
    if others:
        result.notices.append(f"not patched: {', '.join(others)}; add with --script NAME")
    if not (wish.choices.scripts or had):
        for name, left in recipe.refused.items():
            result.notices.append(f"{name} ({left.file}) is left alone: {left.reason}")
    warned: dict[str, list[str]] = {}
    for script in chosen:
        for text in recipe.scripts[script].warnings:
            warned.setdefault(text, []).append(script)
    result.warnings = [f"{', '.join(scripts)}: {text}" for text, scripts in warned.items()]
    choices = replace(choices, scripts=chosen)
    edited = standings(tree, state) if state is not None else {}
    if state is not None and _is_current(tree, recipe, choices, state) and "unpatched" not in edited.values():
        if edited:
            result.notices.append("patched already; edited since then and left alone: " + ", ".join(edited))
        parts = [name for name, what in edited.items() if what == "changed"]
        if parts:
            result.notices.append("edited inside the patch, or in the runtime: " + ", ".join(parts))
        result.base, result.patch, result.commit = state.base, state.patch, state.commit
        result.patch_seconds = time.monotonic() - start
        return result
    plan = patchplan.make(tree, recipe, chosen, state)
    done = reconcile(tree, state, plan.targets)
    settle(tree, state, done, _command(tree, recipe, wish), write=not wish.dry_run)
    result.edits = plan.places
    result.files = {name: "added" if plan.before[name] is None else "edited" for name in sorted(plan.after)}
    result.files |= {name: "removed" for name in plan.removed if name not in done.left}
    result.notices += [f"{name}: your edits were kept, and merged with the patch" for name in done.merged]
    result.notices += [f"{name}: not part of the runtime any more, but edited: left there" for name in done.left]
    result.changed = True
    if wish.dry_run:
        from leangrpo_tools.textdiff import diff

        result.diff = diff({name: (tree.read(name), done.changes.get(name, tree.read(name))) for name in plan.places})
    else:
        _write(tree, recipe, choices, plan, state, result, done.changes)
    result.patch_seconds = time.monotonic() - start
    return result


def _command(tree: Tree, recipe: Recipe, wish: Wish) -> str:
    """The command line that goes on after conflicts."""
    words = ["apply-patch", recipe.upstream, *(["--tree"] if tree.made_at() is None else []), str(tree.root)]
    for option, values in (
        ("--script", [name for name in wish.choices.scripts if name not in wish.choices.files]),
        ("--script-as", [f"{name}={file}" for name, file in wish.choices.files.items()]),
        ("--anchor", [f"{name}={','.join(map(str, lines))}" for name, lines in wish.choices.lines.items()]),
        ("--allow-partial", [""] if wish.allow_partial else []),
    ):
        words += [word for value in values for word in (option, value) if word]
    return shlex.join(words)


def _is_current(tree: Tree, recipe: Recipe, choices: Choices, state: State) -> bool:
    """Whether this kit would write the very same files again, and they are all there."""
    if states.missing(tree, state):
        return False
    core = {name: sha256(content.data) for name, content in vendor.files(recipe).items()}
    had = {name: item.after for name, item in state.files.items() if item.before is None}
    chosen = (choices.scripts, choices.files, choices.lines)
    return (
        (state.kit, state.recipe, state.vendored, had) == (__version__, recipe.sha256, recipe.vendored, core)
        and (state.scripts, state.script_files, state.anchors) == chosen
        and not any(item.merge for item in state.files.values())
    )


def _write(
    tree: Tree, recipe: Recipe, choices: Choices, plan: Plan, state: State | None, result: ApplyResult,
    changes: dict[str, Content | None],
) -> None:  # fmt: skip
    originals = {name: plan.before[name] for name in plan.places}
    own = _kit_commits(tree, state, originals)
    base, patch, head, lines = own, None, None, []
    if own is not None:
        new, lines = snapshot.make_tree(tree.git, own, plan.targets)
        message = f"leangrpo-kit {__version__}: {recipe.upstream} {', '.join(plan.scripts)}"
        patch = snapshot.make_commit(tree.git, new, own, message)
        head = (tree.head() or "", patch)
    elif tree.is_repo:
        start = state.base if state and state.base else tree.head()
        pre, _ = snapshot.make_tree(tree.git, start, originals)
        parent = tree.git.maybe("rev-parse", "--verify", "--quiet", f"{start}^") if state else start
        base = snapshot.make_commit(tree.git, pre, parent, f"{recipe.upstream} before leangrpo-kit")
        result.notices.append("HEAD, index and branches were left alone; the files' earlier text is in " + BASE_REF)
    record = State(
        kit=__version__,
        upstream=recipe.upstream,
        commit=state.commit if state else tree.head(),
        tree=state.tree if state else tree.head_tree(),
        recipe=recipe.sha256,
        vendor=recipe.vendor,
        vendored=recipe.vendored,
        scripts=plan.scripts,
        base=base,
        patch=patch,
        script_files=choices.files,
        anchors=choices.lines,
        files={
            name: FileState(
                before=sha256(old.data) if (old := plan.before[name]) else None,
                after=sha256(content.data),
                mode=content.mode,
            )
            for name, content in plan.after.items()
        },
    )
    texts = [content.data for content in [*plan.before.values(), *plan.after.values()] if content is not None]
    journal.commit(
        tree,
        journal.Journal(
            kind="apply",
            operations=journal.stage(tree, changes, texts),
            head=head,
            index=lines,
            refs={BASE_REF: base} if tree.is_repo else {},
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
