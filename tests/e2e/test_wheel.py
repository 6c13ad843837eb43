"""The built wheel: complete, usable from any folder, and of a syntax that every supported Python reads."""

from __future__ import annotations

import ast
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from leangrpo_tools import bundle, data, lock

VERSIONS = ("3.10", "3.11", "3.12", "3.13")
SCRIPTS = ("apply-patch", "diff-patch", "revert-patch", "verify-patch", "bench-patch", "leangrpo")
READ_ALL = "import sys; [compile(open(name, 'rb').read(), name, 'exec') for name in sys.stdin.read().splitlines()]"


def run(*command: object, cwd: Path, ok: int = 0) -> str:
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "LEANGRPO_", "GIT_"))}
    env["PYTHONPATH"] = os.pathsep.join(item for item in sys.path if (Path(item) / "hatchling").is_dir())
    env["LEANGRPO_CACHE"] = str(cwd / "cache")
    done = subprocess.run(list(map(str, command)), cwd=cwd, env=env, capture_output=True, text=True)
    assert done.returncode == ok, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = data.data_root()
    for tool in ("hatchling", "pip"):
        if importlib.util.find_spec(tool) is None:
            pytest.skip(f"{tool} is not installed: pip install {tool}")
    if not (root / "pyproject.toml").is_file():
        pytest.skip("not a checkout of the kit")
    folder = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder / "dist", cwd=root)
    (found,) = (folder / "dist").glob("*.whl")
    return found


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh environment with the wheel; its dependencies are those of the environment that runs the tests."""
    root = tmp_path_factory.mktemp("env") / "venv"
    venv.create(root, system_site_packages=True, with_pip=False)
    python = root / "bin/python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps", "--no-index", wheel, cwd=root)
    # A folder named in a .pth file lends its packages, but not its own .pth files: an editable kit stays out.
    (site,) = root.glob("lib/python*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return root


def test_what_is_in_it(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as found:
        names = found.namelist()
    tops = {name.split("/")[0] for name in names}
    assert {name for name in tops if not name.endswith(".dist-info")} == {
        "leangrpo_core", "leangrpo_rehearsal", "leangrpo_tools", "leangrpo_kit_data"
    }  # fmt: skip
    root = data.data_root()
    wanted = {f"leangrpo_kit_data/{item.relative_to(root)}" for item in (root / "patches").rglob("*") if item.is_file()}
    wanted = {name for name in wanted if "__pycache__" not in name} | {"leangrpo_kit_data/upstreams.lock"}
    assert wanted <= set(names)
    assert not [name for name in names if "__pycache__" in name or name.startswith("tests/")]


def test_it_works_from_any_folder(installed: Path, tmp_path: Path) -> None:
    tools = {name: installed / "bin" / name for name in SCRIPTS}
    where = run(installed / "bin/python", "-c", "import leangrpo_core as core; print(core.__file__)", cwd=tmp_path)
    assert str(installed) in where
    assert "patched mini" in run(tools["apply-patch"], "mini", cwd=tmp_path)
    assert "nothing was changed" in run(tools["leangrpo"], "apply", "mini", cwd=tmp_path)
    assert "+from mini_grpo._leangrpo import lean" in run(tools["diff-patch"], "mini", cwd=tmp_path)
    assert "by leangrpo-kit" in run(tools["leangrpo"], "status", "mini", cwd=tmp_path)
    assert "DanceGRPO" in run(tools["leangrpo"], "list", cwd=tmp_path)
    launch = tmp_path / "mini/scripts/train.sh"
    said = ["--launch", launch, "--set", "gradient_checkpointing=false"]
    assert "predicted" in run(tools["leangrpo"], "plan", "mini", *said, cwd=tmp_path).lower()
    assert "--updates-per-rollout" in run(tools["verify-patch"], "--help", cwd=tmp_path)
    assert "reverted" in run(tools["revert-patch"], "mini", cwd=tmp_path)
    assert "LG301" in run(tools["revert-patch"], "mini", cwd=tmp_path, ok=2)
    run(tools["leangrpo"], "bundle", "mini", "--output", "m.bundle", cwd=tmp_path)
    assert "patched mini" in run(tools["apply-patch"], "mini", "other", "--bundle", "m.bundle", cwd=tmp_path)


def test_a_wheel_and_a_checkout_make_the_same_bundle(installed: Path, tmp_path: Path) -> None:
    run(installed / "bin/leangrpo", "bundle", "mini", "--output", "m.bundle", cwd=tmp_path)
    bundle.use(tmp_path / "m.bundle", "mini", lock.load().upstreams["mini"])


@pytest.mark.parametrize("version", VERSIONS)
def test_syntax(version: str) -> None:
    root = data.data_root()
    files = [file for part in ("leangrpo_core", "tools", "patches", "tests") for file in (root / part).rglob("*.py")]
    files = [file for file in files if "golden" not in file.parts]
    assert len(files) > 100
    feature = (3, int(version.removeprefix("3.")))
    for file in files:
        ast.parse(file.read_text(encoding="utf-8"), str(file), feature_version=feature)
    python = shutil.which(f"python{version}")
    if python is None or subprocess.run([python, "-V"], capture_output=True).returncode:
        pytest.skip(f"parsed as {version}; there is no python{version} here to compile it")
    names = "\n".join(map(str, files))
    done = subprocess.run([python, "-c", READ_ALL], input=names, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
