"""Three-way merges of a file's text by ``git merge-file``, and what is left to do in one that has conflicts."""

from __future__ import annotations

import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from leangrpo_tools.errors import KitError
from leangrpo_tools.gitcmd import Git, GitFailed

LABELS = ("yours", "before", "leangrpo-kit")
OPEN, MIDDLE, CLOSE = b"<<<<<<< ", b"=======", b">>>>>>> "


@dataclass(frozen=True)
class Merged:
    """The merged text, and where somebody has to decide: lines (from, to) and why."""

    data: bytes
    places: list[tuple[int, int, str]] = field(default_factory=list)


def merge(name: str, mine: bytes, base: bytes, theirs: bytes) -> Merged:
    """Bring the changes from ``base`` to ``theirs`` into ``mine``; where both changed a line, as git marks it.

    Raises LG302 for texts that git does not take for text.
    """
    with tempfile.TemporaryDirectory(prefix="leangrpo-") as folder:
        paths = [Path(folder) / str(number) for number in range(3)]
        for path, data in zip(paths, (mine, base, theirs), strict=True):
            path.write_bytes(data)
        labels = [part for label in LABELS for part in ("-L", label)]
        try:
            # The status is the number of conflicts, up to 127.
            data = Git(Path(folder), isolated=True).run(
                "merge-file", "-p", "--quiet", *labels, *map(str, paths), ok=tuple(range(128))
            )
        except GitFailed as err:
            raise KitError(
                "LG302",
                f"{name} was edited after the patch, and cannot be merged: {err}",
                cause="it is no text file any more",
                fix="move it aside and run the same command again",
            ) from err
    return Merged(data, unresolved(name, data, mine))


def unresolved(name: str, data: bytes, mine: bytes) -> list[tuple[int, int, str]]:
    """What is left of a merge: markers that ``mine`` did not have, or Python that was valid and is not any more."""
    lines = data.splitlines()
    allowed = Counter(line for line in mine.splitlines() if _mark(line))
    found: list[tuple[int, int, str]] = []
    start = 0
    for number, line in enumerate(lines, 1):
        mark = _mark(line)
        if not mark:
            continue
        allowed[line] -= 1
        if allowed[line] >= 0:
            continue
        if mark == OPEN:
            start = number
        elif mark == CLOSE or not start:
            found.append((start or number, number, "conflict"))
            start = 0
    if start:
        found.append((start, start, "conflict"))
    if not found and name.endswith(".py"):
        line = _bad_line(data)
        if line and not _bad_line(mine):
            found.append((line, line, "not valid Python any more"))
    return found


def _mark(line: bytes) -> bytes | None:
    if line.rstrip(b"\r") == MIDDLE:
        return MIDDLE
    return next((mark for mark in (OPEN, CLOSE) if line.startswith(mark)), None)


def _bad_line(data: bytes) -> int | None:
    import warnings

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compile(data, "merged", "exec", dont_inherit=True)
    except SyntaxError as err:
        return err.lineno or 1
    except ValueError:
        return 1
    return None
