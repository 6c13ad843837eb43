"""What is known of variables: of one, of all at a place of the file, and where several ways meet."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
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


ABSENT = ("\0",)
"""Outside a function, the environment decides."""
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


def _optional(name: str, values: list[Value | None], why: str, hole: Callable[[str, Value, bool], str]) -> Value | None:
    """What the values begin with, and a hole for the words that only some have; None if they are no lists of words."""
    rests: list[Value]
    arrays = [value for value in values if isinstance(value, tuple)]
    texts = [value for value in values if isinstance(value, str)]
    if len(values) < 2 or len(values) not in (len(arrays), len(texts)):
        return None
    if arrays:
        common = next(
            (at for at, words in enumerate(zip(*arrays, strict=False)) if len(set(words)) > 1), min(map(len, arrays))
        )
        rests = [value[common:] for value in arrays]
        return (*arrays[0][:common], hole(f"${{{name}[@]}}", merge(rests, why), True))
    base = min(texts, key=len)
    if not base.strip() or not all(text == base or text.startswith(f"{base} ") for text in texts):
        return None
    rests = [text[len(base) :].strip(" ") for text in texts]
    return f"{base} {hole(f'${name}', merge(rests, why), True)}"


@dataclass
class State:
    """What is known at a place of the file.

    Attributes:
        variables: by name; `@` is the arguments, `NAME()` a function: its text, and the line before it. `export NAME`
            is there where programs get it, `local NAME` is its value outside the function, `set -a` exports all.
            What is not here is the environment's.
        lost: why a variable that is not here may still have a value that is not from the environment.
        dead: nothing after this place is run.
    """

    variables: dict[str, Value] = field(default_factory=dict)
    lost: str = ""
    dead: bool = False

    def copy(self) -> State:
        return State(dict(self.variables), self.lost, self.dead)

    def become(self, other: State) -> None:
        """Take over what is known at another place."""
        vars(self).update(vars(other.copy()))

    def lose(self, why: str) -> None:
        """Any variable may have another value from here on."""
        self.variables = {name: merge([value, None], why) for name, value in self.variables.items()}
        self.lost = self.lost or why


def join(states: Iterable[State], why: str, hole: Callable[[str, Value, bool], str]) -> State:
    """What is known where several ways meet; `hole` makes one for words that only some ways have."""
    ways = list(states)
    alive = [state for state in ways if not state.dead] or ways[:1]
    names = dict.fromkeys(name for state in alive for name in state.variables)
    variables = {}
    for name in names:
        values = list(dict.fromkeys(state.variables.get(name) for state in alive))
        variables[name] = (_optional(name, values, why, hole) if name.isidentifier() else None) or merge(values, why)
    return State(variables, next((state.lost for state in alive if state.lost), ""), alive[0].dead)
