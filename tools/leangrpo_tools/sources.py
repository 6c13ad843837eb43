"""Sources of upstreams: which are usable, and what it means when git fails on one."""

from __future__ import annotations

import os
from pathlib import Path

from leangrpo_tools import data
from leangrpo_tools.disk import disk_full, no_room
from leangrpo_tools.errors import KitError
from leangrpo_tools.gitcmd import GitFailed
from leangrpo_tools.lock import GitEntry
from leangrpo_tools.reading import absolute

NETWORK = (
    "could not resolve host",
    "could not resolve hostname",
    "failed to connect",
    "couldn't connect",
    "connection refused",
    "connection timed out",
    "connection reset",
    "network is unreachable",
    "operation timed out",
    "unable to access",
    "early eof",
)
LACKS_COMMIT = ("not our ref", "couldn't find remote ref", "unadvertised object", "remote error: upload-pack")
LACKS_FILES = ("unable to read", "bad object", "missing blob", "could not fetch", "from promisor remote")


def is_local(url: str) -> bool:
    """Whether git would read a source from this machine's disk."""
    return "://" not in url and not (":" in url.split("/")[0] and not Path(url).exists())


def usable(url: str) -> str:
    """The source as git should see it: local paths absolute. Raises LG105 for a path that holds no repository."""
    if not url or url.startswith("-"):
        raise KitError("LG105", f"{url!r} is neither a URL nor a path", fix="--source URL|PATH")
    if not is_local(url):
        return url
    path = absolute(url)
    if not path.exists():
        raise KitError("LG105", f"{path} does not exist", cause="a mistyped --source", fix="ls " + str(path.parent))
    if not os.access(path, os.R_OK | os.X_OK):
        raise KitError("LG105", f"{path} may not be read", cause="its permissions", fix=f"ls -ld {path}")
    if not any((path / inner / "objects").is_dir() for inner in ("", ".git")) and not (path / ".git").is_file():
        raise KitError(
            "LG105",
            f"{path} is not a git repository",
            cause="--source wants a clone or a bare git folder",
            fix=f"git -C {path} rev-parse --git-dir",
        )
    return str(path)


def failure(err: GitFailed, url: str, entry: GitEntry, *, has_commit: bool = False) -> KitError:
    """The error that a failed git command stands for."""
    text = err.stderr.lower()
    detail = err.detail
    if err.full:
        return disk_full(data.cache_dir())
    if any(words in text for words in LACKS_COMMIT) and not has_commit:
        return KitError(
            "LG107",
            f"{url} has no commit {entry.commit}",
            cause="a fork or an old mirror; or the server refuses single commits",
            fix="use the original repository, or bring the mirror up to date (git fetch --all)",
        )
    if any(words in text for words in NETWORK):
        return KitError(
            "LG104",
            f"{url} cannot be reached: {detail}",
            cause="no network, a proxy, or a mistyped address",
            fix="run once where there is network (the cache is kept), or give a local clone: --source PATH",
        )
    if no_room(data.cache_dir()):
        return disk_full(data.cache_dir())
    if any(words in text for words in (LACKS_COMMIT + LACKS_FILES if has_commit else LACKS_FILES)):
        return KitError(
            "LG109",
            f"{url} lacks files of the pinned commit: {detail}",
            cause="a partial or damaged mirror",
            fix="use a full clone: --source URL|PATH",
        )
    return KitError(
        "LG105",
        f"{url} cannot be read: {detail}",
        cause="not a git repository, no permission, or owned by another user",
        fix=f"git ls-remote {url}",
    )
