"""The cache of upstreams in git: per upstream one bare repository, built beside its place and put there complete.

Nothing reads it where git may fetch what is missing: :mod:`leangrpo_tools.checkouts` takes a copy of its objects.
"""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from leangrpo_tools import checkouts, data, objects
from leangrpo_tools.disk import exclusive, guard_disk, part, remove_tree, shared
from leangrpo_tools.errors import KitError
from leangrpo_tools.gitcmd import Git, GitFailed
from leangrpo_tools.lock import GitEntry
from leangrpo_tools.objects import Damaged
from leangrpo_tools.progress import Progress
from leangrpo_tools.sources import failure, is_local, usable

UPLOAD_PACK = "git -c uploadpack.allowFilter=true -c uploadpack.allowAnySHA1InWant=true upload-pack"


def place(name: str) -> Path:
    """Where the cache has the upstream, if it has it."""
    return data.cache_dir() / "upstreams" / f"{name}.git"


def cached(name: str, entry: GitEntry) -> bool:
    """Whether the cache was filled with everything that ``entry`` needs."""
    return _stamp(place(name), entry).is_file()


def take(name: str, entry: GitEntry, folder: Path, source: str | None = None) -> None:
    """Put the objects of the pinned commit into a new repository in ``folder``, which is empty; fetch them if needed.

    Raises LG132 if the cache is damaged and cannot be filled again, the errors of :func:`fill`, and GitFailed and
    OSError for ``folder``.
    """
    if source is not None:
        usable(source)  # a mistyped one is an error, though the cache may have everything
    lock = place(name).with_suffix(".lock")
    if not cached(name, entry):
        with exclusive(lock):
            if not cached(name, entry):
                fill(name, entry, source)
    try:
        with shared(lock):
            checkouts.take(place(name), entry, folder)
    except Damaged as found:
        remove_tree(folder)
        folder.mkdir()
        with exclusive(lock):
            _refill(name, entry, source, found)
            checkouts.take(place(name), entry, folder)


def _refill(name: str, entry: GitEntry, source: str | None, found: Damaged) -> None:
    try:
        fill(name, entry, source)
    except KitError as err:
        raise KitError(
            "LG132",
            f"the cache of {name} is damaged, and cannot be filled again: {err.what}",
            cause=f"{found}; a disk error, an interrupted copy, or files that were deleted",
            fix=err.fix,
        ) from err


def fill(name: str, entry: GitEntry, source: str | None = None) -> None:
    """Fetch the pinned commit and the files a checkout needs into the cache, and check both hashes."""
    url = usable(source or entry.url)
    with _fresh(name, entry) as git:
        try:
            for key, value in (
                ("remote.origin.url", url),
                ("remote.origin.promisor", "true"),
                ("remote.origin.partialclonefilter", "blob:none"),
                ("http.lowSpeedLimit", "1000"),
                ("http.lowSpeedTime", "30"),
            ):
                git.run("config", key, value)
            if is_local(url):
                # A local source is a bare folder of objects: it allows neither filters nor bare commit ids by itself.
                git.run("config", "remote.origin.uploadpack", UPLOAD_PACK)
            with Progress(f"fetching {name}") as progress:
                known = ["--no-tags", "--no-write-fetch-head", "--progress", "--filter=blob:none", "origin"]
                git.follow("fetch", "--depth=1", *known, entry.commit, stdin=None, on_line=progress.git_line)
                _check_hashes(git, entry)
                wanted = "\n".join(checkouts.blobs(git, entry)) + "\n"
                git.follow(
                    "-c", "fetch.negotiationAlgorithm=noop", "fetch", *known, "--stdin",
                    stdin=wanted.encode(), on_line=progress.git_line,
                )  # fmt: skip
        except GitFailed as err:
            # Once the commit is here, an object that the source does not know is a file.
            raise failure(err, url, entry, has_commit=_has(git, entry.commit)) from err


