"""The strength of the suite: each single fault in the runtime makes the tests named beside it fail.

A fault is a change of one place in the source of a copy of the runtime. The first test shows that the unchanged copy
passes, so that a failure means the fault.
"""

import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
import yaml
from support.forked import Runner

CAUGHT = "test_fault_is_caught"
PROCESSES = 3
ROOT = Path(__file__).parents[2]
FAULTS: list[dict[str, Any]] = yaml.safe_load(Path(__file__).with_name("faults.yaml").read_text(encoding="utf-8"))


def copy_runtime(folder: Path) -> Path:
    shutil.copytree(ROOT / "leangrpo_core", folder / "leangrpo_core", ignore=shutil.ignore_patterns("__pycache__"))
    return folder / "leangrpo_core"


def run_tests(runner: Runner, folder: Path, tests: list[str]) -> tuple[int, str]:
    """The given tests against the runtime in `folder`; stops at the first failure."""
    names = [str(ROOT / "tests" / "unit" / test) for test in tests]
    options = ["-x", "-q", "-p", "no:cacheprovider", "-c", str(ROOT / "pyproject.toml"), "--rootdir", str(ROOT)]
    return runner.run(folder, [*options, *names])


@pytest.mark.parametrize("fault", FAULTS, ids=[fault["fault"] for fault in FAULTS])
def test_fault_names_text_that_is_there(fault: dict[str, Any]) -> None:
    assert fault["instead of"] in (ROOT / "leangrpo_core" / f"{fault['in']}.py").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str]]:
    """Each chosen fault's run of its tests, three at a time: they wait for process groups more than they compute."""
    chosen = {item.callspec.params["name"] for item in request.session.items if item.originalname == CAUGHT}  # type: ignore[attr-defined]

    runners: SimpleQueue[Runner] = SimpleQueue()

    def run(fault: dict[str, Any]) -> tuple[int, str]:
        folder = tmp_path_factory.mktemp("fault")
        source = copy_runtime(folder) / f"{fault['in']}.py"
        text = source.read_text(encoding="utf-8")
        text = text.replace(fault["instead of"], fault["write"])
        source.write_text(text + "\n\nKEEP: list = []\n", encoding="utf-8")
        runner = runners.get()
        try:
            return run_tests(runner, folder, fault["caught by"])
        finally:
            runners.put(runner)

    tmp_path_factory.getbasetemp()  # made once, not by three threads at a time
    for _ in range(PROCESSES):
        runners.put(Runner())
    with ThreadPoolExecutor(PROCESSES) as pool:
        faults = [fault for fault in FAULTS if fault["fault"] in chosen]
        found = dict(zip((fault["fault"] for fault in faults), pool.map(run, faults), strict=True))
    while not runners.empty():
        runners.get().close()
    return found


def test_the_unchanged_copy_passes(tmp_path: Path) -> None:
    """One test of each file: that all of them pass, the rest of the suite shows."""
    copy_runtime(tmp_path)
    tests = {test.split("::")[0]: test for fault in FAULTS if not fault.get("wide") for test in fault["caught by"]}
    runner = Runner()
    status, text = run_tests(runner, tmp_path, sorted(tests.values()))
    runner.close()
    assert status == 0, text[-3000:]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [pytest.param(fault["fault"], marks=[pytest.mark.matrix] if fault.get("wide") else []) for fault in FAULTS],
)
def test_fault_is_caught(name: str, outcomes: dict[str, tuple[int, str]]) -> None:
    status, text = outcomes[name]
    assert status == 1 and "failed" in text, f"the suite passes with this fault\n{text[-3000:]}"
