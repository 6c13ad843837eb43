"""git, called so that nothing of a foreign repository is executed: no hooks, no fsmonitor, no filters, no prompts."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

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
    "GIT_PYTHON_GIT_EXECUTABLE",  # GitPython would try it out, though only the git of PATH is used
)
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


def clean_environment() -> None:
    """Forget the git variables of a surrounding git process (a hook, say): they would redirect every command."""
    for name in LOCAL:
        os.environ.pop(name, None)


class Git:
    """git in one folder.

    ``isolated`` ignores the user's and the system's configuration (and so, all filters). ``offline`` lets a partial
    clone not fetch what it lacks: how it would do that is up to the repository's configuration, a command included.
    """

    def __init__(self, folder: Path, *, isolated: bool = False, offline: bool = False) -> None:
        try:
            import git as gitpython
        except ModuleNotFoundError as err:
            raise KitError(
                "LG110", "git cannot be run: the Python package GitPython is missing",
                cause="an incomplete installation of the kit", fix="pip install gitpython",
            ) from err  # fmt: skip
        except ImportError as err:  # it tries git out
            raise no_git() from err
        self.folder = folder
        self._git = gitpython.Git(str(folder))
        self._not_found = gitpython.GitCommandNotFound
        self._env = {"GIT_TERMINAL_PROMPT": "0", "GIT_LFS_SKIP_SMUDGE": "1", "GIT_OPTIONAL_LOCKS": "0"}
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
        status, out, err = self._execute(args, stdin, env or {})
        if status not in ok:
            raise GitFailed(args, status, err)
        return out

    def text(self, *args: str, ok: tuple[int, ...] = (0,), env: dict[str, str] | None = None) -> str:
        """Like :meth:`run`, decoded and stripped."""
        return self.run(*args, ok=ok, env=env).decode("utf-8", "replace").strip()

    def maybe(self, *args: str) -> str | None:
        """The stripped output, or None when the command fails."""
        status, out, _ = self._execute(args, None, {})
        return out.decode("utf-8", "replace").strip() if status == 0 else None

    def follow(self, *args: str, stdin: bytes | None, on_line: Callable[[str], None]) -> None:
        """Run a long command and hand its progress lines on. Raises :class:`GitFailed`."""
        from git.cmd import handle_process_output

        lines: list[str] = []

        def heard(line: str | bytes) -> None:
            text = line.decode("utf-8", "replace") if isinstance(line, bytes) else line
            lines.append(text)
            on_line(text)

        with tempfile.TemporaryFile() as feed:
            feed.write(stdin or b"")
            feed.seek(0)
            try:
                process = self._git.execute(
                    self.command(*args), istream=feed, as_process=True, env=self._env, universal_newlines=True
                )
            except self._not_found as err:
                raise no_git() from err
            handle_process_output(process, None, heard, finalizer=None, decode_streams=False)
            status = process.proc.wait()  # type: ignore[union-attr]
        if status:
            raise GitFailed(args, status, "\n".join(lines))

    def _execute(self, args: tuple[str, ...], stdin: bytes | None, env: dict[str, str]) -> tuple[int, bytes, str]:
        with tempfile.TemporaryFile() as feed:
            feed.write(stdin or b"")
            feed.seek(0)
            try:
                status, out, err = self._git.execute(
                    self.command(*args),
                    istream=feed,
                    with_extended_output=True,
                    with_exceptions=False,
                    stdout_as_string=False,
                    strip_newline_in_stdout=False,
                    env=self._env | env,
                )
            except self._not_found as error:
                raise no_git() from error
        assert isinstance(out, bytes)
        return int(status), out, err if isinstance(err, str) else err.decode("utf-8", "replace")


def no_git() -> KitError:
    """The error for a machine without a working git."""
    found = shutil.which("git")
    return KitError(
        "LG110",
        f"git cannot be run: {found + ' does not start' if found else 'no folder of PATH holds one that may be run'}",
        cause="git is installed, but damaged or not meant for this machine" if found else "git is not installed",
        fix="install git 2.25 or newer (Debian, Ubuntu: apt-get install git); git --version must work",
    )
