"""``git diff`` between two sets of files, made in a scratch repository: nothing of the user's is read or run."""

from __future__ import annotations

import tempfile
from pathlib import Path

from leangrpo_tools.gitcmd import Git
from leangrpo_tools.snapshot import make_tree
from leangrpo_tools.tree import Content

Pair = tuple["Content | None", "Content | None"]


def diff(pairs: dict[str, Pair], *, stat: bool = False, colour: bool = False) -> bytes:
    """The difference of each file's (before, after), None for absent, as ``git apply`` takes it."""
    with tempfile.TemporaryDirectory(prefix="leangrpo-") as folder:
        git = Git(Path(folder), isolated=True)
        git.run("init", "--quiet", "--template=", ".")
        before, _ = make_tree(git, None, {name: pair[0] for name, pair in pairs.items() if pair[0]})
        after, _ = make_tree(git, None, {name: pair[1] for name, pair in pairs.items() if pair[1]})
        return git.run(
            "diff",
            "--no-ext-diff",
            "--no-textconv",
            f"--color={'always' if colour else 'never'}",
            *(["--stat=100"] if stat else []),
            before,
            after,
        )
