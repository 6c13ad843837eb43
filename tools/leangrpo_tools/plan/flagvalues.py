"""The values of upstream's flags in a training command."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable, Mapping, Sequence
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


class _Maybe(str):
    """What may set a flag that is not written: no default is taken then."""


class FlagValues:
    """Values of upstream's flags: as said, else from the command, else the script's default, else the kit's table.

    Args:
        training: the command.
        options: the script's options from its source, if that is at hand.
        table: the kit's table of defaults at the pin.
        said: flags and values of the command line, before those of the file.
        needed: flags that a fix names together, where several are not known.
        doubt: why defaults are not known, if they are not.
    """

    def __init__(
        self, training: Training, options: dict[str, Option] | None, table: Mapping[str, int | float | bool | str],
        said: Mapping[str, str] | None = None, needed: Iterable[str] = (), doubt: str = "",
    ) -> None:  # fmt: skip
        self._words, self._options, self._table = training.after, options, table
        self._reasons, self._needed, self._doubt = training.reasons, list(needed), doubt
        self._said = {self._whole_name(name): value for name, value in (said or {}).items()}
        for name in self._said:
            self._must_exist(name)
        self.defaulted: dict[str, object] = {}
        self.unresolved = [word for place, word in enumerate(self._words) if self._hides(self._words, place)]

    def _must_exist(self, name: str) -> None:
        names = [*(self._options or self._table), *self._needed]
        if name not in names:
            near = difflib.get_close_matches(name, names, 1) or ["FLAG"]
            cause = "it is none of the script's flags, or none that a plan needs"
            raise KitError("LG504", f"--set {name} sets nothing", cause=cause, fix=f"--set {near[0]}=VALUE")

    def _hides(self, words: Sequence[str], place: int) -> bool:
        """Whether a word may hold flags of its own."""
        word = words[place]
        if word.startswith("-"):
            return "$" in word.partition("=")[0]
        if not word.startswith("$"):
            return False
        before = words[place - 1] if place else ""
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

    def _in(self, words: Sequence[str], flag: str) -> str | None:
        found = None
        for place, word in enumerate(words):
            name, equals, value = word[2:].partition("=")
            if self._hides(words, place):
                closed = isinstance(word, Hidden) and word.closed
                ways = {self._in(part, flag) for part in word.alternatives} if isinstance(word, Hidden) else set()
                if closed and None not in ways:
                    found = ways.pop() if len(ways) == 1 else str(word)
                elif found is None and (not closed or ways != {None}):
                    found = _Maybe(word)
            elif word.startswith("--") and (name == flag or self._whole_name(name) == flag):
                found = value if equals else (words[place + 1] if place + 1 < len(words) else "")
        return found

    def _given(self, flag: str) -> str | None:
        found = self._in(self._words, flag) if flag not in self._said else self._said[flag]
        return _Maybe(self._doubt) if found is None and self._doubt else found

    def _not_known(self, flag: str, text: str) -> KitError:
        what = f"--{flag} is {text!r}, which is not known"
        if isinstance(text, _Maybe):
            what = f"--{flag} is not written in the launch file, and {text} may set it"
        others = [name for name in self._needed if name != flag and "$" in str(self._given(name) or "")]
        fix = " ".join(f"--set {name}={self._form(name)}" for name in dict.fromkeys([flag, *others]))
        return KitError("LG504", what, cause=not_read(text, self._reasons), fix=f"say it: {fix}")

    def _form(self, flag: str) -> str:
        option = (self._options or {}).get(flag)
        switch = not option.takes_value if option else isinstance(self._table.get(flag), bool)
        return "true|false" if switch else "VALUE"

    def _default(self, flag: str, told: bool = True) -> object:
        option = (self._options or {}).get(flag)
        value = option.default if option else self._table.get(flag)
        if told:
            self.defaulted[flag] = value
        return value

    def switch(self, flag: str | None, told: bool = True) -> bool:
        """Whether a flag without a value is set. `told`: a default is listed among the others. Raises LG504."""
        if flag is None:
            return False
        given = self._given(flag)
        if isinstance(given, _Maybe):
            raise self._not_known(flag, given)
        if flag in self._said:
            if self._said[flag].lower() in ("true", "false"):
                return self._said[flag].lower() == "true"
            cause = f"--set {flag}={self._said[flag]} was given"
            raise KitError("LG504", f"--{flag} is a switch", cause=cause, fix=f"--set {flag}=true, or false")
        return True if given is not None else bool(self._default(flag, told))

    def text(self, flag: str, told: bool = True) -> str | None:
        """The value as text; None where there is none. It has a dollar sign where it is not known."""
        given = self._given(flag)
        value = self._default(flag, told) if given is None else given
        return None if value is None or value == "" else str(value)

    def why_not(self, text: str) -> str:
        """Why a text with a dollar sign is not known."""
        return not_read(text, self._reasons)

    def holds(self, condition: str) -> bool:
        """Whether the flag in `FLAG=VALUE` has that value. Raises LG504 where that is not known."""
        flag, _, value = condition.partition("=")
        given = self._given(flag)
        if given is not None and "$" in given:
            raise self._not_known(flag, given)
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
            cause, fix = "upstream has no default for it", f"say it: --set {flag}=VALUE"
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
        if isinstance(given, str) and "$" in given:
            raise self._not_known(flag, given)
        cause, fix = "the launch file is not complete or not upstream's", f"say it: --set {flag}=VALUE"
        raise KitError("LG504", f"--{flag} is {value!r}, which is not a number", cause=cause, fix=fix)
