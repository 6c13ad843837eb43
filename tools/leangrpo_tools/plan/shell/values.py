"""What is known of a shell variable: its text, its elements, or that it is not known, and which values it may have.

A part of a text that is not known is a hole: one character, of a range that no text uses.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Union

from leangrpo_tools.plan.shell.reading import Hidden
from leangrpo_tools.plan.shell.tree import TooLong

HOLE = re.compile("[\U00100000-\U0010ffff]")
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


class Holes:
    """The holes of a file: how each is written there, what it may be, whether it may stand for several words."""

    def __init__(self) -> None:
        self._number: dict[tuple[str, Value | None, bool], str] = {}
        self._of: dict[str, tuple[str, Value | None, bool]] = {}

    def new(self, display: str, value: Value | None = None, many: bool = False) -> str:
        """A hole; the same one for the same part."""
        display = HOLE.sub(lambda match: self._of[match[0]][0], display)[:200]
        made = (display if "$" in display else f"$<{display}>", value, many)
        if made not in self._number:
            if len(self._number) > 65_000:
                raise TooLong
            self._number[made] = chr(0x100000 + len(self._number))
            self._of[self._number[made]] = made
        return self._number[made]

    def value(self, hole: str) -> Value | None:
        """What it may be."""
        return self._of[hole][1]

    def is_many(self, texts: str | tuple[str, ...]) -> bool:
        """Whether a text may stand for several words, or for none."""
        return any(self._of[hole][2] for hole in HOLE.findall("".join(texts)))

    def widened(self, text: str) -> str:
        """The same text outside quotes."""
        return HOLE.sub(lambda match: self.new(*self._of[match[0]][:2], many=True), text)

    def show(self, text: str, depth: int = 0) -> str:
        """A word for readers of commands."""
        word = HOLE.sub(lambda match: self._of[match[0]][0], text)
        if not HOLE.fullmatch(text):
            return word
        hidden = Hidden(word)
        _, value, hidden.many = self._of[text]
        if isinstance(value, Unknown) and depth < 3:
            hidden.closed = None not in value.alternatives
            for item in value.alternatives:
                parts = (item,) if isinstance(item, str) else item or ()
                words = [word for part in parts for word in (part.split() if hidden.many else [part])]
                given = () if item is None else (tuple(self.show(word, depth + 1) for word in words),)
                hidden.alternatives += given
        return hidden
