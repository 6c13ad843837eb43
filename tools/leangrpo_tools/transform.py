"""Make a recipe's edits of one file, in memory: find every anchor, count, rewrite, and check the result."""

from __future__ import annotations

import shlex
import warnings
from dataclasses import dataclass, field

import libcst as cst

from leangrpo_tools.codemods.base import Found, Match, NameTaken
from leangrpo_tools.codemods.params import WrapCall
from leangrpo_tools.codemods.registry import CODEMODS
from leangrpo_tools.codemods.source import Source
from leangrpo_tools.errors import KitError
from leangrpo_tools.recipe import Edit

SHOWN = 12


@dataclass(frozen=True)
class Place:
    """Where an edit matched: lines are those of the file before the patch."""

    codemod: str
    anchor: str
    lines: tuple[int, ...]
    reason: str


@dataclass(frozen=True)
class Patched:
    """The new bytes of a file and the places that were changed."""

    file: str
    data: bytes
    places: tuple[Place, ...]


@dataclass
class Mismatch:
    """An anchor that matched more or less often than the recipe says, or a name that is taken."""

    file: str
    edit: Edit
    anchor: str
    found: int
    lines: list[int] = field(default_factory=list)
    candidates: list[tuple[int, str]] = field(default_factory=list)
    places: list[tuple[int, str]] = field(default_factory=list)
    taken: str | None = None

    def text(self, named: set[tuple[int, str]] | None = None) -> str:
        """Several lines for the message. ``named`` are functions listed already, and those that this adds."""
        if self.taken:
            where = ", ".join(map(str, self.lines))
            return f"{self.file}: {self.edit.codemod}: the name {self.taken!r} is already used there, line {where}"
        counts = f"expected {self.edit.count}, found {self.found}"
        if self.lines:
            counts += f" (line {', '.join(map(str, self.lines))})"
        lines = [f"{self.file}: {self.edit.codemod}: {self.anchor}: {counts}"]
        if self.edit.lines:
            lines[0] += f"; chosen by --anchor: {', '.join(map(str, self.edit.lines))}"
        if self.found:
            # Ready to paste; several lines go behind one another, with commas.
            words = f"--anchor {self.edit.address}="
            lines += [f"    found {self.file}:{line}: {text}   {words}{line}" for line, text in self.places]
        shown = list(dict.fromkeys(sorted(self.candidates)))
        if named is not None:
            functions = [item for item in shown if item[1].startswith("def ")]
            shown = [item for item in shown if item not in named]
            named.update(functions)
        lines += [f"    candidate {self.file}:{line}: {words}" for line, words in shown[:SHOWN]]
        if len(shown) > SHOWN:
            lines.append(f"    ... and {len(shown) - SHOWN} more")
        return "\n".join(lines)


def describe(wrong: list[Mismatch]) -> str:
    """All mismatches as text."""
    named: dict[str, set[tuple[int, str]]] = {}
    return "\n".join(item.text(named.setdefault(item.file, set())) for item in wrong)


def transform(file: str, data: bytes, edits: list[Edit], where: str = "") -> Patched | list[Mismatch]:
    """Apply ``edits`` to the bytes of ``file``, or say which anchors do not match. Nothing is written.

    ``where`` is the file's path for a command in the message, if that is not ``file``.

    Raises LG201 where two scripts want other edits of one call, LG204 for a file that is not valid Python, LG205 for
    one that cannot be reproduced byte for byte and LG207 if the result were not valid.
    """
    check_syntax(file, data, "LG204", where or file)
    source = _parse(file, data)
    wrong: list[Mismatch] = []
    places: list[Place] = []
    matches: list[Match] = []
    wrapped: dict[tuple[int, str], Edit] = {}
    for edit in edits:
        try:
            found = CODEMODS[edit.codemod](source, edit.params)
        except NameTaken as err:
            wrong.append(Mismatch(file, edit, "", 0, lines=err.lines, taken=err.name))
            continue
        lines = [match.line for match in found.matches]
        if edit.lines and set(edit.lines) <= set(lines) and not _shared(lines, edit):
            found.keep(edit.lines)
            lines = [match.line for match in found.matches]
        elif edit.lines or len(lines) != edit.count:
            shown = [(line, source.shown(line)) for line in dict.fromkeys(lines)]
            wrong.append(Mismatch(file, edit, found.anchor, len(lines), lines, _others(found, lines), shown))
            continue
        _only_once(file, edit, found.matches, wrapped)
        places.append(Place(edit.codemod, found.anchor, tuple(sorted(lines)), edit.reason))
        matches += [*found.matches, *found.companions]
    if wrong:
        return wrong
    result = _rewrite(source, matches).bytes
    check_syntax(file, result, "LG207")
    return Patched(file, result, tuple(places))


