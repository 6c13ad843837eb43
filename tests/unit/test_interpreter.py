"""Rehearsing with another interpreter: what it is told, what it is spared, and what is said of one that cannot."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from leangrpo_tools.errors import KitError
from leangrpo_tools.rehearsal import needs, verify
from leangrpo_tools.rehearsal.client import ForkServer
from leangrpo_tools.rehearsal.interpreter import PROBE, Interpreter, environment, examine


def program(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def says(version: list[int], packages: dict[str, str]) -> str:
    return f"#!/bin/sh\necho 'leangrpo: {json.dumps([version, packages])}'\n"


def refused(python: Path | str) -> KitError:
    with pytest.raises(KitError) as caught:
        examine(python)
    assert caught.value.code == "LG405" and caught.value.fix and caught.value.exit_code == 3
    return caught.value


def test_what_is_no_interpreter(tmp_path: Path) -> None:
    refused(tmp_path / "nothing")
    refused("no-such-python-anywhere")
    refused("/bin/ls")
    refused(program(tmp_path / "text", "not a program\n"))
    assert "3.9.1" in refused(program(tmp_path / "old", says([3, 9, 1], {}))).what
    broken = program(tmp_path / "broken", "#!/bin/sh\necho 'Fatal Python error: no encodings' >&2\nexit 1\n")
    assert "no encodings" in refused(broken).what
    (tmp_path / "env/bin").mkdir(parents=True)
    (tmp_path / "env/bin/python").symlink_to(sys.executable)
    assert str(tmp_path / "env/bin/python") in refused(tmp_path / "env").fix


def test_a_name_and_a_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A link stays one, since an environment's interpreter is a link."""
    (tmp_path / "mine").symlink_to(sys.executable)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    found = examine("mine")
    assert found.path == str(tmp_path / "mine") and not found.own and found.version == sys.version_info[:3]


def test_packages_are_named_before_anything_runs(tmp_path: Path) -> None:
    has = {name: floor or "1" for name, floor in needs.FLOORS.items()}
    for missing in ("torch", "diffusers", "peft"):
        python = program(tmp_path / missing, says([3, 10, 1], {k: v for k, v in has.items() if k != missing}))
        with pytest.raises(KitError, match=f"no {missing}") as caught:
            verify("danceGRPO", script="flux", python=python)
        assert caught.value.code == "LG404"
    python = program(tmp_path / "old torch", says([3, 10, 1], has | {"torch": "2.4.1+cu121"}))
    with pytest.raises(KitError, match=r"torch 2\.4\.1\+cu121, train needs 2\.5"):
        verify("mini", script="train", python=python)
    python = program(tmp_path / "pins", says([3, 10, 1], has | {"diffusers": "0.33.1"}))
    with pytest.raises(KitError, match=r"diffusers 0\.33\.1, wan_2_1 needs 0\.35") as caught:
        verify("danceGRPO", script="wan_2_1", python=python)
    assert caught.value.code == "LG404" and "0.35.2" in caught.value.fix


def test_versions() -> None:
    assert needs.older("2.4.1+cu121", "2.5") and needs.older("2.9", "2.10") and needs.older("0.32", "0.32.1")
    assert not needs.older("2.10.0", "2.5") and not needs.older("2.5.0a0+git", "2.5") and not needs.older("1", "")
    Interpreter("x", False, (3, 10, 0), {"torch": ""}).require("mini", ("torch",))  # not known is not too old


def test_nothing_of_the_kits_environment_is_inherited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "relative")
    monkeypatch.setenv("PYTHONHOME", "/somewhere")
    other = environment(own=False)
    assert not {"PYTHONPATH", "PYTHONHOME"} & set(other) and other["PYTHONDONTWRITEBYTECODE"] == "1"
    assert environment(own=True)["PYTHONPATH"] == os.path.abspath("relative")


def test_the_probe_is_read_by_old_pythons() -> None:
    assert not {":=", "f'", 'f"', "match "} & set(PROBE.split()) and "print(" in PROBE
    compile(PROBE, "probe", "exec")


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the packages of this one, but without the kit."""
    root = tmp_path_factory.mktemp("trainer") / "venv"
    venv.create(root, with_pip=False)
    (site,) = root.glob("lib/python*/site-packages")
    (site / "packages.pth").write_text(sysconfig.get_path("purelib") + "\n")  # lends no .pth files, so no kit
    return root


def test_the_copy_alone_is_on_its_path(trainer: Path, tmp_path: Path) -> None:
    python = trainer / "bin/python"
    without = subprocess.run([python, "-c", "import leangrpo_tools"], capture_output=True, text=True, cwd=tmp_path)
    assert "ModuleNotFoundError" in without.stderr
    before = sorted(trainer.rglob("*"))
    with ForkServer(tmp_path / "lent", examine(python)) as server:
        server.preload(("json", "leangrpo_rehearsal.base"))
        with pytest.raises(KitError, match="leangrpo_tools"):
            server.preload(("leangrpo_tools",))
    assert sorted(trainer.rglob("*")) == before
    assert [item.name for item in (tmp_path / "lent").iterdir()] == ["leangrpo_rehearsal"]


@pytest.mark.slow
def test_a_rehearsal_in_another_environment(trainer: Path) -> None:
    before = sorted(trainer.rglob("*"))
    report = verify("mini", script="train", python=trainer / "bin/python")
    assert report.ok and report.floor_bitwise and all(update.grad_bitwise for update in report.updates)
    assert str(trainer) in report.tested[-1]
    assert sorted(trainer.rglob("*")) == before
