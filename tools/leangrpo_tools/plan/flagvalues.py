"""The values of upstream's flags in a training command."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from leangrpo_tools.errors import KitError
from leangrpo_tools.plan.options import Option
from leangrpo_tools.plan.shell import Hidden

if TYPE_CHECKING:
    from leangrpo_tools.plan.launch import Training

LARGEST_NUMBER = 2**53  # beyond it not every whole number is a float
NOT_READ = "the file is read as text and never run, so a value computed when it runs is not known"


def not_read(text: str, reasons: Mapping[str, str]) -> str:
    """Why a text with a dollar sign is not known, with the lines where its variables get their values."""
    found = [f"{name}: {reasons[name]}" for name in re.findall(r"\$\{?#?([A-Za-z_]\w*)", text) if reasons.get(name)]
    return f"{'; '.join(dict.fromkeys(found))} ({NOT_READ})" if found else NOT_READ


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
        self._reasons = training.reasons
        self.defaulted: dict[str, object] = {}
        self.unresolved = [word for place, word in enumerate(training.after) if self._hides(place, word)]

    def _hides(self, place: int, word: str) -> bool:
        """Whether a word may hold flags of its own."""
        if word.startswith("-"):
            return "$" in word.partition("=")[0]
        if not word.startswith("$"):
            return False
        before = self._words[place - 1] if place else ""
        if not before.startswith("--") or "=" in before or re.match(r"\$(?:[@*]|\{[@*])|\$\{\w+\[[@*]\]", word):
            return True
        if isinstance(word, Hidden) and any(part[:1] and part[0].startswith("--") for part in word.alternatives):
            return True
        name = self._whole_name(before[2:])
        option = (self._options or {}).get(name)
        return not option.takes_value if option else isinstance(self._table.get(name), bool)

    def _whole_name(self, name: str) -> str:
        """argparse takes an unambiguous beginning for the whole name."""
        names = self._options or dict.fromkeys(self._table)
        fits = {known for known in names if known.startswith(name)} if name and name not in names else set()
        return fits.pop() if len(fits) == 1 else name

    def _in(self, words: list[str] | tuple[str, ...], flag: str) -> str | None:
        found = None
        for place, word in enumerate(words):
            name, equals, value = word[2:].partition("=")
            if word.startswith("--") and (name == flag or self._whole_name(name) == flag):
                found = value if equals else (words[place + 1] if place + 1 < len(words) else "")
            elif isinstance(word, Hidden) and word in self.unresolved and word.closed:
                given = {self._in(part, flag) for part in word.alternatives}
                if given and None not in given:
                    found = given.pop() if len(given) == 1 else str(word)
        return found

    def _given(self, flag: str) -> str | None:
        return self._in(self._words, flag)

    def _default(self, flag: str, told: bool = True) -> object:
        option = (self._options or {}).get(flag)
        value = option.default if option else self._table.get(flag)
        if told:
            self.defaulted[flag] = value
        return value

    def switch(self, flag: str | None, told: bool = True) -> bool:
        """Whether a flag without a value is set. `told`: a default is listed among the others."""
        if flag is None:
            return False
        return True if self._given(flag) is not None else bool(self._default(flag, told))

    def text(self, flag: str, told: bool = True) -> str | None:
        """The value as text; None where there is none. It has a dollar sign where it is not known."""
        given = self._given(flag)
        value = self._default(flag, told) if given is None else given
        return None if value is None or value == "" else str(value)

    def why_not(self, text: str) -> str:
        """Why a text with a dollar sign is not known."""
        return not_read(text, self._reasons)

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
        if abs(number) <= LARGEST_NUMBER:
            return number
        if math.isfinite(number):
            fix = "correct the launch file: upstream would not train with it either"
            cause = "no run is that large: a digit too many, perhaps"
            raise KitError("LG504", f"--{flag} is {value}; at most 2**53 was expected", cause=cause, fix=fix)
        hidden = "$" in str(value)
        cause = not_read(str(value), self._reasons) if hidden else "the launch file is not complete or not upstream's"
        fix = f"write the value of --{flag} into a copy of the launch file and plan that"
        raise KitError("LG504", f"--{flag} is {value!r}, which is not a number", cause=cause, fix=fix)
