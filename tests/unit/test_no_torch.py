"""The commands run on a Python without torch; what a rehearsal runs elsewhere needs nothing of the kit."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from leangrpo_tools import data, support

TRAINING = {
    "absl", "accelerate", "diffusers", "ml_collections", "numpy", "peft", "PIL", "tokenizers", "torch",
    "transformers", "trl",
}  # fmt: skip
"""Upstream's own packages."""
BLOCKED = ("torch", "diffusers", "transformers", "accelerate", "peft", "numpy", "ml_collections", "absl")
WITHOUT = f"""
import importlib.abc, runpy, sys

class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {BLOCKED!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Absent())
from leangrpo_tools import cli
sys.argv = sys.argv[1:]
getattr(cli, sys.argv[0].replace("-", "_"))()
"""
"""Runs a command of the kit as if those packages were not there."""


def without(*command: str | Path, cwd: Path, code: int = 0) -> str:
    env = {name: value for name, value in os.environ.items() if not name.startswith("LEANGRPO_")}
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT, *map(str, command)], cwd=cwd, env=env, capture_output=True, text=True
    )
    assert done.returncode == code, done.stderr + done.stdout
    return done.stdout


def files(package: Path) -> list[Path]:
    found = sorted(package.rglob("*.py"))
    assert len(found) > 30
    return found


def imported(file: Path) -> set[str]:
    """The first names of what a file imports anywhere, relative imports as `.`."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add("." if node.level else node.module or "")
    return {name.partition(".")[0] or "." for name in names}


def test_the_training_side_imports_nothing_of_the_kit() -> None:
    allowed = {"leangrpo_rehearsal", *TRAINING, *sys.stdlib_module_names}
    wrong = {file.name: imported(file) - allowed for file in files(data.rehearsal_path())}
    assert {name: found for name, found in wrong.items() if found} == {}


def test_the_commands_import_nothing_of_training() -> None:
    own = {"git", "hatchling", "leangrpo_rehearsal", "leangrpo_tools", "libcst", "matplotlib", "pydantic", "rich"}
    own |= {"tree_sitter", "tree_sitter_bash", "typer", "yaml", *sys.stdlib_module_names}
    wrong = {file.name: imported(file) - own for file in files(data.rehearsal_path().parent / "leangrpo_tools")}
    assert {name: found for name, found in wrong.items() if found} == {}


def test_the_finder_blocks(tmp_path: Path) -> None:
    code = WITHOUT.replace("from leangrpo_tools import cli", "import torch")
    done = subprocess.run([sys.executable, "-c", code, "x"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1 and "No module named 'torch'" in done.stderr


def test_every_command_but_the_rehearsals(tmp_path: Path) -> None:
    without("apply-patch", "mini", cwd=tmp_path)
    assert "lean" in without("diff-patch", "mini", cwd=tmp_path)
    for verb in ("status", "check"):
        without("leangrpo", verb, "mini", cwd=tmp_path)
    without("leangrpo", "list", cwd=tmp_path)
    without("leangrpo", "support", cwd=tmp_path)
    said = [word for name in ("gradient_checkpointing=false", "bf16=false", "width=128", "layers=2")
            for word in ("--set", name)]  # fmt: skip
    assert "retain" in without("leangrpo", "plan", "mini", "--launch", "mini/scripts/train.sh", *said, cwd=tmp_path)
    without("revert-patch", "mini", cwd=tmp_path)


def test_what_a_rehearsal_is_made_of_is_known_without_torch(tmp_path: Path) -> None:
    """Configurations, command lines and bounds of every script come from modules that the commands import."""
    names = {script.rehearsal for _, script in support.scripts() if script.rehearsal}
    assert len(names) > 10
    code = WITHOUT.partition("from leangrpo_tools import cli")[0]
    code += "from leangrpo_tools.rehearsal.rehearse import find_script\n"
    code += f"for name in {sorted(names)!r}:\n    script = find_script(name)\n    config = script.configure()\n"
    code += "    script.bound_for_schedule(config), script.supports(config), script.regrouped(config)\n"
    code += "assert not [name for name in sys.modules if name.partition('.')[0] == 'torch']\n"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_rehearsals_run_torch_in_another_process_only(tmp_path: Path) -> None:
    without("verify-patch", "mini", "--script", "train", "--json", "v.json", cwd=tmp_path)
    found = json.loads((tmp_path / "v.json").read_text())
    assert found["ok"] and len(found["updates"]) == 4 and found["control_caught"] and found["floor"]["bitwise"]
    assert all(update["grad_bitwise"] and update["weights_bitwise"] for update in found["updates"])
    without("bench-patch", "mini", "--script", "train", "--repeat", "1", "--schedule", "retain", "--json", "b.json",
            cwd=tmp_path)  # fmt: skip
    names = [item["name"] for item in json.loads((tmp_path / "b.json").read_text())["timings"]]
    assert names == ["native", "recompute", "retain"]
