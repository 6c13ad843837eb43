"""What is asked of ``apply``, which scripts of the tree at hand that means, and what comes of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from leangrpo_tools import absent, patchplan
from leangrpo_tools.choices import Choices
from leangrpo_tools.errors import KitError
from leangrpo_tools.follow import follow
from leangrpo_tools.recipe import Recipe
from leangrpo_tools.state import State
from leangrpo_tools.tree import Tree


@dataclass
class ApplyResult:
    """What ``apply`` did. ``diff`` is filled by a dry run, ``edits`` lists the places by file, ``skipped`` says why,
    ``absent`` are files of scripts that this tree does not have and nobody asked for."""

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
    skipped: dict[str, dict[str, object]] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)
    diff: bytes = b""
    fetch_seconds: float = 0.0
    patch_seconds: float = 0.0

    @property
    def exit_code(self) -> int:
        """1 if a script that was asked for is not patched."""
        return 1 if self.skipped else 0

    def to_json(self) -> dict[str, object]:
        """Plain data for ``--json``."""
        plain: dict[str, object] = {**self.__dict__, "ok": not self.skipped, "dest": str(self.dest)}
        plain["diff"] = self.diff.decode("utf-8", "replace")
        return plain


@dataclass(frozen=True)
class Wish:
    """What the options ask for."""

    choices: Choices
    dry_run: bool
    allow_partial: bool
    strict_pin: bool
    vendored: bool | None


def select(
    tree: Tree, recipe: Recipe, wish: Wish, choices: Choices, state: State | None, result: ApplyResult
) -> tuple[Recipe, list[str]]:
    """The scripts to patch, and the recipe with their helper files as they are called here. Fills ``result``.

    Scripts that nobody named and that are not in the tree are no error, unless it has none, or the pin is asked for.
    Raises LG306 for those, and with ``allow_partial`` LG201 if no script can be patched.
    """
    had = state.scripts if state else []
    default = recipe.scripts if wish.allow_partial else had or recipe.scripts
    chosen = [script for script in recipe.scripts if script in {*had, *(choices.scripts or default)}]
    if not (choices.scripts or wish.strict_pin):
        result.absent = absent.scripts(tree, recipe, [name for name in chosen if name not in had])
        chosen = [name for name in chosen if name not in result.absent]
        if not chosen:
            raise absent.nothing(tree, recipe)
        if result.absent:
            listed = ", ".join(f"{name} ({file})" for name, file in result.absent.items())
            result.notices.append(f"not in this tree: {listed}; for one with another name: --script-as NAME=FILE")
    skipped: dict[str, KitError] = {}
    for name in chosen:
        try:
            recipe, moved = follow(tree, recipe, [name])
            result.notices += moved
        except KitError as err:
            if not wish.allow_partial:
                raise
            skipped[name] = err
    if wish.allow_partial:
        chosen, others = patchplan.possible(tree, recipe, [name for name in chosen if name not in skipped], state)
        skipped |= others
        result.skipped = {name: err.to_json() for name, err in skipped.items()}
        if not chosen:
            raise KitError(
                "LG201",
                "nothing was written; no script can be patched\n"
                + "\n".join(f"{name}: {err.code}: {err.what}" for name, err in skipped.items()),
                cause="each script has a reason of its own",
                fix="leangrpo explain " + next(iter(skipped.values())).code,
            )
    result.scripts = chosen
    return recipe, chosen
