"""Bring a pinned upstream onto this machine: into the cache once, and from there into checkouts.

The cache holds, for an upstream in git, one bare repository with the pinned commit, its trees and every file a checkout
needs, and for one of a package registry the wheel (:mod:`leangrpo_tools.registry`), so that later runs need neither
network nor ``--source``.
"""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

from leangrpo_tools import data, registry, snapshot, wheel
from leangrpo_tools.disk import exclusive, guard_disk, part, remove_tree
from leangrpo_tools.errors import KitError
from leangrpo_tools.gitcmd import BASE_REF, Git, GitFailed
from leangrpo_tools.lock import EmbeddedEntry, Entry, GitEntry, PypiEntry, content_hash, files_of
from leangrpo_tools.progress import Progress
from leangrpo_tools.sources import failure, is_local, usable
from leangrpo_tools.tree import Content

UPLOAD_PACK = "git -c uploadpack.allowFilter=true -c uploadpack.allowAnySHA1InWant=true upload-pack"


def checkout(name: str, entry: Entry, dest: Path, source: str | None = None) -> None:
    """Make a clean checkout of ``entry`` in ``dest``, which must be absent or empty.

    It is built beside ``dest`` and renamed, so ``dest`` is complete or untouched. HEAD is detached at the pin and
    ``refs/leangrpo/base`` marks it. Raises the LG1xx errors.
    """
    if dest.is_symlink() or (dest.exists() and (not dest.is_dir() or any(dest.iterdir()))):
        raise KitError(
            "LG103",
            f"{dest} exists and is not empty",
            cause="it is no checkout made by this kit",
            fix=f"choose another DEST, or patch a checkout of your own with --tree {dest}",
        )
    with guard_disk(dest.parent):
        dest.parent.mkdir(parents=True, exist_ok=True)
        temp = part(dest)
        try:
            if isinstance(entry, GitEntry):
                _from_cache(name, entry, temp, source)
            elif isinstance(entry, PypiEntry):
                content = registry.get(name, entry, source)
                _commit(temp, wheel.unpack(content, entry), f"{entry.release}, as published in {entry.filename}")
            else:
                _from_kit(name, entry, temp)
            if dest.exists():
                dest.rmdir()
            temp.rename(dest)
        finally:
            remove_tree(temp)


def cached(name: str, entry: GitEntry | PypiEntry) -> bool:
    """Whether a checkout of ``entry`` needs no source."""
    if isinstance(entry, PypiEntry):
        return registry.cached(entry) is not None
    return _stamp(_cache(name), entry).is_file()


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
    where = registry.kept(entry) if isinstance(entry, PypiEntry) else _cache(name)
    return [f"--source was not used: {entry.pin} is in the cache already, checked by its hash ({where})"]


def _cache(name: str) -> Path:
    return data.cache_dir() / "upstreams" / f"{name}.git"


def _stamp(repo: Path, entry: GitEntry) -> Path:
    """Present in the cache once everything that ``entry`` needs is there."""
    key = hashlib.sha256("\n".join([entry.commit, *sorted(entry.exclude)]).encode()).hexdigest()[:16]
    return repo / f"leangrpo-complete-{key}"


def _from_cache(name: str, entry: GitEntry, folder: Path, source: str | None) -> None:
    repo = _cache(name)
    if source is not None:
        usable(source)  # a mistyped one is an error, though the cache may have everything
    fresh = not cached(name, entry)
    if fresh:
        with exclusive(repo.with_suffix(".lock")):
            if not cached(name, entry):
                fill_cache(name, entry, source)
    try:
        _build(repo, entry, folder)
    except GitFailed as err:
        # Objects lost or damaged since the cache was filled: fetch once more.
        if fresh:
            raise failure(err, source or entry.url, entry) from err
        remove_tree(repo)
        remove_tree(folder)
        folder.mkdir()
        fill_cache(name, entry, source)
        try:
            _build(repo, entry, folder)
        except GitFailed as again:
            raise failure(again, source or entry.url, entry) from again


