"""Parts of a text that are not known: each is a hole, one character of a range that no text uses."""

from __future__ import annotations

from leangrpo_tools.plan.shell.reading import Hidden
from leangrpo_tools.plan.shell.state import HOLE, Unknown, Value
from leangrpo_tools.plan.shell.tree import TooLong


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
