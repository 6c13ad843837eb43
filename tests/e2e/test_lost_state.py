"""The file that says what was patched is gone or damaged: nothing is changed, and the message has the way out."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from support.toytree import contents, snapshot

from leangrpo_tools.apply import apply
from leangrpo_tools.check import check
from leangrpo_tools.diff import diff
from leangrpo_tools.errors import KitError
from leangrpo_tools.revert import revert
from leangrpo_tools.status import status

COMMANDS = {
    "apply": lambda tree: apply("DanceGRPO", tree=tree),
    "dry run": lambda tree: apply("DanceGRPO", tree=tree, dry_run=True),
    "revert": revert,
    "diff": diff,
    "check": check,
    "status": status,
}


def refused(tree: Path) -> KitError:
    """Every command ends with LG308 in the same words and changes nothing. Returns the error."""
    before, found = snapshot(tree), []
    for name, command in COMMANDS.items():
        with pytest.raises(KitError) as caught:
            command(tree)
        assert caught.value.code == "LG308", name
        assert snapshot(tree) == before, name
        found.append(caught.value)
    assert len({str(err) for err in found}) == 1
    assert "nothing was changed" in found[0].what and str(tree / ".leangrpo/state.json") in found[0].what
    return found[0]


def follow(err: KitError) -> None:
    """Run the command line that the error gives."""
    line = err.fix.partition("edits of patched files, then: ")[2].partition("; then apply-patch")[0]
    assert line
    subprocess.run(line, shell=True, check=True, capture_output=True)


def damage(tree: Path, how: str) -> None:
    file = tree / ".leangrpo/state.json"
    if how == "gone":
        file.unlink()
    elif how == "cut":
        file.write_bytes(file.read_bytes()[:100])
    else:
        shutil.rmtree(tree / ".leangrpo")


@pytest.mark.parametrize(("how", "made"), [("gone", True), ("cut", False), ("with its folder", False)])
def test_in_a_repository(small, clone, how: str, made: bool) -> None:
    tree = clone
    if made:
        tree = apply("DanceGRPO", "made").dest.absolute()
        revert(tree)
    else:
        (tree / "fastvideo/train_grpo_flux.py").write_bytes(
            (tree / "fastvideo/train_grpo_flux.py").read_bytes() + b"# not committed\n"
        )
    before = contents(tree)

    def patch():
        return apply("DanceGRPO", tree) if made else apply("DanceGRPO", tree=tree)

    patch()
    patched = contents(tree)
    damage(tree, how)
    follow(refused(tree))
    assert contents(tree) == before
    assert patch().changed and contents(tree) == patched
    revert(tree)
    assert contents(tree) == before


def test_without_git_the_store_stays(small, clone) -> None:
    shutil.rmtree(clone / ".git")
    script = clone / "fastvideo/train_grpo_flux.py"
    before = contents(clone)
    apply("DanceGRPO", tree=clone)
    damage(clone, "gone")
    with script.open("a") as out:
        out.write("# mine\n")
    follow(refused(clone))
    assert contents(clone) == before
    apply("DanceGRPO", tree=clone)
    shutil.rmtree(clone / ".leangrpo")
    assert "fresh copy" in refused(clone).fix


def test_the_state_of_a_tree_without_a_copied_runtime(small, clone) -> None:
    before = contents(clone)
    apply("DanceGRPO", tree=clone, vendored=False)
    damage(clone, "gone")
    follow(refused(clone))
    assert contents(clone) == before