def pack(name: str, entry: GitEntry, source: str | None = None) -> bytes:
    """The pinned commit, its trees and every file a checkout needs, as one git pack; fetched if not in the cache."""
    with tempfile.TemporaryDirectory(prefix="leangrpo-") as temp:
        folder = Path(temp) / "taken"
        folder.mkdir()
        take(name, entry, folder, source)
        git = Git(folder, isolated=True)
        lines = git.text("ls-tree", "-r", "-d", entry.commit).splitlines()
        trees = dict.fromkeys(line.split("\t")[0].split()[2] for line in lines)
        wanted = [entry.commit, entry.tree, *trees, *checkouts.blobs(git, entry)]
        return git.run("pack-objects", "--stdout", "--quiet", "--threads=1", stdin="\n".join(wanted).encode() + b"\n")


def fill_from_pack(name: str, entry: GitEntry, content: bytes, source: str) -> None:
    """Put a pack made by :func:`pack` into the cache, and check both hashes and that no file is missing.

    git names objects by their content, so nothing in the pack can stand for anything but what the lock pins.
    """
    with exclusive(place(name).with_suffix(".lock")), _fresh(name, entry) as git:
        try:
            git.run("index-pack", "--stdin", "--promisor=leangrpo-kit", stdin=content)
            (git.folder / "shallow").write_text(entry.commit + "\n", encoding="utf-8")
            _check_hashes(git, entry)
            lacking = checkouts.lacking(git, entry)
        except GitFailed as err:
            raise failure(err, source, entry, has_commit=_has(git, entry.commit)) from err
        if lacking:
            raise KitError("LG109", f"{source} lacks files of the pinned commit", cause="made with a partial cache",
                           fix="make it again where there is network")  # fmt: skip


def whole(name: str, entry: GitEntry) -> bool:
    """Whether the cache has everything that ``entry`` needs, undamaged."""
    if not cached(name, entry):
        return False
    with tempfile.TemporaryDirectory(prefix="leangrpo-") as folder, shared(place(name).with_suffix(".lock")):
        try:
            checkouts.take(place(name), entry, Path(folder))
        except Damaged:
            return False
    return True


@contextmanager
def _fresh(name: str, entry: GitEntry) -> Iterator[Git]:
    """An empty repository to fill, which then takes the cache's place, with what that had for other pins.

    Nothing is changed in the cache before the new one is complete; whoever calls this holds its lock.
    """
    repo = place(name)
    with guard_disk(data.cache_dir()):
        repo.parent.mkdir(parents=True, exist_ok=True)
        temp = part(repo)
        try:
            git = Git(temp)
            try:
                git.run("init", "--quiet", "--bare", "--template=", ".")
            except GitFailed as err:
                raise checkouts.failure(err, temp.parent) from err
            yield git
            _keep(repo, temp)
            _stamp(temp, entry).touch()
            remove_tree(repo)
            temp.rename(repo)
        finally:
            remove_tree(temp)


def _keep(old: Path, new: Path) -> None:
    stamps = list(old.glob("leangrpo-complete-*"))
    try:
        objects.check(old / "objects")
    except Damaged:
        return
    if not stamps:
        return
    objects.copy(old / "objects", new / "objects")
    for stamp in stamps:
        shutil.copyfile(stamp, new / stamp.name)
    if (old / "shallow").is_file():
        commits = {*(old / "shallow").read_text().split(), *(new / "shallow").read_text().split()}
        (new / "shallow").write_text("".join(f"{commit}\n" for commit in sorted(commits)), encoding="utf-8")


def _stamp(repo: Path, entry: GitEntry) -> Path:
    """Present in the cache once everything that ``entry`` needs is there."""
    key = hashlib.sha256("\n".join([entry.commit, *sorted(entry.exclude)]).encode()).hexdigest()[:16]
    return repo / f"leangrpo-complete-{key}"


def _check_hashes(git: Git, entry: GitEntry) -> None:
    kind = git.maybe("cat-file", "-t", entry.commit)
    tree = git.maybe("rev-parse", "--verify", f"{entry.commit}^{{tree}}")
    if kind != "commit" or tree != entry.tree:
        raise KitError(
            "LG108",
            f"the source has {kind or 'nothing'} {entry.commit} with tree {tree}, the lock says commit with tree "
            f"{entry.tree}",
            cause="the lock file was edited, or an object of the source is damaged",
            fix="restore upstreams.lock, or use another --source",
        )


def _has(git: Git, commit: str) -> bool:
    return git.maybe("rev-parse", "--verify", "--quiet", f"{commit}^{{tree}}") is not None
