"""Folders of the kit's own: written with clear errors, built beside their place, removed whole."""

from __future__ import annotations

import errno
import glob
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

from leangrpo_tools.errors import KitError


@contextmanager
def guard_disk(folder: Path) -> Iterator[None]:
    """Turn "disk full" and "may not write" into their errors."""
    try:
        yield
    except OSError as err:
        if err.errno in (errno.ENOSPC, errno.EDQUOT):
            raise disk_full(folder) from err
        raise KitError("LG112", f"{err.filename or folder}: {err.strerror}", fix=f"ls -ld {folder}") from err


@contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Hold a lock file, or a folder, waiting for another run that has it. The system drops the lock of a killed run."""
    try:
        import fcntl
    except ImportError:  # no such locks on this system
        yield
        return
    folder = path.is_dir()
    with guard_disk(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        held = os.open(path, os.O_RDONLY if folder else os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    try:
        # Some network file systems lock no folders; a lock less is better than no patch.
        with suppress(OSError) if folder else nullcontext():
            fcntl.flock(held, fcntl.LOCK_EX)
        yield
    finally:
        os.close(held)


def disk_full(folder: Path) -> KitError:
    """The error for a full disk."""
    return KitError(
        "LG106", f"no space left below {folder}", cause="the disk or a quota is full", fix=f"df -h {folder}"
    )


def remove_tree(folder: Path) -> None:
    """Remove a folder of our own, git's read-only files included."""
    for base, _, names in os.walk(folder):
        for item in (base, *(os.path.join(base, name) for name in names)):
            if not os.path.islink(item):
                os.chmod(item, os.stat(item).st_mode | stat.S_IWUSR)
    shutil.rmtree(folder, ignore_errors=True)


def part(dest: Path) -> Path:
    """An empty folder beside ``dest`` to build it in; what killed runs left there is removed."""
    for left in dest.parent.glob(f".{glob.escape(dest.name)}.*.part"):
        pid = left.name.split(".")[-2]
        if not pid.isdigit() or not _runs(int(pid)):
            remove_tree(left)
    temp = dest.parent / f".{dest.name}.{os.getpid()}.part"
    remove_tree(temp)
    temp.mkdir()
    return temp


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return pid != os.getpid()
