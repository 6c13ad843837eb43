"""FlowGRPO's FLUX scripts, patched against unpatched. The wide combinations run with the matrix."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from support.bench import Bench, assert_first_update_is_replayed, assert_ok, bench_of

pytestmark = [pytest.mark.upstream, pytest.mark.slow]
SCRIPTS = ("flux", "flux_fast", "flux_kontext")


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    yield from bench_of("flowGRPO", tmp_path_factory.mktemp("bench"), list(SCRIPTS))


SMALL: dict[str, Any] = {"generations": 4, "steps": 3, "fraction": 0.7, "updates": 3, "updates_per_rollout": 2}


def test_flux(bench: Bench) -> None:
    """Two updates of a rollout, an evaluation, and the first update of the next one."""
    report = bench.rehearse("flux", **SMALL)
    assert_ok(report)
    assert report.floor_bitwise and report.bound.rel_l2 == 5e-6 and len(report.windows[0]) == 2
    assert_first_update_is_replayed(report)


def test_flux_fast_is_bitwise(bench: Bench) -> None:
    report = bench.rehearse("flux_fast", **SMALL | {"updates": 2}, options={"evaluate": 0})
    assert_ok(report)
    assert report.floor_bitwise and report.bound.bitwise and len(report.windows[0]) == 1
    assert_first_update_is_replayed(report)


TWO: dict[str, Any] = {"updates": 4, "updates_per_rollout": 2}
ONE: dict[str, Any] = {"updates": 2, "updates_per_rollout": 1}


@pytest.mark.matrix
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize(
    "config",
    [TWO, ONE, TWO | {"options": {"beta": 0.04}, "ema": True}],
    ids=["two updates", "one update", "reference and EMA"],
)
def test_in_fp32(bench: Bench, script: str, config: dict[str, Any], ranks: int) -> None:
    report = bench.rehearse(script, ranks=ranks, **config)
    assert_ok(report)
    assert_first_update_is_replayed(report)
    assert report.bound.bitwise == (script == "flux_fast" and ranks == 1)
    assert report.replicas == ([True] * report.config.updates if ranks == 2 else [])


@pytest.mark.matrix
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("config", [TWO, ONE], ids=["two updates", "one update"])
def test_samples_without_an_advantage(bench: Bench, config: dict[str, Any], ranks: int) -> None:
    """Only Kontext leaves them out; fewer rows than were kept are then trained."""
    report = bench.rehearse("flux_kontext", ranks=ranks, options={"masked": 1, "beta": 0.04}, **config)
    assert_ok(report)
    for windows in report.windows:
        assert all(0 < window["replayed"] <= window["kept"] for window in windows)
        assert any("held, not used by the first update" in window["reasons"] for window in windows)
    assert report.replicas == ([True] * report.config.updates if ranks == 2 else [])


@pytest.mark.matrix
def test_upstreams_own_order(bench: Bench) -> None:
    """The graphs of all samples are held for the first update, whichever of them it trains."""
    report = bench.rehearse("flux", options={"order": "upstream"}, **TWO)
    assert_ok(report)
    figures = [(window["kept"], window["replayed"], window["recomputed"]) for window in report.windows[0]]
    assert figures == [(24, 12, 0)] * 2


@pytest.mark.matrix
@pytest.mark.parametrize("script", ["flux", "flux_fast"])
def test_bf16_recomputes_unless_it_is_told_otherwise(bench: Bench, script: str) -> None:
    report = bench.rehearse(script, precision="bf16", **TWO)
    assert_ok(report)
    assert report.bound.bitwise and report.nothing_to_replay
    assert [window["replayed"] for window in report.windows[0]] == [0, 0]
    assert any("but for rounding: timestep" in reason for reason in report.windows[0][0]["reasons"])


@pytest.mark.matrix
@pytest.mark.parametrize("script", ["flux", "flux_fast"])
def test_bf16_with_rounded_inputs(bench: Bench, script: str) -> None:
    """Against native runs whose first updates get the rollout's inputs, too."""
    report = bench.rehearse(script, precision="bf16", options={"inputs": "rounded"}, **TWO)
    assert_ok(report)
    assert_first_update_is_replayed(report)
    assert report.bound.bitwise == (script == "flux_fast")


@pytest.mark.matrix
@pytest.mark.parametrize("ranks", [1, 2])
def test_recompute_is_bitwise_upstream(bench: Bench, ranks: int) -> None:
    report = bench.rehearse("flux", ranks=ranks, schedule="recompute", **TWO)
    assert_ok(report)
    assert report.bound.bitwise and report.forwards["patched"] == report.forwards["native"]
