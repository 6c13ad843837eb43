"""What is known of variables: of one, of all at a place of the file, and where several ways meet."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Union

HOLE = re.compile("[\U00100000-\U0010ffff]")
"""Stands in a text for a part that is not known; see `holes.py`."""
_MOST = 6  # values that are told apart


@dataclass(frozen=True)
class Unknown:
    """A value that is not known: why, and which values it may be; None among them: any other one, too."""

    why: str = field(default="", compare=False)
    alternatives: tuple[Any, ...] = (None,)


Value = Union[str, tuple, Unknown]  # noqa: UP007  (Python 3.10 evaluates it)
"""Text, elements of an array, or not known. Without elements: the file itself has removed the variable."""


def known(value: object) -> bool:
    """Whether a value has no part that is not known."""
    return all(map(known, value)) if isinstance(value, tuple) else isinstance(value, str) and not HOLE.search(value)


def merge(values: Iterable[Value | None], why: str) -> Value:
    """What is known of a variable that has one of these values. None: the environment's, or another one."""
    found = dict.fromkeys(values)
    if len(found) == 1 and None not in found:
        return next(value for value in found if value is not None)
    parts: dict[Any, None] = {}
    for value in found:
        parts.update(dict.fromkeys(value.alternatives if isinstance(value, Unknown) else (value,)))
    return Unknown(why, tuple(parts) if len(parts) <= _MOST else (None,))


@dataclass
class State:
    """What is known at a place of the file.

    Attributes:
        variables: by name; `@` is the arguments, `NAME()` a function: its text, and the line before it. What is not
            here is the environment's.
        exported: names that programs get.
        lost: why a variable that is not here may still have a value that is not from the environment.
        dead: nothing after this place is run.
    """

    variables: dict[str, Value] = field(default_factory=dict)
    exported: set[str] = field(default_factory=set)
    lost: str = ""
    dead: bool = False

    def copy(self) -> State:
        return State(dict(self.variables), set(self.exported), self.lost, self.dead)

    def become(self, other: State) -> None:
        """Take over what is known at another place."""
        vars(self).update(vars(other.copy()))

    def lose(self, why: str) -> None:
        """Any variable may have another value from here on."""
        self.variables = {name: merge([value, None], why) for name, value in self.variables.items()}
        self.lost = self.lost or why


def join(states: Iterable[State], why: str) -> State:
    """What is known where several ways meet."""
    ways = list(states)
    alive = [state for state in ways if not state.dead] or ways[:1]
    names = dict.fromkeys(name for state in alive for name in state.variables)
    variables = {name: merge((state.variables.get(name) for state in alive), why) for name in names}
    exported = set().union(*(state.exported for state in alive))
    return State(variables, exported, next((state.lost for state in alive if state.lost), ""), alive[0].dead)
