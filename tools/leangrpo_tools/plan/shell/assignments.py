"""Assignments: what a variable becomes, and which builtins declare, remove or compute one."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

from leangrpo_tools.plan.shell.holes import Holes
from leangrpo_tools.plan.shell.reading import Reading
from leangrpo_tools.plan.shell.state import ABSENT, State, Unknown, Value, join, known, merge
from leangrpo_tools.plan.shell.tree import Work
from leangrpo_tools.plan.shell.words import Words

if TYPE_CHECKING:
    from tree_sitter import Node

_LONGEST = 10_000
ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.S)


class Assignments:
    """Follows the assignments of a text.

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
        self._bodies: dict[str, tuple[str, ...]] = {}
        self._called: set[str] = set()
        self._ever: dict[str, Value] = {}
        self._doubt: str | None = None
        self._odd: dict[str, str] = {}
        self._texts: list[str] = []  # what the next commands read

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
        scoped = kind in ("local", "declare", "typeset") and bool(self._escapes)
        for child in node.children[1:]:
            if child.type == "variable_assignment":
                name, value, index = self._assignment(child)
            else:
                word = " ".join(self._words.all([child])) if child.type != "variable_name" else self._words.text(child)
                match = ASSIGNMENT.fullmatch(word)
                name, value, index = (match[1], match[2], None) if match else (word, None, None)
                if word[:1] in ("-", "+"):
                    options += word
                    continue
                if not re.fullmatch(r"\w+", name):
                    self.state.lose(f"{why}: {kind} of names that are not known")
                    continue
            if scoped and "g" not in options:
                value = self._scope(name, value)
            if kind == "export" or "x" in options:
                self.state.variables[f"export {name}"] = ""
            if re.search(r"[Ailun]", options):
                self._odd[name], value = f"{why}: {kind} {options}", Unknown()
            if "n" in options:
                self._doubt = f"{why}: {kind} {options}"
                self.state.lose(self._doubt)
            if value is not None and "f" not in options:
                self._put(name, value, index)

    def _scope(self, name: str, value: Value | None) -> Value | None:
        """A variable of the function that runs: the outer one comes back after it."""
        saved = self.state.variables.get(f"local {name}")
        self.state.variables[f"local {name}"] = self.state.variables.get(name, ABSENT) if saved is None else saved
        return value if value is not None else () if saved is None else Unknown()

    def _join(self, states: Iterable[State], why: str) -> State:
        return join(states, why, self._holes.new)

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
