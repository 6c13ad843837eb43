"""What a patch will change, worked out in memory before anything is written."""

from __future__ import annotations

from dataclasses import dataclass, field

from leangrpo_tools import state as states
from leangrpo_tools import vendor
from leangrpo_tools.errors import KitError
from leangrpo_tools.recipe import Recipe
from leangrpo_tools.state import State
from leangrpo_tools.tree import Content, Tree, sha256


@dataclass
class Plan:
    """The files before (None: absent) and after, and the places that the recipe's edits found."""

    scripts: list[str]
    before: dict[str, Content | None] = field(default_factory=dict)
    after: dict[str, Content] = field(default_factory=dict)
    removed: list[str] = field(default_factory=list)
    places: dict[str, list[dict[str, object]]] = field(default_factory=dict)


def make(tree: Tree, recipe: Recipe, scripts: list[str], state: State | None) -> Plan:
    """Transform every file the scripts need. Raises the LG2xx errors and LG302, LG303, LG305, LG306, LG307."""
    plan = Plan(scripts)
    _read(tree, recipe, state, plan)
    _transform(recipe, plan)
    _vendor(tree, recipe, state, plan)
    for name in plan.after:
        tree.check_writable(name)
    return plan


def _read(tree: Tree, recipe: Recipe, state: State | None, plan: Plan) -> None:
    """The pre-images: from the base commit for files that are patched already, else from the tree."""
    missing: list[str] = []
    for name in recipe.edits(plan.scripts):
        content = tree.read(name)
        if content is None:
            missing.append(name)
        elif state is not None and name in state.files:
            old = tree.blob(state.base, name)
            if old is None:
                raise KitError(
                    "LG308",
                    f"{name} is missing in the base commit {state.base}",
                    cause="the repository was cleaned up, or the state file belongs to another one",
                    fix=f"git -C {tree.root} show {state.base} --stat",
                )
            content = Content(old.data, content.mode)
        if content is not None:
            plan.before[name] = content
    if missing:
        raise KitError(
            "LG306",
            "missing in the tree: " + ", ".join(missing),
            cause=f"{tree.root} is no checkout of {recipe.upstream}, or the scripts were renamed",
            fix="choose the scripts that are there with --script: " + ", ".join(recipe.scripts),
        )


def _transform(recipe: Recipe, plan: Plan) -> None:
    from leangrpo_tools.transform import Mismatch, transform

    wrong: list[Mismatch] = []
    for name, edits in recipe.edits(plan.scripts).items():
        old = plan.before[name]
        assert old is not None
        result = transform(name, old.data, edits)
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
    text = "\n".join(item.text() for item in wrong)
    if all(item.taken for item in wrong):
        raise KitError(
            "LG206",
            f"nothing was written; names that the patch needs are taken\n{text}",
            cause="the file is patched already by hand or by a lost state, or it uses the name for something else",
            fix="restore the file, or rename what has that name",
        )
    count = sum(1 for item in wrong)
    raise KitError(
        "LG201",
        f"nothing was written; {count} anchor{'s do' if count > 1 else ' does'} not match\n{text}",
        cause="the file differs from the pinned commit where the patch goes",
        fix="compare these lines with the pin, or leave the script out with --script",
    )


def _vendor(tree: Tree, recipe: Recipe, state: State | None, plan: Plan) -> None:
    known = state.files if state else {}
    fresh = vendor.files(recipe.vendor)
    folder = tree.path(recipe.vendor)
    if state is None and folder.exists() and any(item.suffix != ".pyc" for item in folder.rglob("*") if item.is_file()):
        raise KitError(
            "LG307",
            f"{recipe.vendor} exists already",
            cause="an earlier patch whose .leangrpo folder was deleted, or a folder of your own",
            fix=f"remove or rename {folder}",
        )
    for name, content in fresh.items():
        if name not in known and tree.read(name) is not None:
            raise KitError("LG307", f"{name} exists already", fix=f"remove or rename {tree.root / name}")
        plan.before[name] = None
        plan.after[name] = content
    plan.removed = [name for name, item in known.items() if item.before is None and name not in fresh]


def refuse_edited(tree: Tree, state: State, command: str) -> None:
    """Raise LG302 if a patched file was edited: it would be overwritten."""
    edited = states.edited(tree, state)
    if edited:
        raise KitError(
            "LG302",
            f"edited after the patch: {', '.join(edited)}",
            cause=f"{command} would overwrite these edits; nothing was changed",
            fix=f"save them (diff-patch {tree.root} shows them), undo them, and run {command} again",
        )


def hashes(files: dict[str, Content]) -> dict[str, str]:
    """sha256 by name."""
    return {name: sha256(content.data) for name, content in files.items()}
