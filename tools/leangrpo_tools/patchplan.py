"""What a patch will change, worked out in memory before anything is written."""

from __future__ import annotations

from dataclasses import dataclass, field

from leangrpo_tools import absent, store, vendor
from leangrpo_tools.errors import KitError
from leangrpo_tools.follow import without
from leangrpo_tools.recipe import Recipe
from leangrpo_tools.state import State
from leangrpo_tools.tree import Content, Tree


@dataclass
class Plan:
    """The files before the patch (None: absent) and as the patch makes them, and the places that the edits found.

    ``removed`` and ``restored`` are files that an older patch added or edited, and this one does not.
    """

    scripts: list[str]
    before: dict[str, Content | None] = field(default_factory=dict)
    after: dict[str, Content] = field(default_factory=dict)
    removed: list[str] = field(default_factory=list)
    restored: dict[str, Content] = field(default_factory=dict)
    places: dict[str, list[dict[str, object]]] = field(default_factory=dict)

    @property
    def targets(self) -> dict[str, Content | None]:
        """What each file is to become; None for those that go."""
        return {**self.after, **self.restored, **dict.fromkeys(self.removed)}


def make(tree: Tree, recipe: Recipe, scripts: list[str], state: State | None) -> Plan:
    """Transform every file the scripts need. Raises the LG2xx errors and LG303, LG305 to LG307."""
    plan = Plan(scripts)
    _read(tree, recipe, state, plan)
    _transform(tree, recipe, plan)
    _vendor(tree, recipe, state, plan)
    for name in plan.after:
        tree.check_writable(name)
    return plan


def _read(tree: Tree, recipe: Recipe, state: State | None, plan: Plan) -> None:
    """The pre-images: from the store for files that are patched already, else from the tree."""
    missing: list[str] = []
    for name in recipe.edits(plan.scripts):
        content = tree.read(name)
        known = state.files.get(name) if state else None
        if content is None and known is not None:
            content = Content(b"", known.mode)
        if content is None:
            missing.append(name)
        elif state is not None and name in state.files:
            content = Content(store.get(tree, state.files[name].before or "", name, state.base), content.mode)
        if content is not None:
            plan.before[name] = content
    if missing:
        raise absent.missing(tree, recipe, plan.scripts, missing)
    for name, item in (state.files if state else {}).items():
        if state is not None and item.before is not None and name not in plan.before:
            plan.restored[name] = Content(store.get(tree, item.before, name, state.base), item.mode)
    if recipe.vendored and not tree.path(recipe.vendor).parent.is_dir():
        raise absent.package(tree, recipe)


def _transform(tree: Tree, recipe: Recipe, plan: Plan) -> None:
    from leangrpo_tools.transform import Mismatch, describe, transform

    wrong: list[Mismatch] = []
    for name, edits in recipe.edits(plan.scripts).items():
        old = plan.before[name]
        assert old is not None
        result = transform(name, old.data, edits, str(tree.root / name))
        if isinstance(result, list):
            wrong += result
            continue
        plan.after[name] = Content(result.data, old.mode)
        plan.places[name] = [
            {"codemod": place.codemod, "anchor": place.anchor, "lines": list(place.lines), "reason": place.reason}
            for place in result.places
        ]
    if not wrong:
        return
    text = describe(wrong)
    if all(item.taken for item in wrong):
        raise KitError(
            "LG206",
            f"nothing was written; names that the patch needs are taken\n{text}",
            cause="the file is patched already by hand or by a lost state, or it uses the name for something else",
            fix="restore the file, or rename what has that name",
        )
    count = len(wrong)
    cause = "the file differs from the pinned commit where the patch goes"
    fix = "compare these lines with the pin, and restore them"
    known = [item for item in wrong if item.lines and not item.taken]
    if len(known) == count:
        every = [f"--anchor {item.edit.address}={','.join(map(str, sorted(set(item.lines))))}" for item in known]
        fix = f"choose the places that are meant, of all that were found: {' '.join(every)}"
    bad = [item.edit for item in wrong]
    out = [name for name in plan.scripts if any(edit in bad for edit in recipe.scripts[name].edits)]
    if len(out) < len(plan.scripts):
        fix += f"; or {without(recipe, plan.scripts, out)}"
    what = f"nothing was written; {count} anchor{'s do' if count > 1 else ' does'} not match"
    raise KitError("LG201", f"{what}\n{text}", cause=cause, fix=fix)


def _vendor(tree: Tree, recipe: Recipe, state: State | None, plan: Plan) -> None:
    known = state.files if state else {}
    fresh = vendor.files(recipe)
    folder = tree.path(recipe.vendor)
    there = [item for item in folder.rglob("*") if item.is_file() and item.suffix != ".pyc"]
    if fresh and there and state is None:
        raise KitError(
            "LG307",
            f"{recipe.vendor} exists already",
            cause="a folder of your own, or files of an earlier patch that were edited",
            fix=f"remove or rename {folder}",
        )
    for name, content in fresh.items():
        if name not in known and tree.read(name) is not None:
            raise KitError("LG307", f"{name} exists already", fix=f"remove or rename {tree.root / name}")
        plan.before[name] = None
        plan.after[name] = content
    plan.removed = [name for name, item in known.items() if item.before is None and name not in fresh]


def possible(
    tree: Tree, recipe: Recipe, scripts: list[str], state: State | None
) -> tuple[list[str], dict[str, KitError]]:
    """The scripts that can be patched, each looked at alone, and why the others cannot.

    A script that is patched already counts as possible: what it cannot become is an error for all.
    """
    good: list[str] = []
    skipped: dict[str, KitError] = {}
    for name in scripts:
        try:
            if state is None or name not in state.scripts:
                make(tree, recipe, [name], state)
            good.append(name)
        except KitError as err:
            if err.code[:3] != "LG2" and err.code not in ("LG303", "LG305", "LG306"):
                raise
            skipped[name] = err
    return good, skipped
