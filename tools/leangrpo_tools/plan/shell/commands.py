"""Simple commands: calls of functions, builtins that change variables, and commands in strings for another shell."""

from __future__ import annotations

import itertools
import re
from typing import TYPE_CHECKING

from leangrpo_tools.plan.shell.assignments import ASSIGNMENT, Assignments
from leangrpo_tools.plan.shell.reading import Command
from leangrpo_tools.plan.shell.state import ABSENT, State, Unknown, Value, known, merge

if TYPE_CHECKING:
    from tree_sitter import Node

_SHELLS, _REMOTE = ("bash", "sh", "zsh", "dash"), ("ssh", "pdsh")
_PASSING = ("exec", "env", "nohup", "time", "command", "setsid", "nice", "srun", "timeout", "stdbuf")
"""Programs that hand the environment on as it is, but for `env -u`, `srun --export`."""
_TRANSPARENT = ("command", "builtin", "time")
_DECLARING = ("export", "declare", "typeset", "local", "readonly", "unset")
_READS = ("read", "mapfile", "readarray", "getopts")
_HOOK = re.compile(r"\$\((\S*/)?(conda|mamba|micromamba|pyenv)\s[^()]*\)")


class Commands(Assignments):
    """Follows the simple commands of a text."""

    def text_of(self, text: str, first: int = 0) -> None:
        """Follow the statements of a text, `first` lines after the file's beginning."""
        raise NotImplementedError

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
            exports = self._exported() | given
            told = {name: self._holes.show(value) if isinstance(value, str) else f"${name}"
                    for name, value in exports.items() if value != ()}  # fmt: skip
            shown = [self._holes.show(word) for word in raw]
            self.reading.commands.append(Command(self._fixed or self._line, shown, list(self._outer), told))
            self._strings(raw, shown, exports, texts)
            for word in words[1:] if raw[0] == "let" else []:
                self._compute(self._words.one(word))
            start = next((at for at, word in enumerate(raw) if word not in _TRANSPARENT), 0)
            if start and f"{raw[start]}()" in self.state.variables and raw[start - 1] == "time":
                self._call(raw[start:], given)
            else:
                self._builtin(raw[start:], self._words.text(node))

    def _exported(self) -> dict[str, Value]:
        """What programs get: not known where only some ways export it."""
        variables, found = self.state.variables, {}
        for key in sorted(variables):
            name, value = key.removeprefix("export "), variables.get(key.removeprefix("export "))
            if (key != name or ("set -a" in variables and name.isidentifier())) and isinstance(value, (str, Unknown)):
                found[name] = value if variables.get(f"export {name}") == "" else merge([value, None], "")
        return found

    def _call(self, words: list[str], given: dict[str, Value]) -> None:
        name, variables = f"{words[0]}()", self.state.variables
        self._called.add(name)
        body = variables[name]
        bodies = body.alternatives if isinstance(body, Unknown) else (body,)
        outer, self._escapes = self._escapes, [[]]
        scopes = {key: value for key, value in variables.items() if key.startswith("local ")}
        for key in scopes:
            del variables[key]
        for key, value in {**given, "@": tuple(words[1:])}.items():
            variables[f"local {key}"] = variables.get(key, ABSENT)
            variables[key] = value
        before, ways = self.state.copy(), []
        for way in bodies:
            self.state.become(before)
            if isinstance(way, tuple):
                self.text_of(way[0], int(way[1]))
            ways.append(self.state.copy())
        self.state.become(self._join([*ways, *self._escapes[0]], f"line {self._line}: it changes in {name}"))
        for key in [key for key in self.state.variables if key.startswith("local ")]:
            self._restore(key.removeprefix("local "), self.state.variables.pop(key))
        self.state.variables.update(scopes)
        self._escapes = outer

    def _strings(self, raw: list[str], words: list[str], exports: dict[str, Value], texts: list[str]) -> None:
        """Commands in strings for another shell."""
        names = [word.rsplit("/", 1)[-1] for word in words]
        place = next((place for place, name in enumerate(names) if name in (*_SHELLS, *_REMOTE, "sbatch")), None)
        if place is None:
            return
        rest, outer = raw[place + 1 :], words[:place]
        variables = {**exports, **{f"export {name}": "" for name in exports}}
        told = set(re.findall(r"([A-Za-z_]\w*)=", " ".join(raw[:place])))
        exact = {match[1]: match[2] for word in raw[:place] if (match := ASSIGNMENT.fullmatch(word))}
        state = State()
        if names[place] in _SHELLS:
            state = State({**variables, **exact})
            passed = all(
                name in _PASSING or ASSIGNMENT.fullmatch(name) or re.match(r"-|\d", name) or before.startswith("-")
                for before, name in zip(["", *names], names[:place], strict=False)
            )
            if not passed or re.search(r"(^| )env .*-| --export", " ".join(outer)):
                why = f"line {self._line}: what {names[0]} hands on is not known"
                state.variables = {name: merge([value, None], why) for name, value in variables.items()}
                state.variables.update({name: Unknown(why) for name in told})
                state.lost = why if "env" in names[:place] else ""
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
            outer, texts, state = [], [*wraps, *texts], State(variables)
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
        elif name in _DECLARING:
            if any(word.startswith("-") and word != "-x" for word in words) or not all(map(known, words)):
                self.state.lose(why)
            for word in words[1:]:
                variable, sign, value = word.partition("=")
                if variable.isidentifier() and (sign or name != "export"):
                    self._put(variable, value if name == "export" else Unknown(why))
                self.state.variables.update({f"export {variable}": ""} if name == "export" else {})
        elif name == "set":
            self._set_arguments(words)
        elif name == "shift":
            given = self.state.variables.get("@")
            count = int(words[1]) if words[1:] and words[1].isdigit() else 1
            if (
                isinstance(given, tuple)
                and len(words) < 3
                and all(map(known, words))
                and not self._holes.is_many(given[:count])
            ):
                self._put("@", given[count if count <= len(given) else 0 :])
            elif given is not None:
                self._put("@", Unknown(why))
        elif name in ("source", "."):
            if len(words) < 2 or not re.search(r"(^|bin/)activate$|/profile\.d/\w+\.sh$", self._holes.show(words[1])):
                shown = self._holes.show(words[1]) if len(words) > 1 else ""
                self.state.lose(f"{why} {shown} may set it")
        elif name == "eval":
            if all(map(known, words)):
                self._inner([], " ".join(words[1:]), self.state)
            elif not _HOOK.search(text):  # as in `eval "$(conda shell.bash hook)"`
                self.state.lose(f"{why} of what is not known")

    def _restore(self, name: str, value: Value) -> None:
        """The outer variable comes back; where only some ways had an own one, it is not known."""
        if isinstance(value, Unknown):
            value = Unknown(value.why, (*(item for item in value.alternatives if item != ABSENT), None))
        self.state.variables[name] = value
        if value == ABSENT:
            del self.state.variables[name]

    def _set_arguments(self, words: list[str]) -> None:
        if any(re.fullmatch(r"-\w*a\w*|allexport", word) for word in words[1:]):
            self.state.variables["set -a"] = ""
        after = [word for before, word in itertools.pairwise(words) if not re.search(r"^[-+]\w*o$", before)]
        if "--" in words:
            self._put("@", tuple(words[words.index("--") + 1 :]))
        elif not all(word[:1] in ("-", "+") for word in after):
            self._put("@", Unknown(f"line {self._line}: set"))
