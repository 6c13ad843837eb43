"""The embedded trainer, patched: its own launch script, and rehearsals on one and two ranks."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from leangrpo_rehearsal.base import Config
from leangrpo_rehearsal.scripts.mini import SCRIPT
from leangrpo_tools import data, demo
from leangrpo_tools.apply import apply
from leangrpo_tools.rehearsal.rehearse import rehearse
from leangrpo_tools.rehearsal.session import Session

TREE = data.data_root() / "patches/mini/tree"
SMALL = ("--width", "64", "--layers", "1", "--rollouts", "2", "--num_generations", "2", "--eval_every", "1")


@pytest.fixture(scope="module")
def patched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return apply("mini", tmp_path_factory.mktemp("mini") / "patched").dest


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    with Session() as shared:
        yield shared


@pytest.mark.slow
def test_its_own_launch_script(patched: Path, tmp_path: Path) -> None:
    native = tmp_path / "native"
    shutil.copytree(TREE, native, ignore=shutil.ignore_patterns("__pycache__"))
    extra = (*SMALL, "--gradient_accumulation_steps", "2")
    env = {"PYTHONDONTWRITEBYTECODE": "1", "LEANGRPO_REPORT_DIR": str(tmp_path)}
    before = demo.train(native, tmp_path / "native.jsonl", extra, env)
    after = demo.train(patched, tmp_path / "patched.jsonl", extra, env | demo.PATCHED_ENV)
    comparison = demo.Comparison(before, after)
    assert comparison.equal, comparison.table()
    # 2 samples, 8 steps, 6 of them trained; a record leaves the evaluation between two updates out.
    assert [record["forwards"] for record in before] == [{"grad": 12, "no_grad": 16}] * 2
    assert [record["forwards"] for record in after] == [{"grad": 12, "no_grad": 4}] * 2
    windows = [json.loads(line) for line in (tmp_path / "rank0.jsonl").read_text().splitlines()]
    assert [(window["kept"], window["replayed"], window["recomputed"]) for window in windows] == [(12, 12, 0)] * 2


def test_the_switch_off_is_the_native_run(patched: Path, session: Session) -> None:
    report = rehearse("mini", TREE, patched, Config(schedule="recompute"), session=session).to_json()
    assert report["ok"] and report["forwards"]["native"] == report["forwards"]["patched"]


@pytest.mark.parametrize(
    "config",
    [
        Config(updates=3),
        Config(updates=4, updates_per_rollout=2, precision="bf16", checkpointing=True, ema=True),
        pytest.param(Config(ranks=2, updates=2), marks=pytest.mark.slow),
        pytest.param(Config(ranks=2, updates=2, sync="late"), marks=pytest.mark.slow),
        pytest.param(
            Config(ranks=2, updates=4, updates_per_rollout=2, precision="bf16", checkpointing=True, ema=True),
            marks=[pytest.mark.slow, pytest.mark.matrix],
        ),
    ],
    ids=lambda config: (
        f"{config.ranks}-ranks-{config.precision}-{config.updates_per_rollout}-per-rollout-{config.sync}"
    ),
)
def test_rehearsal(patched: Path, session: Session, config: Config) -> None:
    done = rehearse("mini", TREE, patched, config, session=session)
    report = done.to_json()
    assert report["ok"] and report["control_caught"], report
    assert report["bound"]["bitwise"] == (config.sync == "upstream")
    samples = config.accumulation * config.rollouts  # those of the first update of each rollout
    trained = SCRIPT.trained(config)
    native, lean = (report["forwards"][name] for name in ("native", "patched"))
    saved = [before - after for before, after in zip(native["no_grad"], lean["no_grad"], strict=True)]
    # A kept forward runs with gradient in the rollout; the update then runs none. Evaluations, one after each update,
    # keep nothing: there are as many windows as rollouts.
    assert saved == [samples * trained] * config.ranks
    assert native["grad"] == lean["grad"] == [config.generations * trained * config.rollouts] * config.ranks
    kept = config.accumulation * trained
    assert [[window["kept"] for window in rank] for rank in done.windows] == [[kept] * config.rollouts] * config.ranks


def test_a_patched_tree_holds_no_kit_paths(patched: Path) -> None:
    for path in (patched / "mini_grpo/_leangrpo").glob("*.py"):
        assert str(data.data_root()) not in path.read_text(), path
    assert os.access(patched / "scripts/train.sh", os.X_OK)
