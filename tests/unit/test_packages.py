"""Where a package that the kit needs is missing or too old, every command says so under a code."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from leangrpo_tools import data
from leangrpo_tools.packages import PACKAGES

COMMANDS = {
    "leangrpo": ("apply", "mini"),
    "apply_patch": ("mini",),
    "diff_patch": ("mini",),
    "revert_patch": ("mini",),
    "verify_patch": ("mini", "--script", "train"),
    "bench_patch": ("mini", "--script", "train"),
}
RUN = """
import importlib.abc, importlib.machinery, sys, types

class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == {absent!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

if {absent!r}:
    sys.meta_path.insert(0, Absent())
if {old!r}:
    sys.modules[{old!r}] = types.ModuleType({old!r})  # with none of the names that newer versions have
    sys.modules[{old!r}].__spec__ = importlib.machinery.ModuleSpec({old!r}, None)
from leangrpo_tools import main
command = {command!r}
sys.argv = [command, *{words!r}]
getattr(main, command)()
"""


def run(command: str, cwd: Path, *, absent: str = "", old: str = "") -> subprocess.CompletedProcess[str]:
    code = RUN.format(absent=absent, old=old, command=command, words=COMMANDS[command])
    return subprocess.run([sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True)


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("how", ["absent typer", "absent pydantic", "old pydantic"])
def test_every_entry_point(command: str, how: str, tmp_path: Path) -> None:
    kind, module = how.split()
    done = run(command, tmp_path, **{kind: module})
    if command == "diff_patch" and module == "pydantic" and done.returncode == 2:
        assert "LG301" in done.stderr  # it ends before it needs pydantic
        return
    assert done.returncode == 3 and done.stderr.startswith("error LG122: "), done.stderr
    assert module in done.stderr and "\nfix: " in done.stderr and "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("module", ["git", "libcst", "rich", "tree_sitter", "yaml"])
def test_no_missing_package_ends_in_a_traceback(module: str, tmp_path: Path) -> None:
    done = run("apply_patch", tmp_path, absent=module)
    assert "Traceback" not in done.stderr and "LG199" not in done.stderr
    assert done.returncode == 0 or (done.returncode == 3 and "error LG122: " in done.stderr), done.stderr


@pytest.mark.skipif(not (data.data_root() / "pyproject.toml").is_file(), reason="not in a checkout")
def test_what_is_declared_is_what_is_known() -> None:
    tomllib = pytest.importorskip("tomllib")
    project = tomllib.loads((data.data_root() / "pyproject.toml").read_text())["project"]
    names = {re.split("[><=]", item)[0] for item in project["dependencies"]}
    assert names == set(PACKAGES.values())
    assert not names & {"torch", "diffusers", "transformers", "accelerate", "peft", "numpy"}
    extras = set(project["optional-dependencies"])
    folder = data.data_root() / "tools"
    named = {name for file in folder.rglob("*.py") for name in re.findall(r"leangrpo-kit\[(\w+)\]", file.read_text())}
    assert named and named <= extras
