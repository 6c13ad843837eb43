"""Folders of the kit's own: written with clear errors, built beside their place, removed whole."""

from __future__ import annotations

import errno
import glob
import hashlib
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

from leangrpo_tools.errors import KitError

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
BAD_NAME = (errno.ENAMETOOLONG,)
LONGEST_NAME = 255
"""Bytes of one part of a path, on the usual file systems."""


@contextmanager
def guard_disk(folder: Path) -> Iterator[None]:
    """Turn "disk full" and "may not write" into their errors."""
    try:
        yield
    except OSError as err:
        raise problem(err, folder) from err


def is_full(err: OSError) -> bool:
    """Whether there was no room; where many files were copied, for one of them."""
    return err.errno in FULL or (err.errno is None and any(os.strerror(number) in str(err) for number in FULL))


def problem(err: OSError, folder: Path) -> KitError:
    """The error for what the system says where the kit writes below ``folder``."""
    if is_full(err):
        return disk_full(folder)
    where = err.filename or folder
    if err.errno in BAD_NAME:
        return bad_path(where, err.strerror)
    return KitError("LG112", f"{where}: {err.strerror or err}", fix=f"ls -ld {folder}")


def bad_path(path: object, why: str | None) -> KitError:
    """The error for a path that no file can have."""
    text = os.fsdecode(path) if isinstance(path, bytes) else str(path)
    shown = f"{text[:60]}... ({len(text)} characters)" if len(text) > 300 else text
    return KitError(
        "LG131", f"{shown!r}: {why or 'it is no path'}", cause=f"a name may have {LONGEST_NAME} bytes, and no NUL",
        fix="choose another name",
    )  # fmt: skip


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


@contextmanager
def shared(path: Path) -> Iterator[None]:
    """Hold a lock file together with other readers; without one, or where it may not be opened, hold nothing."""
    try:
        import fcntl

        held = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    except (ImportError, OSError):
        yield
        return
    try:
        with suppress(OSError):
            fcntl.flock(held, fcntl.LOCK_SH)
        yield
    finally:
        os.close(held)


def no_room(folder: Path) -> bool:
    """Whether the disk of an existing folder is next to full: less than 1 MiB, or 16 inodes. git may not say so."""
    with suppress(OSError):
        if hasattr(os, "statvfs"):
            found = os.statvfs(folder)
            return found.f_bavail * found.f_frsize < 1 << 20 or (found.f_files > 0 and found.f_favail < 16)
        return shutil.disk_usage(folder).free < 1 << 20
    return False


def disk_full(folder: Path) -> KitError:
    """The error for a full disk."""
    more, temporary = "", Path(tempfile.gettempdir())
    with suppress(OSError):
        if folder != temporary and folder.is_relative_to(temporary) and _device(folder) == _device(temporary):
            folder, more = temporary, "; or export TMPDIR=FOLDER, one with more room"
    return KitError(
        "LG106", f"no space left below {folder}",
        cause="the disk, its inodes or a quota are used up, or a limit of a file's size (ulimit -f) is reached",
        fix=f"df -h {folder}; df -i {folder}; ulimit -f{more}",
    )  # fmt: skip


def _device(folder: Path) -> int:
    """The file system that a folder is on, or will be."""
    while not folder.exists():
        folder = folder.parent
    return folder.stat().st_dev


def remove_tree(folder: Path) -> None:
    """Remove a folder of our own, git's read-only files included."""
    for base, _, names in os.walk(folder):
        for item in (base, *(os.path.join(base, name) for name in names)):
            if not os.path.islink(item):
                os.chmod(item, os.stat(item).st_mode | stat.S_IWUSR)
    shutil.rmtree(folder, ignore_errors=True)


def part(dest: Path) -> Path:
    """An empty folder beside ``dest`` to build it in; what killed runs left there is removed."""
    name = dest.name
    if len(os.fsencode(name)) > LONGEST_NAME - len("..1234567890.part"):
        name = hashlib.sha256(os.fsencode(name)).hexdigest()
    for left in dest.parent.glob(f".{glob.escape(name)}.*.part"):
        pid = left.name.split(".")[-2]
        if not pid.isdigit() or not _runs(int(pid)):
            remove_tree(left)
    temp = dest.parent / f".{name}.{os.getpid()}.part"
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