def fill_cache(name: str, entry: GitEntry, source: str | None = None) -> None:
    """Fetch the pinned commit and the files a checkout needs into the cache, and check both hashes."""
    url = usable(source or entry.url)
    repo = _cache(name)
    with guard_disk(data.cache_dir()):
        repo.mkdir(parents=True, exist_ok=True)
        git = Git(repo)
        try:
            if not (repo / "HEAD").is_file():
                git.run("init", "--quiet", "--bare", "--template=", ".")
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
            else:
                git.run("config", "--unset-all", "remote.origin.uploadpack", ok=(0, 5))
            with Progress(f"fetching {name}") as progress:
                known = ["--no-tags", "--no-write-fetch-head", "--progress", "--filter=blob:none", "origin"]
                git.follow("fetch", "--depth=1", *known, entry.commit, stdin=None, on_line=progress.git_line)
                _check_hashes(git, entry)
                wanted = "\n".join(_blobs(git, entry)) + "\n"
                git.follow(
                    "-c", "fetch.negotiationAlgorithm=noop", "fetch", *known, "--stdin",
                    stdin=wanted.encode(), on_line=progress.git_line,
                )  # fmt: skip
        except GitFailed as err:
            # Once the commit is here, an object that the source does not know is a file.
            raise failure(err, url, entry, has_commit=_has(git, entry.commit)) from err
        _stamp(repo, entry).touch()


def pack(name: str, entry: GitEntry, source: str | None = None) -> bytes:
    """The pinned commit, its trees and every file a checkout needs, as one git pack; fetched if not in the cache."""
    repo = _cache(name)
    with exclusive(repo.with_suffix(".lock")):
        if not cached(name, entry):
            fill_cache(name, entry, source)
        git = Git(repo)
        lines = git.text("ls-tree", "-r", "-d", entry.commit).splitlines()
        trees = dict.fromkeys(line.split("\t")[0].split()[2] for line in lines)
        wanted = [entry.commit, entry.tree, *trees, *_blobs(git, entry)]
        return git.run("pack-objects", "--stdout", "--quiet", "--threads=1", stdin="\n".join(wanted).encode() + b"\n")


def fill_cache_from_pack(name: str, entry: GitEntry, content: bytes, source: str) -> None:
    """Put a pack made by :func:`pack` into the cache, and check both hashes and that no file is missing.

    git names objects by their content, so nothing in the pack can stand for anything but what the lock pins.
    """
    repo = _cache(name)
    with guard_disk(data.cache_dir()), exclusive(repo.with_suffix(".lock")):
        if cached(name, entry):
            return
        repo.mkdir(parents=True, exist_ok=True)
        git = Git(repo)
        try:
            if not (repo / "HEAD").is_file():
                git.run("init", "--quiet", "--bare", "--template=", ".")
            git.run("index-pack", "--stdin", "--promisor=leangrpo-kit", stdin=content)
            (repo / "shallow").write_text(entry.commit + "\n", encoding="utf-8")
            _check_hashes(git, entry)
            wanted = "\n".join(_blobs(git, entry)) + "\n"
            lacking = git.run("cat-file", "--batch-check=%(objectname)", stdin=wanted.encode()).decode()
        except GitFailed as err:
            raise failure(err, source, entry, has_commit=_has(git, entry.commit)) from err
        if "missing" in lacking:
            raise KitError("LG109", f"{source} lacks files of the pinned commit", cause="made with a partial cache",
                           fix="make it again where there is network")  # fmt: skip
        _stamp(repo, entry).touch()


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


def _blobs(git: Git, entry: GitEntry) -> list[str]:
    found: set[str] = set()
    for line in git.run("ls-tree", "-r", "-z", entry.commit).decode("utf-8", "surrogateescape").split("\0"):
        if line:
            head, path = line.split("\t", 1)
            _, kind, oid = head.split(" ")
            if kind == "blob" and not entry.excluded(path):
                found.add(oid)
    return sorted(found)


def _build(repo: Path, entry: GitEntry, folder: Path) -> None:
    """A repository in ``folder`` with the cache's objects, checked out sparsely at the pin."""
    git = Git(folder, isolated=True)
    git.run("init", "--quiet", "--template=", ".")
    shutil.copytree(repo / "objects", folder / ".git" / "objects", dirs_exist_ok=True)
    if (repo / "shallow").is_file():
        shutil.copyfile(repo / "shallow", folder / ".git" / "shallow")
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
    if git.text("rev-parse", "HEAD^{tree}") != entry.tree:
        raise GitFailed(("checkout",), 1, "wrong tree after the checkout")
    _mark(git, entry.commit)


def _from_kit(name: str, entry: EmbeddedEntry, folder: Path) -> None:
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
    _commit(folder, contents, f"{name}, as shipped with leangrpo-kit")


def _commit(folder: Path, contents: dict[str, Content], message: str) -> None:
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


def _mark(git: Git, commit: str) -> None:
    """Remember that the kit made this checkout, and at which commit."""
    git.run("update-ref", BASE_REF, commit)
    git.run("config", "leangrpo.checkout", commit)


def _has(git: Git, commit: str) -> bool:
    return git.maybe("rev-parse", "--verify", "--quiet", f"{commit}^{{tree}}") is not None
