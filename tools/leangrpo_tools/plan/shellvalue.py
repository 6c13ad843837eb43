"""Values of shell variables as far as they are known: texts with holes, arrays, and what differs between branches."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Union

HOLE = re.compile("\x00(\\d+)\x01")
"""Stands in a text for a part that is not known. A bash string holds no NUL byte, so nothing else looks like it."""
_MOST = 6  # values that are told apart


class Hidden(str):
    """A word that is not known, as the file writes it, with `alternatives`: the words that may stand in its place."""

    alternatives: tuple[tuple[str, ...], ...] = ()
    many: bool = False
    """It may stand for several words, or for none."""
    closed: bool = False
    """It is one of the alternatives."""


@dataclass(frozen=True)
class Unset:
    """The file itself has removed the variable, or declared it without a value."""


@dataclass(frozen=True)
class Unknown:
    """A value that is not known: why, and which values the file itself gives, one of which it may be."""

    why: str = field(compare=False)
    alternatives: tuple[str | tuple[str, ...] | Unset, ...] = ()
    closed: bool = False
    """It is one of the alternatives."""


Value = Union[str, tuple, Unset, Unknown]  # noqa: UP007  (Python 3.10 evaluates it)


def known(value: object) -> bool:
    """Whether a value has no part that is not known."""
    if isinstance(value, tuple):
        return all(map(known, value))
    return isinstance(value, Unset) or (isinstance(value, str) and "\x00" not in value)


def merge(values: Iterable[Value | None], why: str) -> Value:
    """What is known of a variable that has one of these values. None: nothing was assigned."""
    found = list(dict.fromkeys(values))
    if len(found) == 1 and found[0] is not None:
        return found[0]
    alternatives: dict[Any, None] = {}
    for value in found:
        alternatives.update(dict.fromkeys(value.alternatives if isinstance(value, Unknown) else () if value is None
                                          else (value,)))  # fmt: skip
    reason = next((value.why for value in found if isinstance(value, Unknown) and len(found) == 1), why)
    closed = all(value.closed if isinstance(value, Unknown) else value is not None for value in found)
    few = len(alternatives) <= _MOST
    return Unknown(reason, tuple(alternatives) if few else (), closed and few)


@dataclass
class State:
    """What is known at a place of the file."""

    variables: dict[str, Value] = field(default_factory=dict)
    exported: set[str] = field(default_factory=set)
    arguments: tuple[str, ...] | Unknown | None = None
    """`$@`; None: as they are given to the file."""
    functions: dict[str, Any] = field(default_factory=dict)
    lost: str | None = None
    """Why a variable that the file does not assign may still have a value that is not from the environment."""
    dead: bool = False
    """Nothing after this place is run."""

    def copy(self) -> State:
        return State(
            dict(self.variables), set(self.exported), self.arguments, dict(self.functions), self.lost, self.dead
        )

    def lose(self, why: str) -> None:
        """Any variable may have another value from here on."""
        self.variables = {name: merge([value, None], why) for name, value in self.variables.items()}
        self.lost = self.lost or why


def join(states: Iterable[State], why: str) -> State:
    """What is known where several ways meet."""
    ways = list(states)
    alive = [state for state in ways if not state.dead]
    if len(alive) < 2:
        return (alive or ways)[0]
    names = dict.fromkeys(name for state in alive for name in state.variables)
    variables = {name: merge((state.variables.get(name) for state in alive), why) for name in names}
    arguments = {state.arguments for state in alive}
    functions: dict[str, Any] = {}
    for state in alive:
        for name, bodies in state.functions.items():
            functions[name] = tuple(dict.fromkeys((*functions.get(name, ()), *bodies)))
    return State(
        variables,
        set.union(*(state.exported for state in alive)),
        arguments.pop() if len(arguments) == 1 else Unknown(why),
        functions,
        next((state.lost for state in alive if state.lost), None),
    )
