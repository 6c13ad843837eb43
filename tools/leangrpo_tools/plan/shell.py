"""A bash launch file, read as text: its commands as lists of words. Nothing is ever executed.

Understood: comments, continued lines (a trailing backslash at the end of the file included), quotes, several commands
in a line or a file, `NAME=value` and `export NAME=value` with literal values, `$NAME`, `${NAME}`, `${NAME:-default}`,
here-documents (skipped), commands in quotes that `ssh`, `pdsh`, `bash -c` or `sh -c` hand on. Everything else that
depends on running the file stays in the words as it is written, so that a word with a dollar sign left in it is a word
whose value is not known.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass, field

_BREAKS = frozenset("();<>|&")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.S)
_COMMAND_OUTPUT = re.compile(r"\$\([^()]*\)|`[^`]*`")
_REFERENCE = re.compile(r"(?<!\\)\$(?:\{(\w+)(?::?-([^{}$]*))?\}|([A-Za-z_]\w*))")
_HANDS_ON = ("ssh", "pdsh", "bash", "sh")
_HEREDOC = re.compile(r"(?<!<)<<-?\s*(['\"]?)(\w+)\1")
OUTPUT = "$COMMAND_OUTPUT"
"""Stands for what a command substitution would have printed."""


@dataclass(frozen=True)
class Command:
    """One simple command: its first line (from 1) and its words, variables replaced where their value is written."""

    line: int
    words: list[str]


@dataclass
class Reading:
    """What was read: the commands in order, and what a reader should know about the text itself."""

    commands: list[Command] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def read(text: str) -> Reading:
    """Read the text of a launch file."""
    reading = Reading()
    text = text.removeprefix("\ufeff")
    if "\r" in text:
        reading.notes.append("the launch file has Windows line ends: bash on Linux will not run it as it is")
        text = text.replace("\r\n", "\n").replace("\r", "\n")
    values: dict[str, str | None] = {}
    for line, statement in _statements(text.split("\n")):
        words = _words(statement)
        if words is None:
            reading.notes.append(f"line {line} was not understood (a quote that is not closed) and left out")
            continue
        for simple in _split(words):
            rest = _assign([_resolve(word, values) for word in simple], values)
            if rest:
                inner = [command.words for handed_on in _handed_on(rest) for command in read(handed_on).commands]
                reading.commands += [Command(line, command) for command in (rest, *inner)]
    return reading


def _handed_on(words: list[str]) -> list[str]:
    """Texts that are commands for another shell, which replaces what is written `\\$NAME` here."""
    if words[0].rsplit("/", 1)[-1] not in _HANDS_ON:
        return []
    return [word.replace("\\$", "$") for word in words[1:] if any(space in word for space in " \n")]


def _statements(lines: list[str]) -> list[tuple[int, str]]:
    """Logical lines with the number of their first physical line: continued, with open quotes closed."""
    found: list[tuple[int, str]] = []
    at = 0
    while at < len(lines):
        first, text = at, _without_comment(lines[at])
        at += 1
        while at < len(lines) and (_continued(text) or _words(text) is None):
            joined = text[:-1] + _without_comment(lines[at]) if _continued(text) else f"{text}\n{lines[at]}"
            if at + 1 == len(lines) and not _continued(joined) and _words(joined) is None:
                break  # the quote is never closed: give up on the first line only
            text, at = joined, at + 1
        if _words(text) is None:
            at = first + 1
        found.append((first + 1, text[:-1] if _continued(text) else text))
        for _, end in _HEREDOC.findall(text):
            while at < len(lines) and lines[at].strip() != end:
                at += 1
            at += 1
    return found


def _continued(text: str) -> bool:
    return (len(text) - len(text.rstrip("\\"))) % 2 == 1


def _without_comment(line: str) -> str:
    """The line up to a `#` that starts a word outside quotes."""
    quote = ""
    for place, char in enumerate(line):
        if quote:
            quote = "" if char == quote else quote
        elif char in "'\"" and (place == 0 or line[place - 1] != "\\"):
            quote = char
        elif char == "#" and (place == 0 or line[place - 1] in " \t;&|("):
            return line[:place]
    return line


def _words(text: str) -> list[str] | None:
    """The words, operators as words of their own; None while a quote is open."""
    previous = ""
    while previous != text:
        previous, text = text, _COMMAND_OUTPUT.sub(OUTPUT, text)
    lexer = shlex.shlex(text[:-1] if _continued(text) else text, posix=True, punctuation_chars=True)
    lexer.whitespace_split, lexer.commenters = True, ""
    try:
        return list(lexer)
    except ValueError:
        return None


def _split(words: list[str]) -> list[list[str]]:
    """Simple commands between the operators."""
    commands: list[list[str]] = [[]]
    for word in words:
        if word and set(word) <= _BREAKS:
            commands.append([])
        else:
            commands[-1].append(word)
    return [command for command in commands if command]


def _resolve(word: str, values: dict[str, str | None]) -> str:
    """The word with every variable replaced whose value the file itself gives."""

    def value(match: re.Match[str]) -> str:
        name, default = match[1] or match[3], match[2]
        if name in values:
            known = values[name]
            return match[0] if known is None else known
        return match[0] if default is None else default

    return _REFERENCE.sub(value, word)


def _assign(words: list[str], values: dict[str, str | None]) -> list[str]:
    """Remember leading assignments, with or without `export`, and return the command that follows them."""
    rest = words[1:] if words[:1] in (["export"], ["declare"], ["local"], ["readonly"]) else words
    while rest and (match := _ASSIGNMENT.fullmatch(rest[0])):
        name, value = match.groups()
        # Given twice with different values, e.g. in two branches: which one counts is not known without running it.
        known = "$" not in value and values.get(name, value) == value
        values[name] = value if known else None
        rest = rest[1:]
    return rest
