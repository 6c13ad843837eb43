"""The scratch folder of a rehearsal: marked by a lock that its process holds, so that others can tell when it is left.

The system drops the lock with the process, however that ends, and a process id that is used again means nothing here.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

PREFIX = "leangrpo-verify-"
MARK = "held"


class Scratch:
    """A new folder in the folder for temporary files. Folders that killed processes of this user left are removed."""

    def __init__(self) -> None:
        _sweep(Path(tempfile.gettempdir()))
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX))
        # Locked before it has its name: under that name nobody finds it unlocked while this process runs.
        self._held = os.open(self.path / "new", os.O_RDWR | os.O_CREAT, 0o600)
        with suppress(OSError):  # a file system without locks: then nobody removes the folder but this process
            fcntl.flock(self._held, fcntl.LOCK_EX)
            (self.path / "new").rename(self.path / MARK)

    def close(self, *, keep: bool) -> None:
        """Remove the folder or, to keep it for good, its mark."""
        if keep:
            (self.path / MARK).unlink(missing_ok=True)
        else:
            shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._held)


def _sweep(root: Path) -> None:
    for folder in root.glob(f"{PREFIX}*"):
        with suppress(OSError):  # held by a running process, without a mark, or gone by now
            if folder.is_symlink() or folder.stat().st_uid != os.getuid():
                continue
            mark = os.open(folder / MARK, os.O_RDWR | os.O_NOFOLLOW)
            try:
                if stat.S_ISREG(os.fstat(mark).st_mode):
                    fcntl.flock(mark, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(mark)
