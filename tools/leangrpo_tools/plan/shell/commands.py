"""Simple commands: assignments, builtins that change variables, and commands in strings for another shell."""

from __future__ import annotations

import itertools
import re
from typing import TYPE_CHECKING

from leangrpo_tools.plan.shell.holes import Holes
from leangrpo_tools.plan.shell.reading import Command, Reading
from leangrpo_tools.plan.shell.state import State, Unknown, Value, join, known, merge
from leangrpo_tools.plan.shell.tree import Work
from leangrpo_tools.plan.shell.words import Words

if TYPE_CHECKING:
    from tree_sitter import Node

_LONGEST = 10_000
_SHELLS, _REMOTE = ("bash", "sh", "zsh", "dash"), ("ssh", "pdsh")
_PASSING = ("exec", "env", "nohup", "time", "command", "nice", "srun", "timeout", "stdbuf", "setsid")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.S)
_READS = ("read", "mapfile", "readarray", "getopts")


class Commands:
    """Follows the simple commands of a text.

    Attributes:
        state: what is known at the place that is read.
    """

    def __init__(
        self, reading: Reading, state: State, holes: Holes, work: Work, outer: list[str], line: int | None = None
    ) -> None:
        self.reading, self.state, self._holes, self._work = reading, state, holes, work
        self._outer, self._fixed, self._line, self._first, self._depth = outer, line, line or 0, 0, 0
        self._words = Words(state, holes, reading.defaults, reading.reasons)
        self._escapes: list[list[State]] = []
        self._locals: dict[str, Value | None] = {}
        self._bodies: dict[str, tuple[str, ...]] = {}
        self._called: set[str] = set()
        self._ever: dict[str, Value] = {}
        self._doubt: str | None = None
        self._odd: dict[str, str] = {}
        self._texts: list[str] = []  # what the next commands read

    def text_of(self, text: str, first: int = 0) -> None:
        """Follow the statements of a text, `first` lines after the file's beginning."""
        raise NotImplementedError

    # assignments

    def _put(self, name: str, value: Value, index: str | None = None) -> None:
        why = f"line {self._line}"
        if index is not None:
            value = self._element(name, value, index)
        if not isinstance(value, Unknown) and (len(value) > _LONGEST or sum(map(len, value)) > _LONGEST):
            value = Unknown(f"{why}: it is too long")
        if name in self._odd or self._doubt:
            value = merge([self.state.variables.get(name), value, None], self._odd.get(name) or self._doubt or "")
        if isinstance(value, str) and len(value) == 1 and not known(value):
            inner = self._holes.value(value)
            value = Unknown(why, inner.alternatives if isinstance(inner, Unknown) else (None,))
        if isinstance(value, Unknown) and not value.why:
            value = Unknown(why, value.alternatives)
        self.state.variables[name] = value
        self._ever[name] = merge([self._ever.get(name, value), value], "it has several values")
        if not known(value):
            self.reading.reasons[name] = value.why if isinstance(value, Unknown) else why

    def _element(self, name: str, value: Value, index: str) -> Value:
        items = self.state.variables.get(name, ())
        items = (items,) if isinstance(items, str) else items
        place = self._words.number(index)
        if isinstance(items, Unknown) or not isinstance(value, str) or self._holes.is_many(items):
            return Unknown(f"line {self._line}: {name}[{index}]")
        if place is not None and 0 <= place <= len(items):
            return (*items[:place], value, *items[place + 1 :])
        return Unknown(f"line {self._line}: {name}[{index}]")

    def _assignment(self, node: Node) -> tuple[str, Value, str | None]:
        """Name, value and index of one assignment."""
        target, sign, *value = node.children
        name, bracket, index = self._words.text(target).partition("[")
        place = index.removesuffix("]") if bracket else None
        new: Value = self._words.one(value[0]) if value else ""
        if value and value[0].type == "array":
            items = [child for child in value[0].named_children if child.type != "comment"]
            own_places = re.search(r"(?:^|[\s(])\[[^\]]*\]=", self._words.text(value[0]))
            new = Unknown() if own_places else tuple(self._words.all(items))
        if self._words.text(sign) == "+=":
            old = self.state.variables.get(name)
            new = Unknown(f"line {self._line}: it is added to") if place is not None else self._added(old, new)
        return name, new, place

    def _added(self, old: Value | None, new: Value) -> Value:
        if old is None or isinstance(new, Unknown):
            return Unknown(f"line {self._line}: it is added to")
        if isinstance(old, Unknown):
            added = (None if item is None else self._added(item, new) for item in old.alternatives)
            return Unknown(old.why, tuple(added))
        if isinstance(new, tuple):
            return (*((old,) if isinstance(old, str) else old), *new)
        if isinstance(old, str):
            return old + new
        return (old[0] + new, *old[1:]) if old else new

    def _variable_assignment(self, node: Node) -> None:
        self._put(*self._assignment(node))

    def _variable_assignments(self, node: Node) -> None:
        for child in node.named_children:
            self._put(*self._assignment(child))

    def _declaration_command(self, node: Node) -> None:
        kind, options, why = self._words.text(node.children[0]), "", f"line {self._line}"
        local = kind in ("local", "declare", "typeset")
        for child in node.children[1:]:
            if child.type == "variable_assignment":
                name, value, index = self._assignment(child)
            else:
                word = " ".join(self._words.all([child])) if child.type != "variable_name" else self._words.text(child)
                match = _ASSIGNMENT.fullmatch(word)
                name, value, index = (
                    (match[1], match[2], None) if match else (word, self.state.variables.get(word), None)
                )
                if word[:1] in ("-", "+"):
                    options += word
                    continue
                if not re.fullmatch(r"\w+", name):
                    self.state.lose(f"{why}: {kind} of names that are not known")
                    continue
                value = () if value is None and kind == "local" else value
            if local and self._escapes:
                self._locals.setdefault(name, self.state.variables.get(name))
            if kind == "export" or "x" in options:
                self.state.exported.add(name)
            if re.search(r"[Ailun]", options):
                self._odd[name], value = f"{why}: {kind} {options}", Unknown()
            if "n" in options:
                self._doubt = f"{why}: {kind} {options}"
                self.state.lose(self._doubt)
            if value is not None and "f" not in options:
                self._put(name, value, index)

    def _unset_command(self, node: Node) -> None:
        for word in self._words.all(node.named_children):
            name = word.partition("[")[0]
            if not known(word):
                self.state.lose(f"line {self._line}: unset")
            elif not word.startswith("-"):
                self._put(name, () if name == word else Unknown())

    def _compute(self, text: str) -> None:
        """`((TEXT))`, or what `let` gets: a value is known for plain assignments, such as `N += 2`."""
        match = re.fullmatch(r"\s*([A-Za-z_]\w*)\s*([-+*/%]?)=(?!=)(.+)|\s*([A-Za-z_]\w*)(\+\+|--)\s*", text, re.S)
        self._words.number("" if match else text)
        if match:
            name, sign, value = match[1] or match[4], match[2] or (match[5] or "")[:1], match[3] or "1"
            number = self._words.number(f"{name} {sign} ({value})" if sign else value)
            self._put(name, Unknown() if number is None else str(number))

    # commands

    def _command(self, node: Node) -> None:
        given: dict[str, Value] = {}
        texts = list(self._texts)
        words = []
        for child in node.children:
            if child.type == "variable_assignment":
                name, given[name], _ = self._assignment(child)
            elif child.type == "herestring_redirect":
                texts.append(self._words.one(child.children[-1]))
            elif not child.type.endswith("redirect"):
                words.append(child)
        raw = self._words.all(words)
        if not raw:
            for name, value in given.items():
                self._put(name, value)
        elif f"{raw[0]}()" in self.state.variables:
            self._call(raw, given)
        else:
            have = {name: self.state.variables[name] for name in sorted(self.state.exported)
                    if name in self.state.variables}  # fmt: skip
            exports = have | given
            told = {name: self._holes.show(value) for name, value in exports.items() if isinstance(value, str)}
            told |= {name: f"${name}" for name, value in given.items() if not isinstance(value, str)}
            shown = [self._holes.show(word) for word in raw]
            self.reading.commands.append(Command(self._fixed or self._line, shown, list(self._outer), told))
            self._strings(raw, shown, exports, texts)
            for word in words[1:] if raw[0] == "let" else []:
                self._compute(self._words.one(word))
            self._builtin(raw, self._words.text(node))

    def _call(self, words: list[str], given: dict[str, Value]) -> None:
        name, variables = f"{words[0]}()", self.state.variables
        self._called.add(name)
        body = variables[name]
        bodies = body.alternatives if isinstance(body, Unknown) else (body,)
        outer = self._escapes, self._locals
        self._escapes, self._locals = [[]], {key: variables.get(key) for key in (*given, "@")}
        variables.update({**given, "@": tuple(words[1:])})
        before, ways = self.state.copy(), []
        for way in bodies:
            self.state.become(before)
            if isinstance(way, tuple):
                self.text_of(way[0], int(way[1]))
            ways.append(self.state.copy())
        self.state.become(join([*ways, *self._escapes[0]], f"line {self._line}: it changes in {name}"))
        for key, value in self._locals.items():
            self.state.variables.pop(key, None)
            self.state.variables.update({} if value is None else {key: value})
        self._escapes, self._locals = outer

    def _strings(self, raw: list[str], words: list[str], exports: dict[str, Value], texts: list[str]) -> None:
        """Commands in strings for another shell."""
        names = [word.rsplit("/", 1)[-1] for word in words]
        place = next((place for place, name in enumerate(names) if name in (*_SHELLS, *_REMOTE, "sbatch")), None)
        if place is None:
            return
        rest, outer = raw[place + 1 :], words[:place]
        variables = {name: () if isinstance(value, tuple) else value for name, value in exports.items()}
        state = State()
        if names[place] in _SHELLS:
            if place == 0 or names[0] in _PASSING:
                state = State(variables, set(exports))
                matches = [match for word in raw[:place] if (match := _ASSIGNMENT.fullmatch(word))]
                state.variables.update({match[1]: match[2] for match in matches})
            if "env" in names[:place] and any(word.startswith("-") for word in outer):
                state = State(lost=f"line {self._line}: env")
            at = next((at for at, word in enumerate(rest) if not word.startswith(("-", "+"))), len(rest))
            sure = not self._holes.is_many(tuple(rest[at + 1 :]))
            state.variables["@"] = tuple(rest[at + 2 :]) if sure else Unknown()
            if at < len(rest):
                texts = rest[at : at + 1] if any(re.fullmatch(r"-\w*c\w*", word) for word in rest[:at]) else []
        elif names[place] in _REMOTE:
            outer, texts = words[: place + 1], [*(word for word in rest if re.search(r"\s", word)), *texts]
        else:
            wraps = [word.partition("=")[2] or after for word, after in itertools.pairwise([*rest, ""])
                     if re.match(r"--wrap(=|$)", word)]  # fmt: skip
            outer, texts, state = [], [*wraps, *texts], State(variables, set(exports))
        for text in texts:
            self._inner(outer, text, state.copy())

    def _inner(self, outer: list[str], text: str, state: State) -> None:
        """Follow a text in a string."""
        reader = type(self)(self.reading, state, self._holes, self._work, [*self._outer, *outer], self._line)
        reader._depth = self._depth + 5
        reader.text_of(text)

    def _builtin(self, words: list[str], text: str) -> None:
        name, why = words[0], f"line {self._line}: {words[0]}"
        if not known(name):
            if self._bodies:
                self.state.lose(f"line {self._line}: it may call a function")
        elif name in ("return", "break", "continue"):
            for escapes in self._escapes:
                escapes.append(self.state.copy())
            self.state.dead = bool(self._escapes)
        elif name == "exit" or (name == "exec" and len(words) > 1):
            self.state.dead = True
        elif name in _READS or words[:2] == ["printf", "-v"]:
            if not all(map(known, words)):
                self.state.lose(why)
            for variable in [*(word for word in words[1:] if re.fullmatch(r"[A-Za-z_]\w*", word)), "MAPFILE"]:
                self._put(variable, Unknown(why))
        elif name == "set":
            self._set_arguments(words)
        elif name == "shift":
            given = self.state.variables.get("@")
            count = int(words[1]) if words[1:] and words[1].isdigit() else 1
            if (
                isinstance(given, tuple)
                and len(words) < 3
                and all(map(known, words))
                and not self._holes.is_many(given)
            ):
                self._put("@", given[count if count <= len(given) else 0 :])
            elif given is not None:
                self._put("@", Unknown(why))
        elif name in ("source", "."):
            if len(words) < 2 or words[1].rsplit("/", 1)[-1] not in ("activate", "conda.sh"):
                shown = self._holes.show(words[1]) if len(words) > 1 else ""
                self.state.lose(f"{why} {shown} may set it")
        elif name == "eval":
            if all(map(known, words)):
                self._inner([], " ".join(words[1:]), self.state)
            elif "hook" not in text:  # as in `eval "$(conda shell.bash hook)"`
                self.state.lose(f"{why} of what is not known")

    def _set_arguments(self, words: list[str]) -> None:
        after = [word for before, word in itertools.pairwise(words) if not re.search(r"^[-+]\w*o$", before)]
        if "--" in words:
            self._put("@", tuple(words[words.index("--") + 1 :]))
        elif not all(word[:1] in ("-", "+") for word in after):
            self._put("@", Unknown(f"line {self._line}: set"))
