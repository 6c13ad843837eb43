"""DanceGRPO's own scripts with shared prompts and on-policy updates, against the untouched scripts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from support.bench import Bench, assert_ok, bench_of

from leangrpo_tools.rehearsal.report import Report

pytestmark = [pytest.mark.upstream, pytest.mark.slow]
MATRIX = pytest.mark.matrix
STEPS, TRAINED = 6, 3  # of a trajectory, and of those int(5 * 0.6)


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    yield from bench_of("DanceGRPO", tmp_path_factory.mktemp("bench"))


def rehearse(bench: Bench, script: str, ranks: int, per_rollout: int, sync: str, **options: str) -> Report:
    rollouts = 2
    # Wan's first latent is bf16 in the rollout only: the same input where autocast is on, as it is in training.
    report = bench.rehearse(
        script, ranks=ranks, updates=rollouts * per_rollout, updates_per_rollout=per_rollout, sync=sync,
        precision="bf16" if script == "wan_2_1" else "fp32", options=options,
    )  # fmt: skip
    assert_ok(report)
    rows = report.config.generations * rollouts
    on_policy = options.get("updates") == "on-policy"
    replayed = rows if on_policy else rows // per_rollout
    assert report.forwards["native"].grad == [rows * TRAINED] * ranks
    assert report.forwards["native"].no_grad == [rows * STEPS] * ranks
    assert report.forwards["patched"].grad == [rows * TRAINED] * ranks
    assert report.forwards["patched"].no_grad == [rows * STEPS - replayed * TRAINED] * ranks
    assert all(window["recomputed"] == 0 for rank in report.windows for window in rank)
    return report


def case(
    script: str, ranks: int, per_rollout: int = 1, sync: str = "upstream", wide: bool = True, **options: Any
) -> Any:
    name = ", ".join([script, f"{ranks} ranks", f"K={per_rollout}", sync, *(f"{n}={v}" for n, v in options.items())])
    return pytest.param(script, ranks, per_rollout, sync, options, id=name, marks=[MATRIX] if wide else [])


@pytest.mark.parametrize(
    ("script", "ranks", "per_rollout", "sync", "options"),
    [
        case("flux", 2, 2, wide=False, prompts="2", generations="4"),
        case("flux", 2, generations="6"),
        case("flux", 2, generations="2"),
        case("flux", 4, generations="2"),
        case("flux", 4, generations="6"),
        case("flux", 4, generations="4"),
        case("flux", 2, 3, generations="6"),
        case("flux", 2, 3, prompts="2", generations="6"),
        case("flux", 2, sync="late", prompts="2", generations="4"),
        case("flux_lora", 2, generations="4"),
        case("flux_lora", 2, sync="late", generations="4"),
        case("wan_2_1", 2, sync="late", generations="4"),
    ],
)
def test_shared_prompts(
    bench: Bench, script: str, ranks: int, per_rollout: int, sync: str, options: dict[str, str]
) -> None:
    report = rehearse(bench, script, ranks, per_rollout, sync, layout="shared", **options)
    assert report.bound.rel_l2 <= 1e-6


@pytest.mark.parametrize(
    ("script", "ranks", "per_rollout", "sync", "options"),
    [
        case("flux", 1, 2, wide=False, prompts="2", generations="4"),
        case("flux", 2, 2, prompts="2", generations="4"),
        case("flux", 2, 2, prompts="2", generations="4", layout="shared"),
        case("flux_lora", 1, 2, prompts="2", generations="4"),
        case("wan_2_1", 1, 2, prompts="2", generations="4"),
    ],
)
def test_on_policy(bench: Bench, script: str, ranks: int, per_rollout: int, sync: str, options: dict[str, str]) -> None:
    """Each update is that of a native run whose rollouts have one update: no policy forward is made for it."""
    report = rehearse(bench, script, ranks, per_rollout, sync, updates="on-policy", **options)
    assert report.bound.bitwise == ("layout" not in options)


@MATRIX
def test_held_bytes_and_the_rewards_that_upstream_writes(bench: Bench) -> None:
    shared = bench.rehearse("flux", ranks=2, options={"layout": "shared", "generations": "6"})
    written = {
        variant: sorted(bench.session.root.glob(f"*/work/{variant}/reward.txt"), key=lambda path: path.stat().st_mtime)
        for variant in ("native", "patched")
    }
    means = {name: [float(line) for line in files[-1].read_text().split()] for name, files in written.items()}
    assert len(means["native"]) == 2 and means["patched"] == pytest.approx(means["native"], rel=1e-6)
    native = bench.rehearse("flux", ranks=2, options={"generations": "6"})
    assert shared.peak_held_bytes == pytest.approx(native.peak_held_bytes / 2, rel=0.05)