def _only_once(file: str, edit: Edit, found: list[Match], wrapped: dict[tuple[int, str], Edit]) -> None:
    """Refuse a call that two scripts, which share a file here, would wrap with other arguments."""
    if not isinstance(edit.params, WrapCall):
        return
    for match in found:
        other = wrapped.setdefault((id(match.node), edit.params.wrapper), edit)
        if other is not edit:
            raise KitError(
                "LG201",
                f"nothing was written; {file}:{match.line}: {other.address} and {edit.address} differ on one call",
                cause="these scripts have a file in common in this tree, and two in the recipe",
                fix=f"patch one of them: --script {other.address.partition('.')[0]}",
            )


def _shared(lines: list[int], edit: Edit) -> bool:
    """Whether a chosen line holds several matches, so that it does not say which of them is meant."""
    chosen = [line for line in lines if line in edit.lines]
    return len(set(chosen)) < len(chosen) != edit.count


def _others(found: Found, lines: list[int]) -> list[tuple[int, str]]:
    return found.candidates if not lines else [item for item in found.candidates if item[0] not in lines]


def _parse(file: str, data: bytes) -> Source:
    try:
        module = cst.parse_module(data)
    except (cst.ParserSyntaxError, SyntaxError, UnicodeDecodeError, LookupError) as err:
        raise KitError(
            "LG205",
            f"{file}: Python accepts this file, but the parser that would patch it does not: {err}",
            fix="save the file as UTF-8 and try again",
        ) from err
    source = Source(module)
    if source.text.encode(module.encoding) != data:
        raise KitError(
            "LG205",
            f"{file}: its bytes cannot be reproduced exactly (encoding {module.encoding})",
            cause="mixed or unusual line ends or encodings",
            fix="save the file as UTF-8 with one kind of line end and try again",
        )
    return source


def check_syntax(file: str, data: bytes, code: str, where: str = "") -> None:
    """Parse and compile the bytes, without running them. Raises ``KitError(code)``."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compile(data, file, "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as err:
        line = getattr(err, "lineno", None)
        place = f"{file}:{line}" if line else file
        words = getattr(err, "msg", str(err))
        if code == "LG204":
            raise KitError(
                code,
                f"{place}: not valid Python: {words}",
                cause="an edit in progress, merge markers, or syntax newer than the Python that runs this command",
                fix=f"python -m py_compile {shlex.quote(where)}, which shows the place",
            ) from err
        raise KitError(code, f"{place}: the patched text is not valid Python: {words}", fix="report this file") from err


def _rewrite(source: Source, matches: list[Match]) -> cst.Module:
    todo: dict[int, list[Match]] = {}
    on_the_way: set[int] = {id(source.module)}
    for match in matches:
        todo.setdefault(id(match.node), []).append(match)
        on_the_way.update([id(match.node), *(id(node) for node in source.above(match.node))])

    class Rewrite(cst.CSTTransformer):
        def on_visit(self, node: cst.CSTNode) -> bool:
            return id(node) in on_the_way

        def on_leave(self, original_node: cst.CSTNode, updated_node: cst.CSTNode) -> object:  # type: ignore[override]
            own = todo.get(id(original_node))
            if not own:
                return updated_node
            node = updated_node
            for match in own:
                node = match.rewrite(node)
            before = [new for match in own for new in match.before]
            after = [new for match in own for new in match.after]
            return cst.FlattenSentinel([*before, node, *after]) if before or after else node

    result = source.module.visit(Rewrite())
    assert isinstance(result, cst.Module)
    return result
