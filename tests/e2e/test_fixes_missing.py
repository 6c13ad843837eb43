"""LG306: scripts and helper files that are not where the recipe says, and what its fix leads to."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from support.fixes import Shell, follows
from support.toytree import contents

from leangrpo_tools import data

FILE = "fastvideo/train_grpo_flux.py"
SAMPLING = "mini_grpo/sampling.py"
pytestmark = pytest.mark.usefixtures("small")


def on(tree: Path, name: str = "DanceGRPO") -> tuple[str, ...]:
    return ("apply-patch", name, "--tree", str(tree))


@pytest.fixture
def mini(kit) -> Path:
    """A user's own copy of the embedded trainer, whose sampler is a file of its own."""
    dest = kit.work / "mini"
    shutil.copytree(data.data_root() / "patches/mini/tree", dest, ignore=shutil.ignore_patterns("__pycache__"))
    return dest


@follows("LG306")
def test_a_script_that_was_renamed(clone, shell: Shell) -> None:
    (clone / FILE).rename(clone / "fastvideo/flux_ours.py")
    said = shell.fails("LG306", *on(clone), "--script", "flux")
    assert said.options("--script-as") == ["--script-as", "flux=fastvideo/flux_ours.py"]
    shell.works(*on(clone), *said.options("--script-as"))
    assert "lean.flush" in (clone / "fastvideo/flux_ours.py").read_text()


@follows("LG306")
def test_a_script_that_is_not_there(clone, shell: Shell) -> None:
    (clone / FILE).unlink()
    said = shell.fails("LG306", *on(clone), "--script", "flux", "--script", "wan_2_1")
    assert said.options("--script") == ["--script", "wan_2_1"]
    shell.works(*on(clone), *said.options("--script"))


@follows("LG306")
@pytest.mark.parametrize("where", ["above", "below"])
def test_another_folder_than_the_trees(kit, clone, shell: Shell, where: str) -> None:
    given = clone / "fastvideo" if where == "above" else kit.work
    said = shell.fails("LG306", *on(given))
    assert said.options("--tree") == ["--tree", str(clone)]
    shell.works("apply-patch", "DanceGRPO", *said.options("--tree"))


@follows("LG306")
def test_a_folder_with_something_else(kit, shell: Shell) -> None:
    plain = kit.work / "plain"
    plain.mkdir()
    for count in (0, 2):
        for number in range(count):
            (plain / f"{number}.py").write_text("x = 1\n")
        said = shell.fails("LG306", *on(plain))
        assert str(count or "no Python") in said.err and contents(plain).keys() == {f"{n}.py" for n in range(count)}
    assert shell.paste(said.command("apply-patch").replace("DEST", "d").partition(" makes")[0]).status == 0


@follows("LG306")
def test_a_renamed_script_alone(kit, clone, shell: Shell) -> None:
    for path in (clone / "fastvideo").glob("train*"):
        path.rename(path.with_name("mine.py")) if path.name.endswith("_2_1.py") else path.unlink()
    said = shell.fails("LG306", *on(clone))
    assert said.options("--script-as")[1].endswith("=fastvideo/mine.py")


@follows("LG306")
def test_a_package_under_another_name(clone, shell: Shell) -> None:
    (clone / "fastvideo").rename(clone / "video")
    command = (*on(clone), "--script-as", "flux=video/train_grpo_flux.py")
    said = shell.fails("LG306", *command)
    shell.works(*command, *said.options("--no-vendor"))
    assert "from leangrpo_core import lean" in (clone / "video/train_grpo_flux.py").read_text()


IMPORT = "from mini_grpo.sampling import ("
IMPORTS = ["from mini_grpo.drawing import (", "from .drawing import (", "from mini_grpo.shared import ("]


@pytest.mark.parametrize("new", IMPORTS)
@pytest.mark.parametrize("left", [True, False], ids=["the old one stays", "moved"])
def test_a_helper_under_another_name(mini: Path, shell: Shell, new: str, left: bool) -> None:
    """No error: the patch goes where the script's import leads, and to no file that it does not import."""
    script, text = mini / "mini_grpo/train.py", (mini / "mini_grpo/train.py").read_text()
    assert IMPORT in text
    script.write_text(text.replace(IMPORT, new))
    (mini / "mini_grpo/shared.py").write_text(
        "from mini_grpo.drawing import rollout\nfrom mini_grpo.drawing import *\n"
    )
    shutil.copy(mini / SAMPLING, mini / "mini_grpo/drawing.py")
    if not left:
        (mini / SAMPLING).unlink()
    before = contents(mini)
    said = shell.works(*on(mini, "mini"))
    assert "notice: train: patched in mini_grpo/drawing.py in place of mini_grpo/sampling.py" in said.out
    assert "lean.rollout_call(" in (mini / "mini_grpo/drawing.py").read_text()
    assert not left or contents(mini)[SAMPLING] == before[SAMPLING]
    assert "nothing was changed" in shell.works(*on(mini, "mini")).out
    shell.works("leangrpo", "check", mini)
    shell.works("revert-patch", mini)
    assert contents(mini) == before


@follows("LG306")
@pytest.mark.parametrize("why", ["not in the tree", "not imported by name", "from two files"])
def test_a_helper_that_cannot_be_followed(mini: Path, shell: Shell, why: str) -> None:
    """The fix is to put it back; leaving the script out would leave nothing here."""
    new = {
        "not in the tree": "from elsewhere.sampling import (",
        "not imported by name": "from mini_grpo.sampling import *\nfrom mini_grpo.nothing import (  # ",
        "from two files": "from mini_grpo.two import draw\nfrom mini_grpo.one import (",
    }[why]
    script = mini / "mini_grpo/train.py"
    text = script.read_text()
    script.write_text(text.replace(IMPORT, new))
    sampling = (mini / SAMPLING).read_text()
    for name in ("one", "two"):
        (mini / f"mini_grpo/{name}.py").write_text(sampling)
    (mini / SAMPLING).unlink()
    said = shell.fails("LG306", *on(mini, "mini"))
    assert "put" in said.fix and SAMPLING in said.err
    (mini / SAMPLING).write_text(sampling)
    script.write_text(text)
    shell.works(*on(mini, "mini"))
