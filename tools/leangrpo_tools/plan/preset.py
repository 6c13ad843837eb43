"""A preset of upstream's Python config: which file and function, what the command line overrides, and its values."""

from __future__ import annotations

import ast
import math
from dataclasses import dataclass
from pathlib import Path

from leangrpo_tools.errors import KitError
from leangrpo_tools.plan import launch
from leangrpo_tools.plan.facts import ConfigFacts
from leangrpo_tools.plan.pyeval import Evaluator
from leangrpo_tools.plan.pynames import Function, Module
from leangrpo_tools.plan.pyvalues import Entries, Refused, Unknown

_TRUE, _FALSE = ("true", "t", "1"), ("false", "f", "0")
_AS_TEXT = "the config is read as text and never run"


@dataclass(frozen=True)
class Chosen:
    """A preset that is asked for.

    Attributes:
        root: upstream's tree.
        file: the config's file in it.
        name: what is given to the config's function; None: nothing.
        overrides: entries and their new values as text; None for a switch that is turned on.
    """

    root: Path
    file: Path
    name: str | None
    overrides: list[tuple[str, str | None]]


def split(text: str) -> tuple[str, str | None]:
    """`FILE:NAME`, as upstream's flag takes it."""
    file, colon, name = text.partition(":")
    return file, name if colon else None


def in_words(words: list[str], flag: str) -> tuple[str | None, list[tuple[str, str | None]]]:
    """The value of the config's flag, and the overrides, from the words of a command."""
    chosen: str | None = None
    overrides: list[tuple[str, str | None]] = []
    for place, word in enumerate(words):
        if not word.startswith("-"):
            continue
        name, equals, value = word.lstrip("-").partition("=")
        after = words[place + 1] if place + 1 < len(words) and not words[place + 1].startswith("--") else None
        given = value if equals else after
        if name == flag:
            chosen = given
        elif "$" in name:
            continue  # which entry it is, is not known
        elif name.startswith(f"{flag}."):
            overrides.append((name[len(flag) + 1 :], given))
        elif name.startswith(f"no{flag}."):
            overrides.append((name[len(flag) + 3 :], "false"))
    return chosen, overrides


def loose(words: list[str]) -> list[str]:
    """Words that are not known and may set entries."""
    return [
        word
        for before, word in zip(["", *words], words, strict=False)
        if ("$" in word.partition("=")[0] and word.startswith("-"))
        or word.lstrip("-").startswith("flagfile")
        or (word.startswith("$") and ("=" in before or not before.startswith("-") or "[" in word or "@" in word))
    ]


def settings(given: list[str], flag: str) -> list[tuple[str, str | None]]:
    """Overrides from `--set NAME=VALUE`. Raises LG504 for anything else."""
    found: list[tuple[str, str | None]] = []
    for item in given:
        name, equals, value = item.partition("=")
        if not equals or not name:
            raise KitError(
                "LG504",
                f"--set {item} has no value",
                cause="it takes a name and a value",
                fix="write --set NAME=VALUE, as in --set train.beta=0",
            )
        found.append((name.lstrip("-").removeprefix(f"{flag}."), value))
    return found


def root_of(file: Path, facts: ConfigFacts) -> Path:
    """The tree that a config's file belongs to."""
    parents = file.resolve().parents
    return next((folder for folder in parents if (folder / facts.file).is_file()), parents[0])


def tree_near(folder: Path, upstream: str, facts: ConfigFacts) -> Path | None:
    """The upstream's tree that a folder lies in, or holds under the upstream's name."""
    places = [*(folder / "_").resolve().parents, folder / upstream]
    return next((place for place in places if (place / facts.file).is_file()), None)


def must_have(root: Path, file: Path, name: str, facts: ConfigFacts) -> None:
    """Raises LG508, with the presets there are, where the config has none of this name or cannot be read."""
    _must_be_in(Evaluator(root).load(file), name, facts)


def _must_be_in(module: Module, name: str, facts: ConfigFacts) -> None:
    names = module.names.items()
    known = [item for item, value in names if isinstance(value, Function) and item != facts.function]
    if name not in module.names:
        what = f"{module.path}: there is no preset {name}"
        raise KitError(
            "LG508", what, cause=f"it has {', '.join(sorted(known))}", fix="--preset FILE:NAME, one of these"
        )


