"""Checkouts that the kit makes: of a pinned commit, of a wheel, or of the tree that is embedded in the kit."""

from __future__ import annotations

import shutil
from pathlib import Path

from leangrpo_tools import data, objects, snapshot
from leangrpo_tools.disk import disk_full, no_room
from leangrpo_tools.errors import KitError
from leangrpo_tools.gitcmd import BASE_REF, Git, GitFailed
from leangrpo_tools.lock import EmbeddedEntry, GitEntry, content_hash, files_of
from leangrpo_tools.objects import Damaged
from leangrpo_tools.tree import Content


def take(repo: Path, entry: GitEntry, folder: Path) -> None:
    """A new repository in ``folder`` with the objects of a cached one, from which nothing is fetched.

    Raises :class:`Damaged` if they are damaged, or do not have everything that ``entry`` needs.
    """
    objects.check(repo / "objects")
    git = Git(folder, isolated=True)
    git.run("init", "--quiet", "--template=", ".")
    objects.copy(repo / "objects", folder / ".git" / "objects")
    if (repo / "shallow").is_file():
        shutil.copyfile(repo / "shallow", folder / ".git" / "shallow")
    if git.maybe("rev-parse", "--verify", f"{entry.commit}^{{tree}}") != entry.tree:
        raise Damaged(f"{repo} lacks the pinned commit")
    try:
        missing = lacking(git, entry)
    except GitFailed as err:
        raise Damaged(f"{repo} lacks folders of the pinned commit: {err.detail}") from err
    if missing:
        raise Damaged(f"{repo} lacks {missing} files of the pinned commit")


def finish(entry: GitEntry, folder: Path) -> None:
    """Check the pinned commit out, sparsely, in a repository that :func:`take` made."""
    git = Git(folder, isolated=True, offline=True)  # :func:`take` has seen that nothing is missing
    for key, value in (
        ("remote.origin.url", entry.url),
        ("remote.origin.fetch", "+refs/heads/*:refs/remotes/origin/*"),
        ("remote.origin.promisor", "true"),
        ("remote.origin.partialclonefilter", "blob:none"),
        ("core.autocrlf", "false"),
    ):
        git.run("config", key, value)
    (folder / ".git" / "info").mkdir(exist_ok=True)
    if entry.exclude:
        patterns = "".join(f"!/{path}\n" for path in entry.exclude)
        (folder / ".git" / "info" / "sparse-checkout").write_text("/*\n" + patterns, encoding="utf-8")
        git.run("config", "core.sparseCheckout", "true")
        git.run("config", "core.sparseCheckoutCone", "false")
    git.run("checkout", "--quiet", "--detach", entry.commit)
    _mark(git, entry.commit)


def blobs(git: Git, entry: GitEntry) -> list[str]:
    """The ids of every file that a checkout needs."""
    found: set[str] = set()
    for line in git.run("ls-tree", "-r", "-z", entry.commit).decode("utf-8", "surrogateescape").split("\0"):
        if line:
            head, path = line.split("\t", 1)
            _, kind, oid = head.split(" ")
            if kind == "blob" and not entry.excluded(path):
                found.add(oid)
    return sorted(found)


def lacking(git: Git, entry: GitEntry) -> int:
    """How many of them are missing."""
    wanted = "\n".join(blobs(git, entry)) + "\n"
    return git.run("cat-file", "--batch-check=%(objectname)", stdin=wanted.encode()).decode().count(" missing")


def failure(err: GitFailed, folder: Path) -> KitError:
    """The error for a git command that failed where it writes: below ``folder``."""
    if err.full or no_room(folder):
        return disk_full(folder)
    return KitError("LG112", f"git cannot write below {folder}: {err.detail}", fix=f"ls -ld {folder}; df {folder}")


def from_kit(name: str, entry: EmbeddedEntry, folder: Path) -> None:
    """Copy an embedded tree and commit it as the base."""
    root = data.data_root() / entry.path
    now = content_hash(root) if root.is_dir() else None
    if now != entry.sha256:
        raise KitError(
            "LG108",
            f"the embedded tree of {name} has the hash {now}, the lock says {entry.sha256}",
            cause="files under " + entry.path + " were changed",
            fix="reinstall the kit; after a deliberate change: python -m leangrpo_tools.lock --write",
        )
    contents = {
        item.relative_to(root).as_posix(): Content(item.read_bytes(), 0o755 if item.suffix == ".sh" else 0o644)
        for item in files_of(root)
    }
    commit(folder, contents, f"{name}, as shipped with leangrpo-kit")


def commit(folder: Path, contents: dict[str, Content], message: str) -> None:
    """Write the files and commit them as the base: equal contents give the same commit on every machine.

    Bytes and modes go into the commit as given, whatever the umask, the file system or a .gitattributes file would make
    of them.
    """
    for name, content in contents.items():
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content.data)
        target.chmod(content.mode)
    git = Git(folder, isolated=True)
    git.run("init", "--quiet", "--template=", ".")
    git.run("config", "core.autocrlf", "false")
    tree, lines = snapshot.make_tree(git, None, dict(contents))
    commit = snapshot.make_commit(git, tree, None, message)
    git.run("update-index", "--add", "--index-info", stdin="".join(lines).encode())
    git.run("update-index", "-q", "--refresh", ok=(0, 1))
    git.run("update-ref", "--no-deref", "HEAD", commit)
    (folder / ".git" / "info").mkdir(exist_ok=True)
    _mark(git, commit)


def _mark(git: Git, made: str) -> None:
    """Remember that the kit made this checkout, and at which commit."""
    git.run("update-ref", BASE_REF, made)
    git.run("config", "leangrpo.checkout", made)
