"""Files that a launch file itself writes or edits, and the folder that it goes to, before its training command."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

from leangrpo_tools.plan.ranks import has_launcher
from leangrpo_tools.plan.shell import Reading

_READERS_TEXT = (
    "cat echo printf ls test [ head tail grep wc source . mkdir cd touch chmod pkill kill pgrep which diff find git "
    "tar stat file less more rm sha256sum sha1sum md5sum exit"
)
_READERS = frozenset(_READERS_TEXT.split())
_COPIERS = frozenset(["cp", "mv", "rsync", "scp", "ln", "install"])
_HERE = re.compile(r"dirname|BASH_SOURCE|show-toplevel|\$0|\$PWD|\$\(pwd\)")


@dataclass(frozen=True)
class Changed:
    """What is not as it lies here.

    Attributes:
        folder: where the training command runs; None: where the launch file is started; a dollar sign: not known.
    """

    folder: str | None = None
    _targets: tuple[tuple[int, str], ...] = field(default=())
    _commands: tuple[tuple[int, tuple[str, ...]], ...] = field(default=())

    def by(self, file: str) -> str:
        """The line that may write or edit a file, as `line N`; empty: none."""
        name = Path(file).name
        for line, target in self._targets:
            if name and name in target:
                return f"line {line}"
        for line, words in self._commands:
            last = words[-1].rstrip("/")
            written = any(name in word for word in _arguments(words))
            if words[0].rsplit("/", 1)[-1] in _COPIERS:  # to the file, or to its folder
                written = written and (name in last or Path(last).name == Path(file).parent.name or "$" in last)
            if name and written:
                return f"line {line}"
        return ""

    def goes_to(self, root: Path) -> str:
        """The folder, if it is another one than upstream's tree."""
        return self.folder if self.folder and Path(self.folder).resolve() != root.resolve() else ""


def _arguments(words: tuple[str, ...]) -> tuple[str, ...]:
    """Those that a program may write to: not the script that Python runs, or compiles."""
    if not re.fullmatch(r"python[\d.]*", words[0].rsplit("/", 1)[-1]):
        return words[1:]
    first = next((place for place, word in enumerate(words) if word.endswith(".py")), 0)
    return () if "py_compile" in words else words[first + 1 :]


def of(text: str, reading: Reading, line: int) -> Changed:
    """Changes before the training command in this line."""
    lines = text.splitlines()
    targets = []
    for number, content in enumerate(lines, start=1):
        for target in re.findall(r"(?<![<&])&?>>?\|?\s*([^\s;&|<>()]+)", content):
            names = re.findall(r"\$\{?(\w+)", target)
            values = [value for name in names for value in re.findall(rf"\b{name}=(\S+)", text)]
            targets.append((number, " ".join([target, *values])))
    before = [command for command in reading.commands if command.line != line]
    edits = [
        (command.line, tuple(command.words))
        for command in before
        if command.words[0].rsplit("/", 1)[-1] not in _READERS
        and not has_launcher(command.words)
        and (command.words[0] != "sed" or any(word.startswith(("-i", "--in-place")) for word in command.words))
    ]
    folder = None
    for command in before:
        if command.words[0] in ("cd", "pushd") and command.line < line and len(command.words) > 1:
            here = _HERE.search(lines[command.line - 1]) if command.line <= len(lines) else None
            folder = None if here or command.words[-1] in (".", "-") else command.words[-1]
    return Changed(folder, tuple(targets), tuple(edits))
