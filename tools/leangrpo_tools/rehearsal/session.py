"""One fork server and what it has already run, shared by the rehearsals of one command or test session."""

from __future__ import annotations

import dataclasses
import shutil
import tempfile
from pathlib import Path
from typing import Any

from leangrpo_tools.rehearsal.base import Config
from leangrpo_tools.rehearsal.client import ForkServer
from leangrpo_tools.rehearsal.compare import Run


@dataclasses.dataclass
class Native:
    """Two runs of the unpatched tree, and the data they used."""

    assets: Path
    out: Path
    """Where the first run's ranks recorded."""
    first: Run
    again: Run
    regrouped: Run | None = None
    """The same samples in other batches, where the script's bound needs it."""


class Session:
    """A fork server, a scratch folder, and native runs by what they depend on. Use as a context manager."""

    def __init__(self, root: Path | None = None) -> None:
        self.root = root or Path(tempfile.mkdtemp(prefix="leangrpo-verify-"))
        self.keep = root is not None
        self.native: dict[tuple[Any, ...], Native] = {}
        self._server: ForkServer | None = None
        self._count = 0

    @property
    def server(self) -> ForkServer:
        """The fork server, started when first asked for."""
        if self._server is None:
            self._server = ForkServer()
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
        if not self.keep:
            shutil.rmtree(self.root, ignore_errors=True)

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def native_key(module: str, tree: Path, config: Config, stand_ins: tuple[str, ...] = ()) -> tuple[Any, ...]:
    """What a native run depends on: not on the settings of the patched one, unless they ask for `stand_ins`."""
    return module, str(tree), stand_ins, dataclasses.replace(config, schedule="", budget_gb="", sync="", buffers="")
