"""``patches/<upstream>/recipe.yaml``: which edits each training script gets, validated strictly.

Scripts that share their shape share a family: one list of edits with ``${name}`` placeholders, filled per script.
"""

from __future__ import annotations

import difflib
import hashlib
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from leangrpo_tools import data, yamlfile
from leangrpo_tools.codemods.params import PARAMS, InsertImport, Name, Params
from leangrpo_tools.errors import KitError
from leangrpo_tools.lock import RelativePath
from leangrpo_tools.reading import MIB, read_regular

PLACEHOLDER = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")
CORE = "leangrpo_core"
FIX = "correct the recipe; tools/leangrpo_tools/codemods/ documents each codemod's parameters"
Value = Annotated["str | int", Field(union_mode="left_to_right")]


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class RawEdit(_Strict):
    """One codemod with its parameters, how often it must match, and why it is made. ``file`` overrides the script's,
    ``name`` is what ``--anchor`` calls the edit (by default ``edit`` and its number)."""

    codemod: str
    params: dict[str, Any]
    count: int | str = 1
    reason: str = Field(min_length=10)
    file: str | None = None
    name: Name | None = None


class RawFamily(_Strict):
    """Edits shared by scripts of one shape, the names of the placeholders in them, and what some of those stand for in
    scripts that do not say."""

    parameters: list[Name] = []
    defaults: dict[str, Value] = {}
    edits: list[RawEdit]


class RawScript(_Strict):
    """One training script: its file, its family with values for the placeholders, or edits of its own. Without a
    ``rehearsal`` it says why it has none."""

    file: RelativePath
    family: str | None = None
    values: dict[str, Value] = {}
    edits: list[RawEdit] = []
    rehearsal: Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$")] | None = None
    not_rehearsed: Annotated[str, Field(min_length=10)] | None = None
    launch: list[RelativePath] = []
    updates_per_rollout: str
    warnings: list[str] = []


class RefusedScript(_Strict):
    """A training script that the kit leaves alone, and what of it the method cannot take."""

    file: RelativePath
    reason: str = Field(min_length=40)


class RawRecipe(_Strict):
    """The file as written. ``vendor`` is where the runtime goes, inside upstream's own import package."""

    format: Literal[1]
    upstream: str
    vendor: RelativePath
    families: dict[str, RawFamily] = {}
    scripts: dict[str, RawScript] = Field(min_length=1)
    refused: dict[str, RefusedScript] = {}


@dataclass(frozen=True)
class Edit:
    """One edit of one file, ready to be made.

    ``address`` (``script.name``) is what ``--anchor`` takes, ``lines`` are those chosen with it: of all places that
    match, these are the ones meant.
    """

    file: str
    codemod: str
    params: Params
    count: int
    reason: str
    address: str = field(default="", compare=False)
    lines: tuple[int, ...] = field(default=(), compare=False)


@dataclass(frozen=True)
class Script:
    """One training script of a recipe, placeholders filled. ``not_rehearsed`` is why ``rehearsal`` is empty."""

    name: str
    file: str
    edits: tuple[Edit, ...]
    rehearsal: str
    launch: tuple[str, ...]
    updates_per_rollout: str
    warnings: tuple[str, ...]
    not_rehearsed: str = ""


