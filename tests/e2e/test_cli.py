"""The commands as a user runs them: options, exit codes, text and JSON."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.toytree import contents

from leangrpo_tools import cli

VERBS = {
    "apply-patch": cli.apply_patch,
    "diff-patch": cli.diff_patch,
    "revert-patch": cli.revert_patch,
    "verify-patch": cli.verify_patch,
    "bench-patch": cli.bench_patch,
    "leangrpo": cli.leangrpo,
}


def run(monkeypatch: pytest.MonkeyPatch, *argv: str) -> int:
    """Run a console script in this process and return its exit status."""
    monkeypatch.setattr(sys, "argv", list(argv))
    with pytest.raises(SystemExit) as caught:
        VERBS[argv[0]]()
    return int(caught.value.code or 0)


@pytest.fixture
def call(kit, monkeypatch: pytest.MonkeyPatch, capfdbinary):
    def run_it(*argv: str) -> tuple[int, str, str]:
        status = run(monkeypatch, *argv)
        out, err = capfdbinary.readouterr()
        return status, out.decode(), err.decode()

    return run_it


def test_the_whole_round(call, kit) -> None:
    status, out, err = call("apply-patch", "danceGRPO", "--json", "a.json")
    assert (
        (status, err) == (0, "") and "patched DanceGRPO (flux, flux_lora, wan_2_1)" in out and "warning: wan_2_1" in out
    )
    said = json.loads(Path("a.json").read_text())
    assert said["ok"] and said["changed"] and said["files"]["fastvideo/train_grpo_flux.py"] == "edited"
    assert said["edits"]["fastvideo/train_grpo_flux.py"][0]["lines"]
    status, out, err = call("apply-patch", "dancegrpo")
    assert status == 0 and "nothing was changed" in out
    status, out, err = call("diff-patch", "DANCEGRPO")
    assert status == 0 and out.startswith("diff --git") and "\x1b" not in out
    assert "left out:" in err and "_leangrpo" in err
    status, out, err = call("diff-patch", "DanceGRPO", "--stat")
    assert "3 files changed" in out
    status, out, err = call("diff-patch", "DanceGRPO", "--output", "p.diff")
    assert status == 0 and out == "" and Path("p.diff").read_text().startswith("diff --git")
    status, out, err = call("leangrpo", "status", "DanceGRPO", "--json", "-")
    assert json.loads(out)["patched"] is True
    status, out, err = call("revert-patch", "dancegrpo")
    assert status == 0 and "3 files restored" in out
    status, out, err = call("revert-patch", "dancegrpo")
    assert status == 2 and err.startswith("error LG301: ") and "\nfix: " in err
    status, out, err = call("leangrpo", "status", "DanceGRPO")
    assert status == 0 and "not patched" in out


def test_list(call) -> None:
    status, out, _ = call("leangrpo", "list")
    assert status == 0 and "DanceGRPO" in out and "wan_2_1" in out and "mini" in out
    status, out, _ = call("leangrpo", "list", "--json", "-")
    assert {item["name"] for item in json.loads(out)} == {"DanceGRPO", "mini"}


def test_exit_codes(call, kit) -> None:
    status, _, err = call("apply-patch", "dancegpro", "--json", "e.json")
    assert (
        status == 2
        and "error LG102" in err
        and "did you mean DanceGRPO?" in err
        and "cause: known: DanceGRPO, mini" in err
    )
    assert json.loads(Path("e.json").read_text())["error"]["code"] == "LG102"
    assert call("apply-patch", "DanceGRPO", "--script", "nothing")[0] == 2
    assert call("apply-patch")[0] == 2
    assert call("apply-patch", "DanceGRPO", "--source", "/nowhere")[0] == 3
    assert call("diff-patch", "./nowhere")[0] == 2
    assert call("diff-patch", "DanceGRPO")[0] == 2
    assert call("leangrpo", "nonsense")[0] == 2
    assert call("leangrpo", "explain", "LG999")[0] == 2
    status, out, _ = call("leangrpo", "explain", "lg603")
    assert status == 0 and out.startswith("LG603: ") and "lean.flush" in out


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["apply-patch"], "Missing argument 'NAME'"),
        (["apply-patch", "mini", "--bogus"], "No such option: --bogus"),
        (["bench-patch", "mini"], "Missing option '--script'"),
        (["diff-patch", "mini", "more"], "unexpected extra argument"),
        (["revert-patch", "mini", "--json"], "'--json' requires an argument"),
        (["verify-patch", "mini", "--script", "train", "--ranks", "0"], "Invalid value for '--ranks'"),
        (["verify-patch", "mini", "--script", "train", "--ranks", "two"], "Invalid value for '--ranks'"),
        (["leangrpo", "nonsense"], "No such command 'nonsense'"),
        (["leangrpo", "explain"], "Missing argument 'CODE'"),
    ],
)
def test_a_command_line_that_makes_no_sense(call, argv: list[str], says: str) -> None:
    status, out, err = call(*argv)
    assert (status, out) == (2, "") and err.startswith("error LG121: ") and says in err.splitlines()[0]
    assert "\ncause: " in err and "\nfix: " in err and f"{argv[0]} " in err and "--help" in err
    assert call("leangrpo", "explain", "LG121")[0] == 0


def test_no_command_at_all_shows_the_help(call) -> None:
    status, out, err = call("leangrpo")
    assert status in (0, 2) and "Commands" in out + err and "LG121" not in err  # by the parser's version


def test_a_source_that_is_not_needed_is_named(call, kit) -> None:
    source = ("--source", str(kit.upstream))
    assert "notice: --source" not in call("apply-patch", "DanceGRPO", "a", *source)[1]
    _, out, _ = call("apply-patch", "DanceGRPO", "b", *source)
    (line,) = [line for line in out.splitlines() if "--source" in line]
    assert line.startswith("notice: --source was not used: ") and "in the cache already" in line
    assert "in the cache already" in call("apply-patch", "DanceGRPO", "c", "--dry-run", *source)[2]
    assert "b is a checkout at the pin already" in call("apply-patch", "DanceGRPO", "b", *source)[1]
    assert "mini comes with the kit" in call("apply-patch", "mini", "d", *source)[1]
    bundle = call("leangrpo", "bundle", "DanceGRPO", "--output", "x.bundle", *source)
    assert bundle[0] == 0 and "notice: --source was not used: " in bundle[1]
    status, _, err = call("verify-patch", "DanceGRPO", "--script", "nothing", *source)
    assert status == 2 and "notice: --source was not used: " in err and "error LG203" in err
    status, _, err = call("bench-patch", "DanceGRPO", "--script", "flux", "--tree", "a", *source)
    assert status == 2 and "error LG103" in err


def test_no_git_on_this_machine() -> None:
    """GitPython has advice of its own, about variables that this kit does not read."""
    code = "import sys; from leangrpo_tools import cli; sys.argv = ['apply-patch', 'mini']; cli.apply_patch()"
    for more in ({}, {"GIT_PYTHON_REFRESH": "quiet"}):
        done = subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, "PATH": "/nowhere", **more}, capture_output=True, text=True
        )
        first, cause, fix = done.stderr.splitlines()
        assert done.returncode == 3 and first.startswith("error LG110: git cannot be run: ")
        assert cause == "cause: git is not installed" and fix.startswith("fix: install git")


def test_a_tree_of_the_users_own(call, clone) -> None:
    file, other = "fastvideo/train_grpo_flux.py", "fastvideo/train_grpo_wan_2_1.py"
    (clone / file).rename(clone / "fastvideo/ours.py")
    (clone / other).write_text((clone / other).read_text().replace("randperm", "randn"))
    status, out, _ = call("apply-patch", "DanceGRPO", "--tree", "mine", "--script-as", "flux=fastvideo/ours.py",
                          "--script", "wan_2_1", "--allow-partial", "--strict-pin")  # fmt: skip
    assert status == 1 and "patched DanceGRPO (flux)" in out and "skipped wan_2_1: LG201: " in out
    status, out, _ = call("leangrpo", "check", "mine")
    assert status == 0 and "by leangrpo-kit 0.1.0" in out and out.endswith("patched and up to date\n")
    path = clone / "fastvideo/ours.py"
    path.write_text(path.read_text().replace("lean.flush(", "lean.flush(  # mine\n"))
    status, out, _ = call("leangrpo", "check", "mine", "--json", "-")
    assert status == 1 and json.loads(out)["files"]["fastvideo/ours.py"] == "changed"
    status, out, err = call("revert-patch", "mine")
    assert status == 1 and "error LG302" in err and "fastvideo/ours.py:" in err and "--abort" in err
    status, out, _ = call("leangrpo", "status", "mine")
    assert status == 0 and "merge not finished: fastvideo/ours.py" in out
    status, out, err = call("revert-patch", "mine", "--abort")
    assert status == 0 and "as before the merge" in out and "# mine" in path.read_text()
    status, _, err = call("apply-patch", "DanceGRPO", "--tree", "mine", "--anchor", "flux.policy=1")
    assert status == 1 and "error LG201" in err and "--anchor flux.policy=" in err


def test_dry_run(call, kit) -> None:
    status, out, err = call("apply-patch", "DanceGRPO", "--dry-run")
    assert status == 0 and out.startswith("diff --git") and "nothing was written" in err
    assert contents(kit.work) == {}


def test_json_that_cannot_be_written(call) -> None:
    assert call("leangrpo", "list", "--json", "/nowhere/x.json")[0] == 3


@pytest.mark.parametrize("name", sorted(VERBS))
def test_help_is_quick_and_imports_nothing_heavy(name: str) -> None:
    code = (
        f"import sys; from leangrpo_tools import cli; sys.argv = ['{name}', '--help']\n"
        f"try: cli.{VERBS[name].__name__}()\n"
        "except SystemExit as err: assert not err.code\n"
        "assert not {'torch', 'libcst', 'git', 'pydantic', 'yaml', 'diffusers'} & set(sys.modules)\n"
    )
    spent = []
    for _ in range(3):
        start = _cpu()
        subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, env={**os.environ})
        spent.append(_cpu() - start)
    assert min(spent) <= 0.3  # processor time: the machine may be busy with other tests


def _cpu() -> float:
    times = os.times()
    return times.children_user + times.children_system


def test_the_console_scripts_are_installed() -> None:
    folder = Path(sys.executable).parent
    if not (folder / "apply-patch").exists():
        pytest.skip("the kit is not installed here: pip install -e .")
    start = _cpu()
    out = subprocess.run([folder / "apply-patch", "--help"], capture_output=True, text=True, cwd="/", check=True).stdout
    assert "--source" in out and _cpu() - start < 10
