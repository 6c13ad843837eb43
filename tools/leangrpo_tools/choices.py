"""What a user says about a tree of their own: which scripts, under which names, and which of several places."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from leangrpo_tools.errors import KitError
from leangrpo_tools.lock import inside
from leangrpo_tools.recipe import Recipe
from leangrpo_tools.state import State


@dataclass(frozen=True)
class Choices:
    """``files`` by script, ``lines`` by the address of the edit (``script.name``)."""

    scripts: list[str] = field(default_factory=list)
    files: dict[str, str] = field(default_factory=dict)
    lines: dict[str, list[int]] = field(default_factory=dict)


def parse(
    recipe: Recipe, scripts: Sequence[str] = (), script_as: Sequence[str] = (), anchors: Sequence[str] = ()
) -> Choices:
    """Check the options against the recipe. A script with another name is chosen by that.

    Raises LG203 for unknown scripts, LG311 for a bad ``--script-as`` and LG209 for a bad ``--anchor``.
    """
    files: dict[str, str] = {}
    for text in script_as:
        name, mark, file = text.partition("=")
        if not mark:
            raise _bad_file(f"--script-as {text}: there is no = in it", recipe)
        script = recipe.find(name).name
        try:
            file = inside(file)
        except ValueError as err:
            raise _bad_file(f"--script-as {text}: {err}", recipe) from err
        if file in files.values() or script in files:
            raise _bad_file(f"--script-as {text}: one file for each script, one script for each file", recipe)
        files[script] = file
    names = list(dict.fromkeys([*(recipe.find(script).name for script in scripts), *files]))
    lines: dict[str, list[int]] = {}
    for text in anchors:
        address, numbers = _anchor(recipe, names, text)
        lines[address] = sorted({*lines.get(address, []), *numbers})
    return Choices(names, files, lines)


def adapt(recipe: Recipe, choices: Choices, state: State | None, root: Path) -> tuple[Recipe, Choices]:
    """The recipe as it is for this tree, and the choices with those that the state remembers.

    Raises LG311 if a script was patched in another file before.
    """
    files, lines = dict(choices.files), dict(choices.lines)
    back, again = (
        f"revert-patch {shlex.quote(str(root))}",
        f"apply-patch {recipe.upstream} --tree {shlex.quote(str(root))}",
    )
    if state is not None:
        gone = [name for name in state.scripts if name not in recipe.scripts]
        if gone:
            raise KitError(
                "LG203",
                f"the tree is patched for {', '.join(gone)}, which this version of the kit does not know",
                cause="it was patched by another version",
                fix=f"{back}; then {again}",
            )
        for name in state.scripts:
            had = state.script_files.get(name, recipe.scripts[name].file)
            if files.get(name, had) != had:
                raise KitError(
                    "LG311",
                    f"{name} was patched in {had}, not in {files[name]}",
                    cause="one tree holds a script once",
                    fix=f"{back}; then {again} --script-as {name}={files[name]}",
                )
        files = {**state.script_files, **files}
        lines = {**state.anchors, **lines}
    known = {edit.address for script in recipe.scripts.values() for edit in script.edits}
    lines = {address: numbers for address, numbers in lines.items() if address in known}
    others = {script.file: name for name, script in recipe.scripts.items() if name not in files}
    for name, file in files.items():
        if others.get(file) in choices.scripts:
            raise _bad_file(f"{file} would be patched as {name} and as {others[file]}", recipe)
    return recipe.under(files).at(lines), Choices(choices.scripts, files, lines)


def _anchor(recipe: Recipe, scripts: list[str], text: str) -> tuple[str, list[int]]:
    address, _, numbers = text.partition("=")
    if not re.fullmatch(r"[1-9][0-9]*(,[1-9][0-9]*)*", numbers):
        raise _bad_anchor(f"--anchor {text}: expected EDIT=LINE or EDIT=LINE,LINE", recipe, scripts)
    known = [edit.address for name in scripts or recipe.scripts for edit in recipe.scripts[name].edits]
    found = [item for item in known if address in (item, item.partition(".")[2])]
    if len(found) != 1:
        raise _bad_anchor(
            f"--anchor {text}: " + (f"say which script: {' or '.join(found)}" if found else f"no edit {address!r}"),
            recipe,
            scripts,
        )
    return found[0], [int(number) for number in numbers.split(",")]


def _bad_anchor(what: str, recipe: Recipe, scripts: list[str]) -> KitError:
    known = [edit.address for name in scripts or recipe.scripts for edit in recipe.scripts[name].edits]
    return KitError(
        "LG209",
        what,
        cause="known: " + ", ".join(known),
        fix="run it without --anchor: error LG201 prints the options to paste",
    )


def _bad_file(what: str, recipe: Recipe) -> KitError:
    return KitError(
        "LG311",
        what,
        cause="expected SCRIPT=FILE, the file as a path inside the tree",
        fix="write --script-as SCRIPT=FILE; scripts are " + ", ".join(recipe.scripts),
    )
