"""git, called so that nothing of a foreign repository is executed: no hooks, no fsmonitor, no filters, no prompts."""

from __future__ import annotations

import errno
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from leangrpo_tools import processes
from leangrpo_tools.errors import KitError

SAFE = (
    "core.hooksPath=/dev/null",
    "core.fsmonitor=false",
    "core.autocrlf=false",
    "core.safecrlf=false",
    "core.attributesFile=/dev/null",
    "core.pager=cat",
    "protocol.ext.allow=never",
    "gc.auto=0",
    "maintenance.auto=false",
    "fetch.recurseSubmodules=false",
    "submodule.recurse=false",
    "advice.detachedHead=false",
)
LOCAL = (
    "GIT_DIR",
    "GIT_WORK_TREE",
    "GIT_INDEX_FILE",
    "GIT_OBJECT_DIRECTORY",
    "GIT_ALTERNATE_OBJECT_DIRECTORIES",
    "GIT_COMMON_DIR",
    "GIT_NAMESPACE",
    "GIT_PREFIX",
    "GIT_CEILING_DIRECTORIES",
    "GIT_EXTERNAL_DIFF",
    "GIT_CONFIG_PARAMETERS",
    "GIT_CONFIG_COUNT",
    "GIT_PYTHON_GIT_EXECUTABLE",  # only the git of PATH is used
)
FULL = ("no space left", "out of diskspace", "disk quota", "file too large", f"died of signal {processes.TOO_LARGE}")
"""git's words, in lower case, where it has no room to write."""
BASE_REF = "refs/leangrpo/base"
"""The tree before the patch."""
WHO = {
    f"GIT_{who}_{what}": value
    for who in ("AUTHOR", "COMMITTER")
    for what, value in (
        ("NAME", "leangrpo-kit"),
        ("EMAIL", "leangrpo-kit@localhost"),
        ("DATE", "2026-01-01T00:00:00+0000"),
    )
}
"""A fixed author and date: equal trees give equal commits."""


class GitFailed(Exception):
    """A git command ended with an unexpected status."""

    def __init__(self, args: tuple[str, ...], status: int, stderr: str) -> None:
        super().__init__(f"git {' '.join(args)}: {stderr.strip() or f'status {status}'}")
        self.status = status
        self.stderr = stderr

    @property
    def detail(self) -> str:
        """The line of git's words that says most."""
        lines = [line.strip() for line in self.stderr.splitlines() if line.strip()]
        return next(
            (line for line in lines if line.startswith(("fatal:", "error:"))), lines[-1] if lines else str(self)
        )

    @property
    def full(self) -> bool:
        """Whether it had no room: on the disk, in a quota, or under a limit of a file's size (SIGXFSZ)."""
        return self.status in (-processes.TOO_LARGE, 128 + processes.TOO_LARGE) or any(
            words in self.stderr.lower() for words in FULL
        )


def clean_environment() -> None:
    """Forget the git variables of a surrounding git process (a hook, say): they would redirect every command."""
    for name in LOCAL:
        os.environ.pop(name, None)


class Git:
    """git in one folder.

    ``isolated`` ignores the user's and the system's configuration too: for checkouts the kit itself makes. ``offline``
    keeps a partial clone from fetching what it lacks: that would run what its own configuration names, a command
    included.
    """

    def __init__(self, folder: Path, *, isolated: bool = False, offline: bool = False) -> None:
        self.folder = folder
        self._env = {"GIT_TERMINAL_PROMPT": "0", "GIT_LFS_SKIP_SMUDGE": "1", "GIT_OPTIONAL_LOCKS": "0"}
        self._env |= {"LANGUAGE": "C", "LC_ALL": "C"}  # its messages are read
        if offline:
            self._env |= {"GIT_NO_LAZY_FETCH": "1", "GIT_ALLOW_PROTOCOL": "none"}
        if isolated:
            self._env |= {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1", "GIT_ATTR_NOSYSTEM": "1"}

    def command(self, *args: str) -> list[str]:
        """The full command line."""
        return ["git", "--no-pager", *(part for item in SAFE for part in ("-c", item)), *args]

    def run(
        self, *args: str, stdin: bytes | None = None, ok: tuple[int, ...] = (0,), env: dict[str, str] | None = None
    ) -> bytes:
        """Run a command and return its output, byte for byte. Raises :class:`GitFailed` unless its status is ok."""
        done = self._execute(args, stdin, env or {})
        if done.status not in ok:
            raise GitFailed(args, done.status, done.stderr.decode("utf-8", "replace"))
        return done.stdout

    def text(self, *args: str, ok: tuple[int, ...] = (0,), env: dict[str, str] | None = None) -> str:
        """Like :meth:`run`, decoded and stripped."""
        return self.run(*args, ok=ok, env=env).decode("utf-8", "replace").strip()

    def maybe(self, *args: str) -> str | None:
        """The stripped output, or None when the command fails."""
        done = self._execute(args, None, {})
        return done.stdout.decode("utf-8", "replace").strip() if done.status == 0 else None

    def follow(self, *args: str, stdin: bytes | None, on_line: Callable[[str], None]) -> None:
        """Run a long command and hand its progress lines on. Raises :class:`GitFailed`."""
        rest = ""

        def heard(chunk: bytes) -> None:
            nonlocal rest
            *lines, rest = re.split(r"[\r\n]+", rest + chunk.decode("utf-8", "replace"))
            for line in lines:
                on_line(line)

        done = self._execute(args, stdin, {}, heard)
        if done.status:
            raise GitFailed(args, done.status, done.stderr.decode("utf-8", "replace").replace("\r", "\n"))

    def _execute(
        self,
        args: tuple[str, ...],
        stdin: bytes | None,
        env: dict[str, str],
        heard: Callable[[bytes], None] | None = None,
    ) -> processes.Done:
        try:
            # What is followed fetches, and ssh may have to ask at the terminal: it stays in the terminal's session.
            return processes.run(
                self.command(*args), self.folder, stdin or b"", {**os.environ, **self._env, **env},
                heard=heard, own_session=heard is None, start=_start,
            )  # fmt: skip
        except OSError as err:
            if err.errno in (errno.ENOENT, errno.EACCES, errno.ENOEXEC, errno.ENOTDIR) and self.folder.is_dir():
                raise no_git() from err
            raise


def _start(command: list[str], folder: Path, env: dict[str, str], own_session: bool) -> subprocess.Popen[bytes]:
    os.environ["GIT_PYTHON_REFRESH"] = "quiet"  # importing it would try git out, and raise without one
    import git

    try:
        started: Any = git.Git(str(folder)).execute(
            command, as_process=True, istream=subprocess.PIPE, env=env, start_new_session=own_session
        )
    except git.GitCommandNotFound as error:
        raise FileNotFoundError(errno.ENOENT, str(error)) from error
    process, started.proc = started.proc, None  # it would end the process as soon as nobody holds `started`
    return process


def no_git() -> KitError:
    """The error for a machine without a working git."""
    found = shutil.which("git")
    return KitError(
        "LG110",
        f"git cannot be run: {found + ' does not start' if found else 'no folder of PATH holds one that may be run'}",
        cause="git is installed, but damaged or not meant for this machine" if found else "git is not installed",
        fix="install git 2.25 or newer (Debian, Ubuntu: apt-get install git); git --version must work",
    )
