"""A progress bar on a terminal, nothing otherwise."""

from __future__ import annotations

import re
import sys
from typing import Any

_PERCENT = re.compile(r"(?:remote: )?([A-Z][A-Za-z ]+):\s+(\d+)%")


class Progress:
    """``with Progress("fetching X") as p: p.git_line(line)`` shows what git reports."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> Progress:
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import Progress as Bar

            self._bar = Bar(console=Console(stderr=True), transient=True)
            self._bar.start()
            self._task = self._bar.add_task(self._title, total=100)
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def git_line(self, line: str) -> None:
        """Take a line of ``git fetch --progress``."""
        found = _PERCENT.match(line.strip())
        if self._bar is not None and found:
            self._bar.update(self._task, description=f"{self._title}: {found[1].lower()}", completed=int(found[2]))