@dataclass(frozen=True)
class Recipe:
    """A recipe, resolved. ``sha256`` is that of the file. ``refused`` are scripts that are left alone."""

    upstream: str
    vendor: str
    scripts: dict[str, Script]
    sha256: str
    vendored: bool = True
    refused: dict[str, RefusedScript] = field(default_factory=dict)

    def without_vendor(self) -> Recipe:
        """The same edits, but the runtime is imported from an installed ``leangrpo_core`` instead of a copy."""
        package = self.vendor.replace("/", ".")

        def installed(edit: Edit) -> Edit:
            if not isinstance(edit.params, InsertImport):
                return edit
            statement = edit.params.statement.replace(f"from {package} import", f"from {CORE} import")
            return replace(edit, params=edit.params.model_copy(update={"statement": statement}))

        scripts = {
            name: replace(script, edits=tuple(map(installed, script.edits))) for name, script in self.scripts.items()
        }
        return replace(self, scripts=scripts, vendored=False)

    def find(self, name: str) -> Script:
        """The script called ``name`` in any case.

        Raises LG203 with the known and the nearest names, LG210 with the reason for a script that is left alone.
        """
        known = {item.lower(): item for item in self.scripts}
        if name.lower() in known:
            return self.scripts[known[name.lower()]]
        for other, left in self.refused.items():
            if name.lower() == other.lower():
                raise KitError(
                    "LG210",
                    f"{self.upstream}'s {other} ({left.file}) is left alone",
                    cause=left.reason,
                    fix="train it as it is: a patched tree runs it unchanged",
                )
        near = difflib.get_close_matches(name.lower(), list(known), n=1, cutoff=0.4)
        hint = f"; did you mean {known[near[0]]}?" if near else ""
        raise KitError(
            "LG203",
            f"{self.upstream} has no script {name!r}{hint}",
            cause=f"known: {', '.join(self.scripts)}",
            fix="leangrpo list",
        )

    def under(self, files: dict[str, str]) -> Recipe:
        """The recipe for a tree in which the named scripts lie in other files."""
        changed = dict(self.scripts)
        for name, file in files.items():
            script = changed[name]
            edits = tuple(replace(edit, file=file) if edit.file == script.file else edit for edit in script.edits)
            changed[name] = replace(script, file=file, edits=edits)
        return replace(self, scripts=changed)

    def moved(self, files: dict[str, dict[str, str]]) -> Recipe:
        """The recipe with other files beside a script's own: per script, the file for each that the recipe names."""
        changed = {
            name: replace(
                self.scripts[name],
                edits=tuple(replace(edit, file=new.get(edit.file, edit.file)) for edit in self.scripts[name].edits),
            )
            for name, new in files.items()
        }
        return replace(self, scripts={**self.scripts, **changed})

    def at(self, lines: dict[str, list[int]]) -> Recipe:
        """The recipe with the lines that were chosen by hand, by the address of the edit."""
        every = [edit for script in self.scripts.values() for edit in script.edits]
        chosen = [(edit, tuple(lines[edit.address])) for edit in every if edit.address in lines]

        def with_lines(edit: Edit) -> Edit:
            return next((replace(edit, lines=numbers) for other, numbers in chosen if other == edit), edit)

        scripts = {
            name: replace(script, edits=tuple(map(with_lines, script.edits))) for name, script in self.scripts.items()
        }
        return replace(self, scripts=scripts)

    def edits(self, scripts: list[str]) -> dict[str, list[Edit]]:
        """Per file, the edits that the named scripts need; an edit that two scripts share is made once."""
        found: dict[str, list[Edit]] = {}
        for name in scripts:
            for edit in self.scripts[name].edits:
                if edit not in found.setdefault(edit.file, []):
                    found[edit.file].append(edit)
        return found


def load(upstream: str, path: Path | None = None) -> Recipe:
    """Read the recipe of an upstream. Raises LG202 with every problem at once."""
    where = path or data.recipe_path(upstream)
    raw = yamlfile.load(where, RawRecipe, "LG202", FIX)
    problems: list[str] = []
    if raw.upstream != upstream:
        problems.append(f"upstream: is {raw.upstream!r}, but the folder belongs to {upstream!r}")
    scripts = {name: _script(name, script, raw, problems) for name, script in raw.scripts.items()}
    unused = set(raw.families) - {script.family for script in raw.scripts.values()}
    problems += [f"families.{name}: no script uses it" for name in sorted(unused)]
    problems += [f"refused.{name}: is among the scripts, too" for name in sorted(set(raw.refused) & set(raw.scripts))]
    if problems:
        raise yamlfile.problem_list("LG202", where, [(0, text) for text in dict.fromkeys(problems)], FIX)
    digest = hashlib.sha256(read_regular(where, 4 * MIB)).hexdigest()
    return Recipe(upstream, raw.vendor, scripts, digest, refused=raw.refused)


def scripts_of(upstream: str) -> set[str]:
    """The scripts that can be patched; none where there is no recipe. Raises LG202."""
    return set(load(upstream).scripts) if data.recipe_path(upstream).is_file() else set()


