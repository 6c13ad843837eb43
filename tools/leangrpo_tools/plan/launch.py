"""The training command of a launch file: which script, started by which words, with which words after it."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from leangrpo_tools.errors import KitError
from leangrpo_tools.plan import changed, shell, slurm
from leangrpo_tools.plan import ranks as launchers
from leangrpo_tools.plan.flagvalues import NOT_READ, FlagValues

__all__ = ["NOT_READ", "FlagValues", "Training", "hidden", "one_of", "ranks", "text_of", "trainings"]
_Plan = TypeVar("_Plan")
_MOST = 16  # training commands that are compared
LARGEST_FILE = 1 << 20  # bytes; upstream's launch files have a few thousand
ranks = launchers.ranks
_ONLY_NAMES_TEXT = (
    "echo printf cp mv ln ls rm cat grep sed awk head tail tee test [ chmod touch find diff git pkill pgrep kill "
    "killall tar rsync scp which sha256sum sha1sum md5sum wc stat file less more"
)
_ONLY_NAMES = frozenset(_ONLY_NAMES_TEXT.split())
"""Commands that name a script and do not start it."""


@dataclass(frozen=True)
class Training:
    """The command that starts a training script: the words before the script and those after it.

    Attributes:
        script: the kit's name of the script.
        line: of the launch file, from 1.
        before: every word before the script, launchers of launchers included.
        after: its own words. One that is not known has a dollar sign, or is `shell.Hidden`.
        notes: what a reader should know.
        program: the script's path in upstream's tree, or what the command starts in its place.
        exports: environment variables that the file sets.
        reasons: why a variable is not known.
        changed: what the file writes, and where it goes, before this command.
    """

    script: str
    line: int
    before: list[str]
    after: list[str]
    notes: list[str]
    program: str = ""
    exports: dict[str, str] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    changed: changed.Changed = field(default_factory=changed.Changed)


def trainings(
    path: Path, programs: dict[str, str], script: str | None = None, line: int | None = None
) -> list[Training]:
    """The commands of the file that start one of `programs` (script name to path in upstream's tree): at least one.

    Args:
        path: the launch file.
        programs: what is looked for.
        script: the one of `programs` that it is; then a renamed or moved file is found, too.
        line: of the file: only the command there.

    Raises:
        KitError: LG501 the file cannot be read, LG502 no command in it starts a known script, or there is none of
            this name, or in this line.
    """
    if script is not None and script not in programs:
        cause, fix = f"there are {', '.join(programs)}", "give one of these: --script S"
        raise KitError("LG502", f"there is no script {script!r}", cause=cause, fix=fix)
    text = text_of(path)
    job = slurm.variables(text)
    reading = shell.read(text, job)
    commands = [command for command in reading.commands if command.words[0] not in _ONLY_NAMES]
    found = [hit for command in commands if (hit := _match(command, programs, reading))]
    if script is not None and any(hit.script == script for hit in found):
        found = [hit for hit in found if hit.script == script]
    elif script is not None:
        started = [hit for command in commands if (hit := _started(command, script, reading))]
        launched = [hit for hit in started if launchers.has_launcher(hit.before)]
        found = launched or started
    if not found:
        raise _none(path, reading, commands, programs)
    found = [hit for hit in found if launchers.may_start(hit.before)] or found
    if line is not None and not any(hit.line == line for hit in found):
        cause = f"they are in line {', '.join(str(hit.line) for hit in found)}"
        raise KitError("LG502", f"line {line} starts no training script", cause=cause, fix=f"--line {found[0].line}")
    for hit in found:
        hit.exports.update(_unclear(text, hit))
        vars(hit)["changed"] = changed.of(text, reading, hit.line)
        if any(job.values()):
            hit.notes.append("SLURM's variables are taken from the file's #SBATCH lines")
        if reading.defaults:
            taken = ", ".join(f"{name}={value}" for name, value in reading.defaults.items())
            hit.notes.append(f"variables that the environment may set are taken at the file's defaults: {taken}")
    return [hit for hit in found if line in (None, hit.line)]


def _unclear(text: str, hit: Training) -> dict[str, str]:
    """Variables that launchers take, which the file sets, but not surely for this command."""
    lines = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    names = re.findall(r"\b((?:PET|ACCELERATE|FSDP)_[A-Z_]+)=", lines)
    return {name: f"${name}" for name in names if name not in hit.exports}


def one_of(hits: list[Training], planned: Callable[[Training], _Plan], figures: Callable[[_Plan], object]) -> _Plan:
    """The plan of the training commands of a file, if they agree. Raises LG502 where they do not, and as `planned`."""
    ways: list[tuple[object, _Plan | KitError]] = []
    for hit in hits[:_MOST]:
        try:
            plan = planned(hit)
            ways.append((figures(plan), plan))
        except KitError as err:
            ways.append(((err.code, err.what), err))
    if any(way != ways[0][0] for way, _ in ways) or len(hits) > _MOST:
        lines = list(dict.fromkeys(hit.line for hit in hits))
        fix = f"say which is meant: --line {' | '.join(map(str, lines))}"
        if len(lines) == 1:
            fix = "leave one of them in a copy of the launch file, and plan that"
        cause = f"there are commands in line {', '.join(str(hit.line) for hit in hits)}, and which of them run is open"
        raise KitError("LG502", "the training commands of the launch file give different plans", cause=cause, fix=fix)
    first = ways[0][1]
    if isinstance(first, KitError):
        raise first
    return first


def _none(path: Path, reading: shell.Reading, commands: list[shell.Command], programs: dict[str, str]) -> KitError:
    started = dict.fromkeys(hit.program for command in commands if (hit := _started(command, "", reading)))
    what = f"{path}: no command starts a known training script"
    known = ", ".join(f"{name} ({program})" for name, program in programs.items())
    if not started:
        cause = "; ".join(["no command that is written in it starts a Python script", *reading.notes])
        files = dict.fromkeys(word for command in reading.commands for word in command.words if word.endswith(".sh"))
        fix = f"plan the file that it hands on to: --launch {' | '.join(files)}" if files else (
            "write the training command itself into a copy of the launch file, not in a string or a here-document; it "
            f"starts one of {known}")  # fmt: skip
        return KitError("LG502", what, cause=cause, fix=fix)
    files = {Path(program).stem: name for name, program in programs.items()}
    names = [word for program in started for word in (program, *_alternatives(program))]
    near = [name for word in names for name in difflib.get_close_matches(Path(word).stem, files, n=4, cutoff=0.6)]
    could = " | ".join(dict.fromkeys(files[name] for name in near)) or " | ".join(programs)
    cause = f"it starts {', '.join(dict.fromkeys(names))}"
    fix = f"if that is one of upstream's scripts under another name, say which: --script {could}; else give a launch "
    return KitError("LG502", what, cause=cause, fix=fix + f"file that starts one of {known}")


def _alternatives(word: str) -> Iterable[str]:
    parts = word.alternatives if isinstance(word, shell.Hidden) else ()
    return [part for words in parts for part in words if part.endswith(".py")]


def text_of(path: Path) -> str:
    """The file's text, line ends as they are: they matter to bash. Raises LG501; a device or a pipe is not opened."""
    cause = f"looked for from {Path.cwd()}"
    try:
        if path.exists() and not path.is_file():
            reason = "not a regular file"
        else:
            with path.open("rb") as file:
                content = file.read(LARGEST_FILE + 1)
            if len(content) <= LARGEST_FILE:
                return content.decode("utf-8")
            reason, cause = "larger than 1 MiB", "no launch file"
    except UnicodeDecodeError as err:
        reason, cause = str(err), "no text file"
    except OSError as err:
        reason = err.strerror or str(err)
    fix = "give the path of upstream's own launch script, e.g. --launch scripts/finetune/NAME.sh"
    raise KitError("LG501", f"{path}: {reason}", cause=cause, fix=fix)


def _match(command: shell.Command, programs: dict[str, str], reading: shell.Reading) -> Training | None:
    for place, (before, word) in enumerate(zip(["", *command.words], command.words, strict=False)):
        for script, program in programs.items():
            by_path = word == program or word.endswith("/" + program)
            by_module = before == "-m" and word == program.removesuffix(".py").replace("/", ".")
            by_name = before != "-m" and word == program.rsplit("/", 1)[-1]  # after a `cd`
            if by_path or by_module or by_name:
                return _training(command, place, script, program, reading)
    return None


def _started(command: shell.Command, script: str, reading: shell.Reading) -> Training | None:
    """The command, if it starts any Python script."""
    words = command.words
    for place, word in enumerate(words):
        module = place > 0 and words[place - 1] in ("-m", "--module") and not launchers.is_launcher(word)
        hidden = isinstance(word, shell.Hidden) and launchers.has_launcher(words[:place])
        before = words[place - 1] if place else ""
        option = before.startswith("-") and "=" not in before and before not in launchers.SWITCHES
        if (word.endswith(".py") and not word.startswith("-")) or module or (hidden and not option):
            file = f"{word.replace('.', '/')}.py" if module and not word.endswith(".py") else word
            return _training(command, place, script, file, reading)
    return None


def _training(command: shell.Command, place: int, script: str, program: str, reading: shell.Reading) -> Training:
    words = command.words
    return Training(
        script,
        command.line,
        [*command.outer, *words[:place]],
        words[place + 1 :],
        list(reading.notes),
        program,
        dict(command.exports),
        reading.reasons,
    )


def hidden(words: Iterable[str]) -> list[str]:
    """What the file says of words that may stand for flags: which they may be."""
    notes = []
    for word in words:
        alternatives = word.alternatives if isinstance(word, shell.Hidden) else ()
        parts = [" ".join(part) for part in alternatives if part]
        if parts:
            notes.append(f"{word} may be {' or '.join(parts)}{' or nothing' if len(parts) < len(alternatives) else ''}")
    return notes
