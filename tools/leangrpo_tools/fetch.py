"""Bring a pinned upstream onto this machine: into the cache once, and from there into checkouts.

The cache holds, for an upstream in git, one bare repository with the pinned commit, its trees and every file a checkout
needs (:mod:`leangrpo_tools.gitcache`), and for one of a package registry the wheel (:mod:`leangrpo_tools.registry`), so
that later runs need neither network nor ``--source``.
"""

from __future__ import annotations

import errno
from pathlib import Path

from leangrpo_tools import checkouts, gitcache, registry, wheel
from leangrpo_tools.disk import guard_disk, part, remove_tree
from leangrpo_tools.errors import KitError
from leangrpo_tools.gitcmd import Git, GitFailed
from leangrpo_tools.lock import EmbeddedEntry, Entry, GitEntry, PypiEntry


def checkout(name: str, entry: Entry, dest: Path, source: str | None = None) -> None:
    """Make a clean checkout of ``entry`` in ``dest``, which must be absent or empty.

    It is built beside ``dest`` and renamed, so ``dest`` is complete or untouched. HEAD is detached at the pin and
    ``refs/leangrpo/base`` marks it. The same checkout that another run made meanwhile will do. Raises the LG1xx errors.
    """
    if dest.is_symlink() or (dest.exists() and (not dest.is_dir() or any(dest.iterdir()))):
        raise _taken(dest, "it is no checkout made by this kit")
    with guard_disk(dest.parent):
        dest.parent.mkdir(parents=True, exist_ok=True)
        temp = part(dest)
        try:
            _make(name, entry, temp, source)
            _put(temp, dest)
        except GitFailed as err:
            raise checkouts.failure(err, dest.parent) from err
        finally:
            remove_tree(temp)


def _make(name: str, entry: Entry, folder: Path, source: str | None) -> None:
    if isinstance(entry, GitEntry):
        gitcache.take(name, entry, folder, source)
        checkouts.finish(entry, folder)
    elif isinstance(entry, PypiEntry):
        content = registry.get(name, entry, source)
        message = f"{entry.release}, as published in {entry.filename}"
        checkouts.commit(folder, wheel.unpack(content, entry), message)
    else:
        checkouts.from_kit(name, entry, folder)


def _put(temp: Path, dest: Path) -> None:
    try:
        if dest.exists():
            dest.rmdir()
        temp.rename(dest)
    except OSError as err:
        if err.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise
        made = [Git(folder).maybe("config", "--local", "--get", "leangrpo.checkout") for folder in (temp, dest)]
        if made[0] != made[1]:
            raise _taken(dest, "another process put something there meanwhile") from err


def _taken(dest: Path, cause: str) -> KitError:
    return KitError(
        "LG103",
        f"{dest} exists and is not empty",
        cause=cause,
        fix=f"choose another DEST, or patch a checkout of your own with --tree {dest}",
    )


def cached(name: str, entry: GitEntry | PypiEntry) -> bool:
    """Whether a checkout of ``entry`` needs no source."""
    return gitcache.cached(name, entry) if isinstance(entry, GitEntry) else registry.cached(entry) is not None


def unused(name: str, entry: Entry, source: str | None) -> list[str]:
    """A notice for a source that :func:`checkout` would not fetch from, ask before it; else nothing.

    A pinned commit is the same wherever it comes from, so there is nothing to gain from reading it again.
    """
    if source is None or (isinstance(entry, PypiEntry) and "://" not in source):  # a wheel that is named is compared
        return []
    if isinstance(entry, EmbeddedEntry):
        return [f"--source was not used: {name} comes with the kit"]
    if not cached(name, entry):
        return []
    where = registry.kept(entry) if isinstance(entry, PypiEntry) else gitcache.place(name)
    return [f"--source was not used: {entry.pin} is in the cache already, checked by its hash ({where})"]
