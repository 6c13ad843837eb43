"""Apply, revert and upgrade, killed at each of their changes: the same command again ends in the right tree."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.killer import killed_at
from support.toytree import FILES, contents, git, newer

from leangrpo_tools.apply import apply
from leangrpo_tools.errors import KitError
from leangrpo_tools.revert import revert

FLUX = "fastvideo/train_grpo_flux.py"
pytestmark = pytest.mark.slow


def fresh(kit, kind: str, dest: Path) -> None:
    """An unpatched tree."""
    if kind == "made":
        apply("DanceGRPO", dest, scripts=["flux"])
        revert(dest)
        return
    for name, text in FILES.items():
        (dest / name).parent.mkdir(parents=True, exist_ok=True)
        (dest / name).write_text(text)
    if kind == "own":
        git(dest, "init", "-q")
        git(dest, "add", "-A")
        git(dest, "commit", "-q", "-m", "mine")


def patch(kind: str, dest: Path) -> None:
    if kind == "made":
        apply("DanceGRPO", dest, scripts=["flux"])
    else:
        apply("DanceGRPO", tree=dest, scripts=["flux"])


def undo(dest: Path) -> None:
    """Revert, which may find that there is nothing left to do."""
    try:
        revert(dest)
    except KitError as err:
        assert err.code == "LG301"


def edit(dest: Path, *, conflict: bool = False) -> None:
    path = dest / FLUX
    text = path.read_text().replace("LIMIT = 3", "LIMIT = 5")
    if conflict:
        text = text.replace("lean.flush(transformer, optimizer)", "lean.flush(transformer, optimizer)  # mine")
    path.write_text(text)


def seen(dest: Path) -> tuple[Any, ...]:
    """Everything that a user could notice."""
    if not (dest / ".git").exists():
        return (contents(dest),)
    refs = git(dest, "for-each-ref", "--format=%(refname) %(objectname)")
    head = git(dest, "rev-parse", "HEAD"), git(dest, "status", "--porcelain", "--ignored")
    return contents(dest), refs, head, git(dest, "ls-files", "-s"), (dest / ".git/info/exclude").read_text()


def everywhere(
    kit, start: Path, run: Callable[[Path], Any], *, least: int, back: Callable[[Path], Any] | None = None
) -> None:
    """Kill ``run`` at each step on a copy of ``start``, run it again, and compare with an undisturbed run.

    At every second step run ``back`` instead, if there is one, and compare with the start. Until then every file has
    its old or its new text.
    """
    dest = kit.work / "tree"
    shutil.copytree(start, dest, symlinks=True)
    before = contents(dest)
    run(dest)
    wanted, after = seen(dest), contents(dest)
    for step in range(400):
        shutil.rmtree(dest)
        shutil.copytree(start, dest, symlinks=True)
        if not killed_at(step, dest, lambda: run(dest)):
            break
        for name, item in contents(dest).items():
            kept = name.startswith(".leangrpo/") or item in (before.get(name), after.get(name))
            assert kept, (step, name)
        if back is not None and step % 2:
            back(dest)
            assert contents(dest) == before and not (dest / ".leangrpo").exists(), step
            continue
        run(dest)
        assert seen(dest) == wanted, step
    assert step >= least


@pytest.mark.parametrize("kind", ["own", pytest.param("made", marks=pytest.mark.matrix)])
def test_apply(small, kind: str) -> None:
    start = small.work / "start"
    fresh(small, kind, start)
    everywhere(small, start, lambda dest: patch(kind, dest), least=30, back=undo)


@pytest.mark.parametrize("kind", ["plain", "own", "made"])
def test_revert_of_an_edited_tree(small, kind: str) -> None:
    start = small.work / "start"
    fresh(small, kind, start)
    patch(kind, start)
    edit(start)
    everywhere(small, start, undo, least=12)


@pytest.mark.parametrize("kind", ["plain", pytest.param("made", marks=pytest.mark.matrix)])
def test_upgrade_of_an_edited_tree(small, kind: str) -> None:
    start = small.work / "start"
    fresh(small, kind, start)
    patch(kind, start)
    edit(start)
    newer(small.root)
    everywhere(small, start, lambda dest: patch(kind, dest), least=30)
    assert "LIMIT = 5" in (small.work / "tree" / FLUX).read_text()


@pytest.mark.parametrize("command", ["apply", "revert"])
def test_a_merge_with_conflicts(small, command: str) -> None:
    """Killed while the markers are written, or later when the resolved merge is completed."""
    start = small.work / "start"
    fresh(small, "plain", start)
    patch("plain", start)
    edit(start, conflict=True)
    newer(small.root)

    def run(dest: Path) -> None:
        with pytest.raises(KitError) as caught:
            patch("plain", dest) if command == "apply" else revert(dest)
        assert caught.value.code == "LG302"

    everywhere(small, start, run, least=10)
    resolved = small.work / "resolved"
    (small.work / "tree").rename(resolved)
    path = resolved / FLUX
    lines = [
        line for line in path.read_text().splitlines(True) if not line.startswith(("<<<<<<<", "=======", ">>>>>>>"))
    ]
    path.write_text("".join(lines))
    everywhere(small, resolved, undo if command == "revert" else lambda dest: patch("plain", dest), least=10)
    assert "# mine" in (small.work / "tree" / FLUX).read_text()
