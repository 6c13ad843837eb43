"""The real DanceGRPO, where it is in the cache."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from support.toytree import contents, git

from leangrpo_tools import fetch, lock
from leangrpo_tools.apply import apply
from leangrpo_tools.diff import diff
from leangrpo_tools.revert import revert

pytestmark = pytest.mark.upstream
EXPECTED = {
    "fastvideo/train_grpo_flux.py": {"rollout": 1, "policy": 1},
    "fastvideo/train_grpo_flux_lora.py": {"rollout": 1, "policy": 1},
    "fastvideo/train_grpo_wan_2_1.py": {"rollout": 2, "policy": 2},
}


@pytest.fixture(scope="module")
def patched(tmp_path_factory: pytest.TempPathFactory):
    entry = lock.load().upstreams["DanceGRPO"]
    assert isinstance(entry, lock.GitEntry)
    if not fetch.cached("DanceGRPO", entry):
        pytest.skip("DanceGRPO is not in the cache; fill it with: apply-patch DanceGRPO /tmp/x [--source PATH]")
    return apply("DanceGRPO", tmp_path_factory.mktemp("real") / "d")


def test_every_anchor_matches_and_only_few_lines_change(patched) -> None:
    for name, count in EXPECTED.items():
        text = (patched.dest / name).read_text()
        assert text.count("lean.rollout_call(") == count["rollout"]
        assert text.count("lean.policy_call(") == count["policy"]
        for call in ("lean.rollout(", "lean.step_order(", "lean.identity()", "lean.flush(transformer, optimizer)"):
            assert text.count(call) == 1, call
        assert text.count("lean_rows=batch_idx") == 1
    stat = diff(patched.dest, stat=True).text.decode()
    assert "3 files changed" in stat
    assert git(patched.dest, "status", "--porcelain") == ""


def test_launch_files_of_the_recipe_exist(patched) -> None:
    from leangrpo_tools import recipe

    for script in recipe.load("DanceGRPO").scripts.values():
        for launch in script.launch:
            assert Path(script.file).name in (patched.dest / launch).read_text()


def test_round_trip_and_time(patched, tmp_path: Path) -> None:
    first = apply("DanceGRPO", tmp_path / "d")
    after = contents(first.dest)
    revert(first.dest)
    before = contents(first.dest)
    assert git(first.dest, "rev-parse", "HEAD") == git(patched.dest, "rev-parse", "HEAD^")
    start = time.process_time()
    apply("DanceGRPO", tmp_path / "d")
    assert time.process_time() - start <= 2.0
    assert contents(first.dest) == after
    revert(first.dest)
    assert contents(first.dest) == before