def refused_by(upstream: str) -> dict[str, str]:
    """Files of the scripts that the kit leaves alone, by name; none where there is no recipe. Raises LG202."""
    found = load(upstream).refused if data.recipe_path(upstream).is_file() else {}
    return {name: left.file for name, left in found.items()}


def _script(name: str, script: RawScript, raw: RawRecipe, problems: list[str]) -> Script:
    place = f"scripts.{name}"
    edits: list[Edit] = []
    family = raw.families.get(script.family) if script.family else None
    if script.family and family is None:
        problems.append(f"{place}.family: there is no family {script.family!r}")
    declared = set(family.parameters) if family else set()
    defaults = family.defaults if family else {}
    values = defaults | script.values
    problems += [
        f"families.{script.family}.defaults: {item} is not a parameter" for item in sorted(set(defaults) - declared)
    ]
    problems += [f"{place}.values: {item} is missing" for item in sorted(declared - set(values))]
    problems += [f"{place}.values: {item} is not a parameter" for item in sorted(set(script.values) - declared)]
    if family:
        for index, edit in enumerate(family.edits):
            where = f"families.{script.family}.edits[{index}]"
            made = _edit(edit, script, values, where, problems)
            edits += [made] if made else []
    for index, edit in enumerate(script.edits):
        made = _edit(edit, script, {}, f"{place}.edits[{index}]", problems)
        edits += [made] if made else []
    if not family and not script.edits:
        problems.append(f"{place}: has neither a family nor edits")
    if (script.rehearsal is None) == (script.not_rehearsed is None):
        problems.append(f"{place}: must have a rehearsal, or not_rehearsed with the reason")
    names = [raw_edit.name for raw_edit in [*(family.edits if family else []), *script.edits]]
    doubled = sorted({item for item in names if item and names.count(item) > 1})
    problems += [f"{place}: two edits are called {item}" for item in doubled]
    addressed = [
        replace(edit, address=f"{name}.{label or f'edit{number}'}")
        for number, (edit, label) in enumerate(zip(edits, names, strict=False), 1)
    ]
    return Script(
        name,
        script.file,
        tuple(addressed),
        script.rehearsal or "",
        tuple(script.launch),
        script.updates_per_rollout,
        tuple(script.warnings),
        script.not_rehearsed or "",
    )


def _edit(raw: RawEdit, script: RawScript, values: dict[str, Any], place: str, problems: list[str]) -> Edit | None:
    known = PARAMS.get(raw.codemod)
    if known is None:
        problems.append(f"{place}.codemod: there is no codemod {raw.codemod!r}; known: {', '.join(PARAMS)}")
        return None
    count = _fill(raw.count, values, f"{place}.count", problems)
    if not isinstance(count, int) or count < 1:
        problems.append(f"{place}.count: must be a number of at least 1 (found {count!r})")
        return None
    file = _fill(raw.file or script.file, values, f"{place}.file", problems)
    try:
        params = known.model_validate(_fill(raw.params, values, f"{place}.params", problems))
    except ValidationError as err:
        for item in err.errors(include_url=False, include_context=False, include_input=False):
            inner = ".".join(str(step) for step in item["loc"])
            problems.append(f"{place}.params{'.' if inner else ''}{inner}: {item['msg'].removeprefix('Value error, ')}")
        return None
    return Edit(file, raw.codemod, params, count, raw.reason)


def _fill(value: Any, values: dict[str, Any], place: str, problems: list[str]) -> Any:
    """Replace ``${name}``; a string that is nothing but one placeholder takes the value's own type."""
    if isinstance(value, dict):
        return {key: _fill(item, values, f"{place}.{key}", problems) for key, item in value.items()}
    if isinstance(value, list):
        return [_fill(item, values, f"{place}[{index}]", problems) for index, item in enumerate(value)]
    if not isinstance(value, str):
        return value
    missing = [name for name in PLACEHOLDER.findall(value) if name not in values]
    if missing:
        problems.append(f"{place}: no value for {', '.join(f'${{{name}}}' for name in missing)}")
        return value
    whole = PLACEHOLDER.fullmatch(value)
    if whole:
        return values[whole[1]]
    return PLACEHOLDER.sub(lambda found: str(values[found[1]]), value)