class ConfigValues:
    """The values of a preset, overrides applied.

    Raises:
        KitError: LG508 the file cannot be read or has no such preset, LG505 upstream would stop in it, LG504 an
            override that does not fit.
    """

    def __init__(self, chosen: Chosen, facts: ConfigFacts) -> None:
        self._flag = facts.flag
        evaluator = Evaluator(chosen.root)
        path = chosen.root / chosen.file
        if not path.resolve().is_relative_to(evaluator.root):
            cause, fix = "a config is read with what it imports, from one tree", "give a config inside upstream's tree"
            raise KitError("LG508", f"{path} is outside {chosen.root}", cause=cause, fix=fix)
        self.file = path
        module = evaluator.load(path)
        try:
            made = evaluator.call(module, facts.function, [] if chosen.name is None else [chosen.name])
        except Refused as err:
            what = f"{path}: {facts.function} cannot be called with {chosen.name or 'no preset name'}"
            raise KitError("LG508", what, cause=_AS_TEXT, fix="name a preset: --preset FILE:NAME") from err
        if isinstance(made, Unknown) and chosen.name is not None:
            _must_be_in(module, chosen.name, facts)
        if isinstance(made, Unknown):
            what = f"{made.place}: what the preset is, is not known: {made.why}"
            raise KitError("LG509", what, cause=_AS_TEXT, fix="name another preset: --preset FILE:NAME")
        if not isinstance(made, Entries):
            what = f"{path}: {facts.function} returns no config for {chosen.name}"
            raise KitError("LG508", what, cause=_AS_TEXT, fix="name another preset: --preset FILE:NAME")
        self._entries = made
        function = module.names.get(chosen.name or facts.function)
        self.line = function.node.lineno if isinstance(function, Function) else 1
        names = evaluator.last_names.get(chosen.name or "", {})
        self.written_for = names.get(facts.ranks) if facts.ranks else None
        for name, value in chosen.overrides:
            self._override(name, value)

    def _override(self, name: str, text: str | None) -> None:
        *before, last = name.split(".")
        owner: object = self._entries
        for part in before:
            owner = owner.values.get(part) if isinstance(owner, Entries) else None
        if not isinstance(owner, Entries) or (last not in owner.values and owner.others is None):
            cause, fix = "upstream refuses entries that the preset does not make", "correct the name: --set ENTRY=VALUE"
            raise KitError("LG504", f"the config has no entry {name}", cause=cause, fix=fix)
        if text is not None and "$" in text:
            given = f"--{self._flag}.{name} is {text!r}: {launch.NOT_READ}"
            owner.put(last, Unknown(given, self.file, self.line))
            return
        owner.put(last, self._parsed(name, text, owner.values.get(last)))

    def _parsed(self, name: str, text: str | None, old: object) -> object:
        try:
            if isinstance(old, bool) and (text is None or text.lower() in _TRUE + _FALSE):
                return text is None or text.lower() in _TRUE
            if text is None or isinstance(old, (bool, Entries)):
                raise ValueError
            if isinstance(old, (int, float)):
                return type(old)(text)
            if isinstance(old, str):
                return text
            value = ast.literal_eval(text)
            return tuple(value) if isinstance(old, (list, tuple)) else value
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError) as err:
            if text is not None and (old is None or isinstance(old, Unknown)):
                return text
            kind = type(old).__name__ if not isinstance(old, Entries) else "group of entries"
            what = f"--{self._flag}.{name} is {text!r}; the preset has a {kind} there"
            cause = "upstream takes a value of that kind only"
            raise KitError("LG504", what, cause=cause, fix=f"give a value of that kind: --set {name}=VALUE") from err

    def has(self, name: str) -> bool:
        """Whether upstream would find this entry."""
        try:
            self._find(name)
        except KitError as err:
            return err.code == "LG509"
        return True

    def _find(self, name: str) -> object:
        value: object = self._entries
        for part in name.split("."):
            if isinstance(value, Entries):
                value = value.values.get(part, value.others if value.others is not None else KeyError)
            elif not isinstance(value, Unknown):
                value = KeyError
        if isinstance(value, Unknown):
            what = f"{value.place}: {name} is not known: {value.why}"
            raise KitError("LG509", what, cause=_AS_TEXT, fix=f"say its value: --set {name}=VALUE")
        if value is KeyError:
            fix = f"add {name} to the preset, or plan it with the script that it is written for"
            raise KitError("LG505", f"{self.file}: the preset has no {name}", cause="upstream stops there", fix=fix)
        return value

    def number(self, name: str) -> float:
        """A finite number. Raises LG505 there is none, LG509 it is not known, LG504 it is no number."""
        value = self._find(name)
        if not isinstance(value, (int, float)) or not math.isfinite(value):
            cause = f"{self.file} or a --set has something else there"
            raise KitError(
                "LG504", f"{name} is {value!r}, which is not a number", cause=cause, fix=f"--set {name}=VALUE"
            )
        return float(value)

    def whole(self, name: str, least: int = 1) -> int:
        """A whole number, `least` or more. Raises as `number` does."""
        value = self.number(name)
        if value != int(value) or value < least:
            what = f"{name} is {value:g}; a whole number of at least {least} was expected"
            raise KitError("LG504", what, cause="upstream would not train with it either", fix=f"--set {name}=VALUE")
        return int(value)

    def switch(self, name: str) -> bool:
        """Whether it counts as true. Raises LG505, LG509."""
        value = self._find(name)
        return bool(value.values) if isinstance(value, Entries) else bool(value)

    def text(self, name: str) -> str:
        """As text. Raises LG505, LG509."""
        return str(self._find(name))
