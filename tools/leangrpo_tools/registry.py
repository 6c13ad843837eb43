"""Wheels from a package registry: downloaded once, kept in the cache, and checked against the lock at every use."""

from __future__ import annotations

import hashlib
import os
from contextlib import AbstractContextManager
from pathlib import Path

from leangrpo_tools import data, pipcmd
from leangrpo_tools.disk import exclusive, guard_disk, part, remove_tree
from leangrpo_tools.errors import KitError
from leangrpo_tools.lock import PypiEntry
from leangrpo_tools.progress import Progress
from leangrpo_tools.reading import absolute, read_regular


def get(name: str, entry: PypiEntry, source: str | None = None) -> bytes:
    """The pinned wheel: from the cache, else from ``source`` (a wheel, a folder that holds it, or the URL of an index),
    else from the registry that pip is set up for.

    Raises LG104 (no network), LG105 (the source cannot be read), LG107 (no such version there), LG108 (wrong hash),
    LG115 (no pip) and LG106 or LG112 for the cache.
    """
    content = cached(entry)
    if content is not None:
        if source and "://" not in source:
            _check(entry, _from_path(source, entry), source)  # whoever names a wheel wants to know if it is another
        return content
    with _alone(entry):
        content = cached(entry)
        if content is None:
            content = _from_path(source, entry) if source and "://" not in source else _from_index(name, source, entry)
            _put(entry, content, pipcmd.shown(source))
    return content


def cached(entry: PypiEntry) -> bytes | None:
    """The wheel in the cache; None if it is absent or damaged."""
    try:
        content = read_regular(kept(entry), pipcmd.LARGEST)
    except OSError:
        return None
    return content if hashlib.sha256(content).hexdigest() == entry.sha256 else None


def put(entry: PypiEntry, content: bytes, source: str) -> None:
    """Put a wheel into the cache. Raises LG108 if it is not the pinned one."""
    with _alone(entry):
        _put(entry, content, source)


def _check(entry: PypiEntry, content: bytes, source: str) -> None:
    found = hashlib.sha256(content).hexdigest()
    if found != entry.sha256:
        raise pipcmd.wrong(entry, source, f"it has the sha256 {found}")


def _put(entry: PypiEntry, content: bytes, source: str) -> None:
    _check(entry, content, source)
    with guard_disk(data.cache_dir()):
        temp = _beside(entry)
        try:
            (temp / "wheel").write_bytes(content)
            os.replace(temp / "wheel", kept(entry))
        finally:
            remove_tree(temp)


def kept(entry: PypiEntry) -> Path:
    """Where the cache has the wheel, if it has it."""
    return data.cache_dir() / "wheels" / entry.filename


def _alone(entry: PypiEntry) -> AbstractContextManager[None]:
    """Keeps two runs from filling the cache at the same time."""
    return exclusive(kept(entry).with_name(entry.filename + ".lock"))


def _beside(entry: PypiEntry) -> Path:
    """An empty folder on the cache's disk."""
    kept(entry).parent.mkdir(parents=True, exist_ok=True)
    return part(kept(entry))


def _from_path(source: str, entry: PypiEntry) -> bytes:
    path = absolute(source)
    if path.is_dir():
        path = path / entry.filename
        if not path.exists():
            raise KitError(
                "LG107", f"{path.parent} holds no {entry.filename}",
                cause="the folder has other versions, or is not the one that holds the wheels",
                fix=f"pip download --no-deps {entry.project}=={entry.version}, where there is network",
            )  # fmt: skip
    elif not path.exists():
        raise KitError("LG105", f"{path} does not exist", cause="a mistyped --source", fix=f"ls {path.parent}")
    try:
        return read_regular(path, pipcmd.LARGEST)
    except OSError as err:
        raise KitError("LG105", f"{path} cannot be read: {err.strerror}", fix=f"ls -l {path}") from err


def _from_index(name: str, url: str | None, entry: PypiEntry) -> bytes:
    with guard_disk(data.cache_dir()):
        temp = _beside(entry)
        try:
            with Progress(f"fetching {name}"):
                return pipcmd.download(entry, url, temp)
        finally:
            remove_tree(temp)
