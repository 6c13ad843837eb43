"""Fixes of the errors of `verify-patch` and `bench-patch`, followed as they are printed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.fixes import Shell, follows

from leangrpo_tools.apply import apply


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
