"""The objects of a cached upstream, checked by their own hashes before git reads them.

git may hang for ever on a damaged pack of a partial clone: it fetches what it misses, reads the same pack while it
fetches, and misses it again.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import zlib
from collections.abc import Iterator
from pathlib import Path

from leangrpo_tools.reading import opened

CHUNK = 1 << 20
HASH = 20
"""Bytes of a SHA-1, with which packs and their indexes end."""


class Damaged(Exception):
    """Objects of the cache are missing or have other bytes than they were written with."""


def check(folder: Path) -> None:
    """Raise :class:`Damaged` unless every pack, index and single object below ``folder`` is what its hash says."""
    for path in _files(folder):
        name = path.relative_to(folder).as_posix()
        try:
            if path.suffix in (".pack", ".idx", ".rev"):
                wrong = _trailer(path)
            elif re.fullmatch(r"[0-9a-f]{2}/[0-9a-f]{38}", name):
                wrong = _single(path) != name.replace("/", "")
            else:
                wrong = False
        except (OSError, zlib.error) as err:
            raise Damaged(f"{path}: {getattr(err, 'strerror', None) or err}") from err
        if wrong:
            raise Damaged(f"{path} has other bytes than its hash says")


def copy(folder: Path, target: Path) -> None:
    """Copy the objects into an object folder; leftovers of an interrupted git stay behind."""
    for path in _files(folder):
        to = target / path.relative_to(folder)
        to.parent.mkdir(parents=True, exist_ok=True)
        if not to.exists():  # the name says what is in it
            shutil.copy2(path, to)


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and not path.name.startswith("tmp_"))


def _trailer(path: Path) -> bool:
    found, kept = hashlib.sha1(usedforsecurity=False), b""
    for chunk in _chunks(path):
        kept += chunk
        found.update(kept[:-HASH])
        kept = kept[-HASH:]
    return found.digest() != kept


def _single(path: Path) -> str:
    found, inflate = hashlib.sha1(usedforsecurity=False), zlib.decompressobj()
    for chunk in _chunks(path):
        rest = chunk
        while rest:
            found.update(inflate.decompress(rest, CHUNK))
            rest = inflate.unconsumed_tail
    found.update(inflate.flush())
    return found.hexdigest()


def _chunks(path: Path) -> Iterator[bytes]:
    with opened(path) as file:
        while chunk := file.read(CHUNK):
            yield chunk
