"""The training command of a launch file: which script, how many ranks, and the value of each of upstream's flags."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from leangrpo_tools.errors import KitError
from leangrpo_tools.plan import shell
from leangrpo_tools.plan.options import Option

_LAUNCHERS = ("torchrun", "torch.distributed.run", "torch.distributed.launch", "accelerate")
_LARGEST_FILE = 1 << 20  # bytes; upstream's launch files have a few thousand
_LARGEST_NUMBER = 2**53  # beyond it not every whole number is a float
NOT_READ = "the file is read as text and never run, so a value computed when it runs is not known"


@dataclass(frozen=True)
class Training:
    """The command that starts a training script: the words before the script and those after it."""

    script: str
    line: int
    before: list[str]
    after: list[str]
    notes: list[str]


def find_training(path: Path, programs: dict[str, str]) -> Training:
    """The first command of the file that starts one of `programs` (script name to path in upstream's tree).

    Raises:
        KitError: LG501 the file cannot be read, LG502 no command in it starts a known script.
    """
    reading = shell.read(_text(path))
    found = [hit for command in reading.commands if (hit := _match(command, programs, reading.notes))]
    if not found:
        started = [word for command in reading.commands for word in command.words if word.endswith(".py")]
        seen = f"it starts {', '.join(dict.fromkeys(started))}" if started else "it starts no Python script at all"
        known = ", ".join(f"{name} ({program})" for name, program in programs.items())
        what = f"{path}: no command starts a known training script"
        fix = f"give a launch file that starts one of {known}"
        raise KitError("LG502", what, cause=seen, fix=fix)
    if len(found) > 1:
        lines = ", ".join(f"{hit.script} in line {hit.line}" for hit in found[1:])
        found[0].notes.append(f"only the first training command is planned (line {found[0].line}); also there: {lines}")
    return found[0]


def _text(path: Path) -> str:
    """The file's text, line ends as they are: they matter to bash. Raises LG501; a device or a pipe is not opened."""
    cause = f"looked for from {Path.cwd()}"
    try:
        if path.exists() and not path.is_file():
            reason = "not a regular file"
        else:
            with path.open("rb") as file:
                content = file.read(_LARGEST_FILE + 1)
            if len(content) <= _LARGEST_FILE:
                return content.decode("utf-8")
            reason, cause = "larger than 1 MiB", "no launch file"
    except UnicodeDecodeError as err:
        reason, cause = str(err), "no text file"
    except OSError as err:
        reason = err.strerror or str(err)
    fix = "give the path of upstream's own launch script, e.g. --launch scripts/finetune/NAME.sh"
    raise KitError("LG501", f"{path}: {reason}", cause=cause, fix=fix)


def _match(command: shell.Command, programs: dict[str, str], notes: list[str]) -> Training | None:
    for place, (before, word) in enumerate(zip(["", *command.words], command.words, strict=False)):
        for script, program in programs.items():
            by_path = word == program or word.endswith("/" + program)
            by_module = before == "-m" and word == program.removesuffix(".py").replace("/", ".")
            by_name = before != "-m" and word == program.rsplit("/", 1)[-1]  # after a `cd`
            if by_path or by_module or by_name:
                after = command.words[place + 1 :]
                return Training(script, command.line, command.words[:place], after, list(notes))
    return None


def ranks(training: Training, declared: int | None = None) -> int:
    """World size, from the launcher's own flags, else `declared`. Raises LG503 where it is not written in the file."""
    if not any(word.rsplit("/", 1)[-1] in _LAUNCHERS for word in training.before):
        if any("$" in word for word in training.before):
            raise _ranks_unknown("the launcher itself is a variable")
        training.notes.append("no torchrun in the command: one rank")
        return 1
    if "accelerate" in (word.rsplit("/", 1)[-1] for word in training.before):
        return _count(training.before, "num_processes", declared)
    return _count(training.before, "nnodes", 1) * _count(training.before, "nproc_per_node", 1)


def _count(words: list[str], flag: str, default: int | None) -> int:
    value = _last_value(words, re.compile(rf"--?{flag.replace('_', '[-_]')}"))
    if value is None:
        if default is None:
            raise _ranks_unknown(f"--{flag} is not given in the launch file")
        return default
    if re.fullmatch(r"0*[1-9]\d{0,15}", value) and int(value) <= _LARGEST_NUMBER:
        return int(value)
    raise _ranks_unknown(f"--{flag} is {value!r} in the launch file")


def _ranks_unknown(what: str) -> KitError:
    return KitError("LG503", what, cause=NOT_READ, fix="say how many ranks there will be: --ranks N")


def _last_value(words: list[str], flag: re.Pattern[str]) -> str | None:
    found = None
    for place, word in enumerate(words):
        name, equals, value = word.partition("=")
        if flag.fullmatch(name):
            found = value if equals else (words[place + 1] if place + 1 < len(words) else "")
    return found


class FlagValues:
    """Values of upstream's flags: from the command, else the script's own default, else the kit's table.

    Args:
        training: the command.
        options: the script's options from its source, if that is at hand.
        table: the kit's table of defaults at the pin.
    """

    def __init__(
        self, training: Training, options: dict[str, Option] | None, table: Mapping[str, int | float | bool | str]
    ) -> None:
        self._words, self._options, self._table = training.after, options, table
        self.defaulted: dict[str, object] = {}
        self.unresolved = [word for word in training.after if word.startswith("$") and not self._is_value(word)]

    def _is_value(self, word: str) -> bool:
        place = self._words.index(word)
        return place > 0 and self._words[place - 1].startswith("--") and "=" not in self._words[place - 1]

    def _given(self, flag: str) -> str | None:
        names = self._options or dict.fromkeys(self._table)
        found = None
        for place, word in enumerate(self._words):
            if not word.startswith("--"):
                continue
            name, equals, value = word[2:].partition("=")
            if name != flag and name not in names:
                # argparse takes an unambiguous beginning for the whole name
                fits = {known for known in names if known.startswith(name)} if name else set()
                name = fits.pop() if len(fits) == 1 else name
            if name == flag:
                found = value if equals else (self._words[place + 1] if place + 1 < len(self._words) else "")
        return found

    def _default(self, flag: str) -> object:
        option = (self._options or {}).get(flag)
        value = option.default if option else self._table.get(flag)
        self.defaulted[flag] = value
        return value

    def switch(self, flag: str | None) -> bool:
        """Whether a flag without a value is set."""
        if flag is None:
            return False
        return True if self._given(flag) is not None else bool(self._default(flag))

    def holds(self, condition: str) -> bool:
        """Whether the flag in `FLAG=VALUE` has that value."""
        flag, _, value = condition.partition("=")
        given = self._given(flag)
        return (self._default(flag) if given is None else given) == value

    def whole(self, flag: str) -> int:
        """A positive whole number. Raises LG504."""
        value = self.number(flag)
        if value != int(value) or value < 1:
            fix = "correct the launch file: upstream would not train with it either"
            what = f"--{flag} is {value:g}; a whole number of at least 1 was expected"
            raise KitError("LG504", what, cause="upstream counts with it", fix=fix)
        return int(value)

    def number(self, flag: str) -> float:
        """A number. Raises LG504 where it is missing, computed by the file, or no number."""
        given = self._given(flag)
        value = self._default(flag) if given is None else given
        if value is None or value == "":
            cause, fix = "upstream has no default for it", f"add --{flag} to a copy of the launch file"
            raise KitError("LG504", f"--{flag} has no value in the launch file", cause=cause, fix=fix)
        try:
            number = float(str(value))
        except ValueError:
            number = math.nan
        if abs(number) <= _LARGEST_NUMBER:
            return number
        if math.isfinite(number):
            fix = "correct the launch file: upstream would not train with it either"
            cause = "no run is that large: a digit too many, perhaps"
            raise KitError("LG504", f"--{flag} is {value}; at most 2**53 was expected", cause=cause, fix=fix)
        cause = NOT_READ if "$" in str(value) else "the launch file is not complete or not upstream's"
        fix = f"write the value of --{flag} into a copy of the launch file and plan that"
        raise KitError("LG504", f"--{flag} is {value!r}, which is not a number", cause=cause, fix=fix)
