"""The tree being patched: safe paths, bytes and modes, and what git knows about it."""

from __future__ import annotations

import hashlib
import os
import shlex
import stat
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from leangrpo_tools.disk import exclusive
from leangrpo_tools.errors import KitError
from leangrpo_tools.gitcmd import Git, GitFailed
from leangrpo_tools.lock import inside
from leangrpo_tools.reading import read_regular

FOLDER = ".leangrpo"
BIGGEST = 8 << 20
"""No file of more bytes is read: training scripts have a few tens of thousands."""


def sha256(data: bytes) -> str:
    """The hash that the state file records."""
    return hashlib.sha256(data).hexdigest()


@dataclass(frozen=True)
class Content:
    """A regular file's bytes and permission bits."""

    data: bytes
    mode: int

    @property
    def git_mode(self) -> str:
        """The mode git stores."""
        return "100755" if self.mode & 0o100 else "100644"

    @property
    def blob(self) -> str:
        """The object id git gives to the bytes."""
        return hashlib.sha1(b"blob %d\0" % len(self.data) + self.data, usedforsecurity=False).hexdigest()


class Tree:
    """A folder to patch. ``is_repo`` says whether it is the top of a git repository; any other folder will do, too.

    Raises LG301 when it is no folder.
    """

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()
        if not self.root.is_dir():
            raise KitError("LG301", f"{root} is not a folder", cause="a mistyped path", fix=f"ls -d {root}")
        if self.kit.is_symlink() or (self.kit.exists() and not self.kit.is_dir()):
            raise KitError("LG303", f"{self.kit} is no folder of the kit's own", fix=f"rm {shlex.quote(str(self.kit))}")
        self.git = Git(self.root, offline=True)
        self.top = self._top()
        self.is_repo = self.top is not None and os.path.samefile(self.top, self.root)

    def _top(self) -> str | None:
        try:
            return self.git.text("rev-parse", "--show-toplevel")
        except GitFailed as err:
            if "dubious ownership" in err.stderr:
                raise KitError(
                    "LG110",
                    f"git refuses to work in {self.root}: the folder belongs to another user",
                    cause="git's safe.directory check",
                    fix=f"git config --global --add safe.directory {self.root}",
                ) from err
            return None

    @property
    def kit(self) -> Path:
        """Where the kit keeps its state."""
        return self.root / FOLDER

    def lock(self) -> AbstractContextManager[None]:
        """Keeps two runs from changing the tree at the same time."""
        if not self.is_repo:
            return exclusive(self.root)
        return exclusive(self.root / self.git.text("rev-parse", "--git-path", "leangrpo.lock"))

    def path(self, name: str) -> Path:
        """The file called ``name``, which may not exist. Raises LG303 if it could lie outside the tree."""
        try:
            inside(name)
        except ValueError as err:
            raise KitError("LG303", f"{name!r} {err}", cause="a damaged recipe or state file") from err
        current = self.root
        for part in name.split("/"):
            current = current / part
            if current.is_symlink():
                raise KitError(
                    "LG303",
                    f"{current.relative_to(self.root)} is a symbolic link to {os.readlink(current)}",
                    cause="a patch through a link would change a file elsewhere",
                    fix=f"put a copy in its place: {_copied(current)}",
                )
            if os.path.lexists(current / ".git"):
                raise KitError(
                    "LG303",
                    f"{current.relative_to(self.root)} is a repository of its own",
                    cause="a submodule, or a clone inside the tree",
                    fix=f"patch a copy of the tree in which it is none: {_without(self.root, current)}",
                )
        return current

    def read(self, name: str) -> Content | None:
        """Bytes and mode of a file, or None if there is none. Raises LG303 for links and LG306 for folders."""
        path = self.path(name)
        try:
            mode = path.lstat().st_mode
        except (FileNotFoundError, NotADirectoryError):
            return None
        if not stat.S_ISREG(mode):
            raise KitError(
                "LG306",
                f"{name} is not a regular file",
                cause="a folder or a device has its name",
                fix=f"mv {shlex.quote(str(path))} {shlex.quote(str(path))}.aside, and put the script there",
            )
        if path.lstat().st_size > BIGGEST:
            raise KitError(
                "LG208",
                f"{name} has {path.lstat().st_size >> 20} MiB, more than {BIGGEST >> 20}",
                cause="it is no training script, or data was pasted into it",
                fix=f"ls -l {path}",
            )
        try:
            return Content(read_regular(path, BIGGEST), stat.S_IMODE(mode))
        except OSError as err:
            raise KitError(
                "LG305", f"{name} cannot be read: {err.strerror}", fix=f"chmod u+r {shlex.quote(str(path))}"
            ) from err

    def check_writable(self, name: str) -> None:
        """Raise LG305 unless the file, or the folder it will go to, may be written."""
        path = self.path(name)
        folder = path.parent
        while not folder.exists():
            folder = folder.parent
        if path.exists() and not path.stat().st_mode & 0o222:
            raise KitError("LG305", f"{name} is read-only", fix=f"chmod u+w {shlex.quote(str(path))}")
        if not os.access(folder, os.W_OK | os.X_OK):
            raise KitError("LG305", f"{folder} may not be written", fix=f"chmod u+wx {shlex.quote(str(folder))}")

    def head(self) -> str | None:
        """The commit HEAD points to, or None before the first one."""
        return self.git.maybe("rev-parse", "--verify", "--quiet", "HEAD^{commit}") if self.is_repo else None

    def head_tree(self) -> str | None:
        """The tree of that commit."""
        return self.git.maybe("rev-parse", "--verify", "--quiet", "HEAD^{tree}") if self.is_repo else None

    def detached(self) -> bool:
        """Whether HEAD is a commit rather than a branch."""
        return self.git.maybe("symbolic-ref", "--quiet", "HEAD") is None

    def made_at(self) -> str | None:
        """The pinned commit of a checkout that the kit made, else None."""
        return self.git.maybe("config", "--local", "--get", "leangrpo.checkout") if self.is_repo else None

    def blob(self, commit: str | None, name: str) -> Content | None:
        """A file as it is in a commit, None if it is not there, or too large to be patched."""
        line = self.git.maybe("ls-tree", "--long", commit, "--", name) if self.is_repo and commit else None
        if not line:
            return None
        mode, kind, oid, size = line.split("\t")[0].split()
        if kind != "blob" or mode == "120000" or not size.isdigit() or int(size) > BIGGEST:
            return None
        return Content(self.git.run("cat-file", "blob", oid), 0o755 if mode == "100755" else 0o644)


def _copied(link: Path) -> str:
    """The command line that puts what a link leads to in its place."""
    name = shlex.quote(str(link))
    if link.is_dir():
        return f'cp -r "$(readlink -f {name})" {name}.copy && rm {name} && mv {name}.copy {name}'
    return f'cp --remove-destination "$(readlink -f {name})" {name}'


def _without(root: Path, inner: Path) -> str:
    """The command line that copies a tree, with a repository inside it as a plain folder."""
    copy = root.with_name(root.name + ".copy")
    return f"cp -rL {shlex.quote(str(root))} {shlex.quote(str(copy))} && rm -rf " + shlex.quote(
        str(copy / inner.relative_to(root) / ".git")
    )
