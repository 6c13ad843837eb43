"""Fixes of the errors of `verify-patch` and `bench-patch`, followed as they are printed."""

from __future__ import annotations

import dataclasses
import re
import sys
from pathlib import Path

import pytest
from support.fixes import Shell, follows

from leangrpo_tools.apply import apply
from leangrpo_tools.errors import KitError
from leangrpo_tools.rehearsal.interpreter import examine


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The embedded trainer, patched."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LEANGRPO_CACHE", str(tmp_path / "cache"))
    return apply("mini", tmp_path / "mini").dest


@follows("LG403")
def test_settings_that_would_not_be_used(tree: Path, shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    """Further: the next thing that it says is of the tree."""
    command = ("verify-patch", "mini", "--tree", tree.with_name("none"), "--script", "train")
    monkeypatch.setenv("LEANGRPO_SYNC", "late")
    line = shell.fails("LG403", *command).command("unset")
    assert line.split() == ["unset", "LEANGRPO_SYNC"]
    monkeypatch.delenv("LEANGRPO_SYNC")
    shell.fails("LG301", *command)


@follows("LG403")
def test_a_value_that_is_not_allowed(tree: Path, shell: Shell) -> None:
    command = ("verify-patch", "mini", "--tree", tree.with_name("none"), "--script", "train", "--sync")
    said = shell.fails("LG403", *command, "never")
    allowed = re.search(r"allowed: (\w+)", said.err)
    assert allowed and "--sync" in shell.paste(said.command("verify-patch").partition(" --help")[0] + " --help").out
    shell.fails("LG301", *command, allowed[1])


@pytest.mark.slow
@follows("LG401")
def test_a_script_that_does_not_run(tree: Path, shell: Shell) -> None:
    """The log that the fix names has the cause; with that mended the rehearsal goes through."""
    script = tree / "mini_grpo/rewards.py"
    text = script.read_text()
    script.write_text(text + "\nimport no_such_module\n")
    command = ("verify-patch", "mini", "--tree", tree, "--script", "train", "--updates", "1")
    said = shell.fails("LG401", *command)
    folder = re.search(r"logs under (\S+)", said.fix)
    assert folder and any("no_such_module" in path.read_text() for path in Path(folder[1]).rglob("*") if path.is_file())
    script.write_text(text)
    shell.works(*command)


@follows("LG405")
@follows("LG404")
def test_an_interpreter_that_can_rehearse(tmp_path: Path) -> None:
    """The first fix names the interpreter in a folder; the second one says what an environment has to have."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/python").symlink_to(sys.executable)
    with pytest.raises(KitError, match="folder") as caught:
        examine(tmp_path)
    found = examine(caught.value.fix.removeprefix("--python "))
    old = dataclasses.replace(found, packages=found.packages | {"torch": "2.4.0"})
    with pytest.raises(KitError) as lacking:
        old.require("train", ("torch",))
    (floor,) = re.findall(r"has torch (\S+) or newer", lacking.value.fix)
    dataclasses.replace(found, packages={"torch": floor}).require("train", ("torch",))
