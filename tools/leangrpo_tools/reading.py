"""Files that others wrote, read with a bound: regular files only, so that no pipe or device is waited for."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

MIB = 1 << 20


def opened(path: Path) -> BinaryIO:
    """A regular file, open for reading. Raises OSError for everything else, a name with a NUL included."""
    flags = os.O_RDONLY | sum(getattr(os, name, 0) for name in ("O_NONBLOCK", "O_NOCTTY", "O_CLOEXEC", "O_BINARY"))
    try:
        number = os.open(path, flags)
    except ValueError as err:
        raise OSError(errno.EINVAL, str(err), str(path)) from err
    try:
        if not stat.S_ISREG(os.fstat(number).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        return os.fdopen(number, "rb")
    except BaseException:
        os.close(number)
        raise


def read_regular(path: Path, limit: int) -> bytes:
    """The bytes of a regular file that has at most ``limit``. Raises OSError, with its reason in ``strerror``."""
    with opened(path) as file:
        content = file.read(limit + 1)
    if len(content) > limit:
        raise OSError(errno.EINVAL, f"larger than {limit / MIB:g} MiB", str(path))
    return content


def absolute(text: str) -> Path:
    """A path as a user writes it, from the root on; a ``~`` that stands for nobody's folder is part of a name."""
    return Path(os.path.expanduser(text)).absolute()


def read_text(path: Path, limit: int) -> str:
    """The text of such a file, line ends as in ``Path.read_text``. Raises OSError and UnicodeDecodeError."""
    return read_regular(path, limit).decode("utf-8").replace("\r\n", "\n").replace("\r", "\n")
