"""What is read of a launch file."""

from __future__ import annotations

from dataclasses import dataclass, field


class Hidden(str):
    """A word that is not known, as the file writes it, with `alternatives`: the words that may stand in its place."""

    alternatives: tuple[tuple[str, ...], ...] = ()
    many: bool = False
    """It may stand for several words, or for none."""
    closed: bool = False
    """It is one of the alternatives."""


@dataclass(frozen=True)
class Command:
    """One simple command.

    Attributes:
        line: where it starts, from 1.
        words: as far as they are known.
        outer: words of the commands that hand this one on in a string, outermost first.
        exports: environment variables that the file gives it.
    """

    line: int
    words: list[str]
    outer: list[str] = field(default_factory=list)
    exports: dict[str, str] = field(default_factory=dict)


@dataclass
class Reading:
    """What was read.

    Attributes:
        commands: in order.
        notes: what a reader should know about the text itself.
        defaults: values that the file takes where the environment gives none, as in `${NAME:-8}`.
        reasons: why a variable is not known.
    """

    commands: list[Command] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    defaults: dict[str, str] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
