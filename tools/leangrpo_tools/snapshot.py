"""Commits made beside the user's index and branches, through a temporary index."""

from __future__ import annotations

import tempfile
from pathlib import Path

from leangrpo_tools.gitcmd import WHO, Git
from leangrpo_tools.tree import Content


def store(git: Git, contents: dict[str, Content]) -> dict[str, str]:
    """Put the contents into the object store as they are, without filters. Returns blob ids by name."""
    with tempfile.TemporaryDirectory(prefix="leangrpo-") as folder:
        paths = []
        for number, content in enumerate(contents.values()):
            item = Path(folder) / str(number)
            item.write_bytes(content.data)
            paths.append(str(item))
        if not paths:
            return {}
        listed = "\n".join(paths) + "\n"
        ids = git.run("hash-object", "-w", "--no-filters", "--stdin-paths", stdin=listed.encode()).decode().split()
    return dict(zip(contents, ids, strict=True))


def index_lines(contents: dict[str, Content | None], blobs: dict[str, str]) -> list[str]:
    """Lines for ``git update-index --index-info``; None removes an entry."""
    lines = []
    for name, content in contents.items():
        if content is None:
            lines.append(f"0 {'0' * 40}\t{name}\n")
        else:
            lines.append(f"{content.git_mode} {blobs[name]}\t{name}\n")
    return lines


def make_tree(git: Git, start: str | None, contents: dict[str, Content | None]) -> tuple[str, list[str]]:
    """The tree of the commit ``start`` (None: empty) with ``contents`` over it, and the index lines that make it."""
    blobs = store(git, {name: content for name, content in contents.items() if content is not None})
    lines = index_lines(contents, blobs)
    with tempfile.TemporaryDirectory(prefix="leangrpo-") as folder:
        env = {"GIT_INDEX_FILE": str(Path(folder) / "index")}
        git.run("read-tree", *([start] if start else ["--empty"]), env=env)
        git.run("update-index", "--add", "--index-info", stdin="".join(lines).encode(), env=env)
        # A checkout without its largest files lacks their blobs; the tree does not need them.
        return git.text("write-tree", "--missing-ok", env=env), lines


def make_commit(git: Git, tree: str, parent: str | None, message: str) -> str:
    """A commit with a fixed author and date; no ref points to it yet."""
    parents = ["-p", parent] if parent else []
    return git.text("commit-tree", "--no-gpg-sign", tree, *parents, "-m", message, env=WHO)
