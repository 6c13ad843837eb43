"""Wheels: unpacked so that nothing lands outside the tree, and found again in a folder of installed packages."""

from __future__ import annotations

import csv
import io
import re
import stat
import zipfile
import zlib
from pathlib import Path

from leangrpo_tools.errors import KitError
from leangrpo_tools.lock import PypiEntry, inside, plain_name
from leangrpo_tools.reading import MIB, read_text
from leangrpo_tools.tree import Content

NOT_PORTABLE = re.compile(r'[\x00-\x1f\x7f"*:<>?\\|]')
"""Characters that some file systems, or git's line formats, do not take in a name."""


def unpack(content: bytes, entry: PypiEntry) -> dict[str, Content]:
    """The files of a wheel by name, sorted. A mode is 0o755 if the wheel marks the file as executable, else 0o644.

    Raises LG116 for a damaged archive and for one whose names or kinds of files are not those of a plain tree.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            members = archive.infolist()
            _check(members, entry)
            return {
                item.filename: Content(archive.read(item), 0o755 if item.external_attr >> 16 & 0o111 else 0o644)
                for item in sorted(members, key=lambda item: item.filename)
                if not item.is_dir()
            }
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError, ValueError) as err:
        raise _refused(entry, [str(err)]) from err


def _check(members: list[zipfile.ZipInfo], entry: PypiEntry) -> None:
    problems: list[str] = []
    kinds: dict[str, str] = {}
    for item in members:
        name = item.orig_filename  # ``filename`` ends at the first NUL
        try:
            inside(name)
        except ValueError as err:
            problems.append(f"{name!r}: {err}")
            continue
        if NOT_PORTABLE.search(name):
            problems.append(f"{name!r}: not a name on every file system")
            continue
        kind = stat.S_IFMT(item.external_attr >> 16)
        if kind not in (0, stat.S_IFDIR if item.is_dir() else stat.S_IFREG):
            problems.append(f"{name!r}: {'a symbolic link' if stat.S_ISLNK(kind) else 'not a regular file'}")
        # In lower case: some file systems do not tell cases apart.
        parts = name.rstrip("/").lower().split("/")
        for depth in range(1, len(parts)):
            if kinds.setdefault("/".join(parts[:depth]), "folder") == "file":
                problems.append(f"{name!r}: inside a file")
        seen = kinds.get("/".join(parts))
        if seen == "file" or (seen and not item.is_dir()):
            problems.append(f"{name!r}: given twice")
        kinds["/".join(parts)] = "folder" if item.is_dir() else "file"
    if problems:
        raise _refused(entry, problems)


def _refused(entry: PypiEntry, problems: list[str]) -> KitError:
    more = f" (and {len(problems) - 5} more)" if len(problems) > 5 else ""
    return KitError(
        "LG116",
        f"{entry.filename}: {'; '.join(problems[:5])}{more}",
        cause="it was packed this way: it has the pinned hash",
        fix="pin another release in upstreams.lock",
    )


def installed_version(root: Path, entry: PypiEntry) -> str | None:
    """The version of the project that a folder of packages, or an unpacked wheel, holds; None if it does not say."""
    info = _info(root, entry)
    return info.name.removesuffix(".dist-info").split("-")[1] if info else None


def top_names(root: Path, entry: PypiEntry) -> set[str] | None:
    """The first parts of the names of the project's files below ``root``; None if its list of them is not there."""
    info = _info(root, entry)
    try:
        text = read_text(info / "RECORD", 16 * MIB) if info else ""
    except (OSError, UnicodeDecodeError):
        return None
    names = (row[0] for row in csv.reader(text.splitlines()) if row)
    return {name.split("/")[0] for name in names if not name.startswith(("/", ".."))} or None


def _info(root: Path, entry: PypiEntry) -> Path | None:
    """The project's ``.dist-info`` folder. One listing of ``root``, nothing below it."""
    for path in sorted(root.glob("*-*.dist-info")):
        if plain_name(path.name.split("-")[0]) == plain_name(entry.project) and path.is_dir():
            return path
    return None
