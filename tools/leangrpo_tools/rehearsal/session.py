"""One fork server and what it has already run, shared by the rehearsals of one command or test session."""

from __future__ import annotations

import dataclasses
import shutil
import signal
import threading
from pathlib import Path
from typing import Any

from leangrpo_rehearsal.base import Config
from leangrpo_tools.rehearsal.client import ForkServer
from leangrpo_tools.rehearsal.interpreter import Interpreter, examine
from leangrpo_tools.rehearsal.records import Records
from leangrpo_tools.rehearsal.scratch import Scratch


@dataclasses.dataclass
class Native:
    """Two runs of the unpatched tree, and the data they used."""

    assets: Path
    out: Path
    """Where the first run's ranks recorded."""
    first: Records
    again: Records
    regrouped: Records | None = None
    """The same samples in other batches, where the script's bound needs it."""


class Session:
    """A fork server, a scratch folder, and native runs by what they depend on. Use as a context manager: then a polite
    signal to end cleans up, too.

    `root` is a folder of the caller's own, which stays. Of a scratch folder the logs stay if `keep` is set. `python`
    rehearses, by default the kit's own interpreter.
    """

    def __init__(self, root: Path | None = None, python: Interpreter | None = None) -> None:
        self._python = python
        self._scratch = None if root else Scratch()
        self.root = self._scratch.path if self._scratch else Path(root or "")
        self.keep = False
        self._replaced: dict[int, Any] = {}
        self.native: dict[tuple[Any, ...], Native] = {}
        self._server: ForkServer | None = None
        self._count = 0

    @property
    def python(self) -> Interpreter:
        """What rehearses. Raises LG405 if it cannot."""
        if self._python is None:
            self._python = examine()
        return self._python

    @property
    def server(self) -> ForkServer:
        """The fork server, started when first asked for."""
        if self._server is None:
            self._server = ForkServer(self.root / "lent", self.python)
        return self._server

    def folder(self) -> Path:
        """A new folder for one rehearsal."""
        self._count += 1
        folder = self.root / f"rehearsal{self._count}"
        folder.mkdir(parents=True)
        return folder

    def close(self) -> None:
        """Ends the server; removes the folder unless somebody may want to read it."""
        if self._server is not None:
            self._server.close()
            self._server = None
        if self._scratch is not None:
            if self.keep:
                self._keep_logs()
            self._scratch.close(keep=self.keep)
            self._scratch = None

    def _keep_logs(self) -> None:
        """Of what is kept for the user to read, only that: checkpoints, gradients and trees are large."""
        for item in self.root.glob("*/*"):
            if item.is_dir() and not item.is_symlink() and item.name != "logs":
                shutil.rmtree(item, ignore_errors=True)

    def __enter__(self) -> Session:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGHUP):
                if signal.getsignal(number) is signal.SIG_DFL:
                    self._replaced[number] = signal.signal(number, _end)
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.close()
        finally:
            for number, handler in self._replaced.items():
                signal.signal(number, handler)


def _end(number: int, _: object) -> None:
    """End as the shell reports a process that the signal has killed, by way of what there is to clean up."""
    raise SystemExit(128 + number)


def native_key(module: str, tree: Path, config: Config, stand_ins: tuple[str, ...] = ()) -> tuple[Any, ...]:
    """What a native run depends on: not on the settings of the patched one, unless they ask for `stand_ins`."""
    return module, str(tree), stand_ins, dataclasses.replace(config, schedule="", budget_gb="", sync="", buffers="")
