"""``leangrpo check``: whether a tree is patched, up to date, and the patch whole; for CI. Changes nothing."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from leangrpo_tools import __version__, journal, lock, store, vendor
from leangrpo_tools import recipe as recipes
from leangrpo_tools import state as states
from leangrpo_tools.reconcile import standing
from leangrpo_tools.state import State
from leangrpo_tools.tree import Tree, sha256

WORDS = {
    "changed": "edited inside the patch, or in the runtime",
    "conflicting": "a merge is not finished: resolve the markers and run the command again",
    "unpatched": "the patch is gone from it (git checkout?): run apply-patch again",
    "missing": "missing: run apply-patch again",
}


@dataclass
class CheckResult:
    """``problems`` is empty if all is as it should be. ``files`` says for each file of the patch one of:

    patched (as the kit wrote it), edited (elsewhere; the patch is whole), changed (in the patch itself, or in the
    runtime), conflicting, unpatched, missing.
    """

    dest: Path
    patched: bool = False
    upstream: str | None = None
    kit: str | None = None
    up_to_date: bool = False
    interrupted: bool = False
    scripts: list[str] = field(default_factory=list)
    files: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    @property
    def exit_code(self) -> int:
        """1 if anything is not as it should be."""
        return 1 if self.problems else 0

    def to_json(self) -> dict[str, object]:
        """Plain data for ``--json``."""
        return {"ok": not self.problems, **self.__dict__, "dest": str(self.dest)}


def check(dest: Path) -> CheckResult:
    """Look at a tree. Raises LG301 if it is no folder, LG308 if its state is lost."""
    tree = Tree(dest)
    state = states.load(tree)
    result = CheckResult(tree.root, interrupted=journal.pending(tree))
    if result.interrupted:
        result.problems.append("an earlier run was interrupted; the next apply-patch or revert-patch completes it")
    if state is None:
        result.problems.append("not patched")
        return result
    result.patched, result.upstream, result.kit, result.scripts = True, state.upstream, state.kit, state.scripts
    recipe = recipes.load(state.upstream) if state.upstream in lock.load().upstreams else None
    if recipe is not None:
        wanted = vendor.files(recipe if state.vendored else recipe.without_vendor())
        core = {name: sha256(content.data) for name, content in wanted.items()}
        had = {name: item.after for name, item in state.files.items() if item.before is None}
        result.up_to_date = (state.kit, state.recipe, had) == (__version__, recipe.sha256, core)
    if not result.up_to_date:
        result.problems.append(f"patched by leangrpo-kit {state.kit}, this is {__version__}: run apply-patch again")
    result.files = {name: _file(tree, state, name) for name in sorted(state.files)}
    result.problems += [f"{name}: {WORDS[what]}" for name, what in result.files.items() if what in WORDS]
    result.problems += [
        f"{name}: its text from before the patch is lost, so the patch cannot be taken out: restore {tree.kit.name}"
        for name, item in sorted(state.files.items())
        if item.before is not None and not store.has(tree, item.before, name, state.base)
    ]
    return result


def _file(tree: Tree, state: State, name: str) -> str:
    now, item = tree.read(name), state.files[name]
    if now is None:
        return "missing"
    if item.merge is not None:
        return "conflicting"
    return "patched" if sha256(now.data) == item.after else standing(tree, state, name, now.data)
