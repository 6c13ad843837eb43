"""The strength of the suite: each single fault in the runtime makes the tests named beside it fail.

A fault is a change of one place in the source of a copy of the runtime. The first test shows that the unchanged copy
passes, so that a failure means the fault.
"""

import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml

CAUGHT = "test_fault_is_caught"
ROOT = Path(__file__).parents[2]
FAULTS: list[dict[str, Any]] = yaml.safe_load(Path(__file__).with_name("faults.yaml").read_text(encoding="utf-8"))


def copy_runtime(folder: Path) -> Path:
    shutil.copytree(ROOT / "leangrpo_core", folder / "leangrpo_core", ignore=shutil.ignore_patterns("__pycache__"))
    return folder / "leangrpo_core"


def run_tests(folder: Path, tests: list[str]) -> subprocess.CompletedProcess[str]:
    """The given tests against the runtime in `folder`; stops at the first failure."""
    names = [str(ROOT / "tests" / "unit" / test) for test in tests]
    code = (
        "import sys, pytest, leangrpo_core\n"
        f"assert leangrpo_core.__file__.startswith({str(folder)!r}), leangrpo_core.__file__\n"
        f"sys.exit(pytest.main(['-x', '-q', '-p', 'no:cacheprovider', '-c', {str(ROOT / 'pyproject.toml')!r}, "
        f"'--rootdir', {str(ROOT)!r}, *{names!r}]))"
    )
    return subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize("fault", FAULTS, ids=[fault["fault"] for fault in FAULTS])
def test_fault_names_text_that_is_there(fault: dict[str, Any]) -> None:
    assert fault["instead of"] in (ROOT / "leangrpo_core" / f"{fault['in']}.py").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def outcomes(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, subprocess.CompletedProcess[str]]:
    """Each chosen fault's run of its tests, three at a time: they wait for process groups more than they compute."""
    chosen = {item.callspec.params["name"] for item in request.session.items if item.originalname == CAUGHT}  # type: ignore[attr-defined]

    def run(fault: dict[str, Any]) -> subprocess.CompletedProcess[str]:
        folder = tmp_path_factory.mktemp("fault")
        source = copy_runtime(folder) / f"{fault['in']}.py"
        text = source.read_text(encoding="utf-8")
        text = text.replace(fault["instead of"], fault["write"])
        source.write_text(text + "\n\nKEEP: list = []\n", encoding="utf-8")
        return run_tests(folder, fault["caught by"])

    tmp_path_factory.getbasetemp()  # made once, not by three threads at a time
    with ThreadPoolExecutor(3) as pool:
        faults = [fault for fault in FAULTS if fault["fault"] in chosen]
        return dict(zip((fault["fault"] for fault in faults), pool.map(run, faults), strict=True))


def test_the_unchanged_copy_passes(tmp_path: Path) -> None:
    copy_runtime(tmp_path)
    ranked = ("wrappers", "fsdp1", "layermajor", "late", "agree", "two_ranks")  # they run anyway, and take long
    tests = {test for fault in FAULTS for test in fault["caught by"] if not any(name in test for name in ranked)}
    done = run_tests(tmp_path, sorted(tests))
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [pytest.param(fault["fault"], marks=[pytest.mark.matrix] if fault.get("wide") else []) for fault in FAULTS],
)
def test_fault_is_caught(name: str, outcomes: dict[str, subprocess.CompletedProcess[str]]) -> None:
    done = outcomes[name]
    text = done.stdout[-3000:] + done.stderr[-1000:]
    assert done.returncode == 1 and "failed" in done.stdout, f"the suite passes with this fault\n{text}"
