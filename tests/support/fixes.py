"""Commands in this process, what their errors say, and which codes have a test that does what the fix says."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pytest

from leangrpo_tools import cli

VERBS = {
    "apply-patch": cli.apply_patch,
    "diff-patch": cli.diff_patch,
    "revert-patch": cli.revert_patch,
    "verify-patch": cli.verify_patch,
    "bench-patch": cli.bench_patch,
    "leangrpo": cli.leangrpo,
}
PROGRAMS = (*VERBS, "git", "chmod", "cp", "mv", "rm", "ls", "df", "python", "unset")
NOT_FOLLOWED = {
    "LG122": "the fix installs the kit into another environment, from a package registry",
    "LG111": "the fix reinstalls the kit, from where it was installed",
    "LG402": "a fault of the rehearsal; the fix is to report it",
    "LG411": "a verdict of a report that went to its end; the report has the reasons, step by step",
    "LG412": "a verdict, as LG411: the report has the reasons, window by window",
    "LG413": "a verdict, as LG411: the report says in which windows graphs were held in vain",
    "LG606": "no trainer here comes to it: FSDP1 with two calls per step, of which one is held and one is not",
    "LG117": "the fix is to train with upstream's own code: nothing of the kit's runs",
    "LG199": "an error that nobody foresaw; the fix is to report it",
    "LG207": "a fault of the kit; the fix is to report it",
}
"""Codes whose fix no test can follow, and why."""
Test = TypeVar("Test", bound=Callable[..., Any])


def follows(*codes: str) -> Callable[[Test], Test]:
    """Marks a test that provokes these errors, does what their fix says, and gets further."""
    assert all(re.fullmatch(r"LG\d{3}", code) for code in codes)
    return lambda test: test


@dataclass(frozen=True)
class Said:
    """What a command left behind; the parts of its error are empty if there was none."""

    status: int
    out: str
    err: str

    def _part(self, start: str, end: str) -> str:
        found = re.search(rf"(?:^|\n){start}(.*?)(?={end}|\Z)", self.err.rstrip("\n"), re.S)
        return found[1] if found else ""

    @property
    def code(self) -> str:
        return self._part("error ", ": ")

    @property
    def what(self) -> str:
        return self._part(r"error LG\d+: ", r"\ncause: |\nfix: ")

    @property
    def fix(self) -> str:
        return self._part("fix: ", r"\nerror ")

    def options(self, first: str) -> list[str]:
        """The options of the fix from ``first`` on, up to the end of that alternative, as words of a command line."""
        at = re.search(rf"(?<![\w-]){first}\b", self.fix)
        assert at, self.fix
        words = shlex.split(re.split(r"[;,:]\s|\n", self.fix[at.start() :])[0])
        stop = next(
            (n for n, word in enumerate(words) if n and not (word.startswith("--") or words[n - 1].startswith("--"))),
            None,
        )
        return words[:stop]

    def command(self, program: str) -> str:
        """The command line of the fix that begins with ``program``."""
        assert program in PROGRAMS
        at = re.search(rf"(?<![\w/-]){program}\b", self.fix)
        assert at, self.fix
        return re.split(r";\s|, or |, then|, with |, which |\n", self.fix[at.start() :])[0].strip()


@dataclass
class Shell:
    """A user at a prompt. Commands of the kit run in this process, others as they are written."""

    monkeypatch: pytest.MonkeyPatch
    capture: Any

    def __call__(self, *words: str | Path) -> Said:
        argv = [str(word) for word in words]
        self.monkeypatch.setattr(sys, "argv", argv)
        self.capture.readouterr()
        with pytest.raises(SystemExit) as caught:
            VERBS[argv[0]]()
        out, err = self.capture.readouterr()
        return Said(int(caught.value.code or 0), out.decode(errors="replace"), err.decode(errors="replace"))

    def paste(self, line: str, cwd: Path | None = None) -> Said:
        """Run a line of a message as it is printed."""
        words = shlex.split(line)
        if words[0] in VERBS:
            return self(*words)
        if words[0] == "python":
            line = f"{shlex.quote(sys.executable)} {line.removeprefix('python')}"
        done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, cwd=cwd)
        return Said(done.returncode, done.stdout, done.stderr)

    def fails(self, code: str, *words: str | Path) -> Said:
        """Run it and expect this error, with a fix."""
        said = self(*words)
        assert said.code == code and said.status, said
        assert said.fix, said
        return said

    def works(self, *words: str | Path) -> Said:
        """Run it and expect no error."""
        said = self(*words)
        assert said.status == 0 and not said.code, said
        return said
