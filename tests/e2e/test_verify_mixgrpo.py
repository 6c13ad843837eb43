"""MixGRPO's own script, patched against unpatched, in each of its strategies."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from support.bench import Bench, assert_ok, bench_of

from leangrpo_tools.errors import KitError
from leangrpo_tools.rehearsal.report import Report

pytestmark = [pytest.mark.upstream, pytest.mark.slow]
MATRIX = pytest.mark.matrix
STEPS = 6


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    yield from bench_of("MixGRPO", tmp_path_factory.mktemp("bench"))


def case(ranks: int, per_rollout: int, precision: str = "fp32", wide: bool = True, **options: Any) -> Any:
    name = ", ".join([f"{ranks} ranks", f"K={per_rollout}", precision, *(f"{n}={v}" for n, v in options.items())])
    return pytest.param(ranks, per_rollout, precision, options, id=name, marks=[MATRIX] if wide else [])


def windows_of(report: Report) -> list[range]:
    """The trained steps of each rollout with the strategy `part`: at the end the window is cut short."""
    start = [int(report.config.option("overlap", "1")) * rollout for rollout in range(report.config.rollouts)]
    return [range(STEPS - 2)[at : at + int(report.config.option("group_size", "2"))] for at in start]


def sampled(report: Report) -> int:
    """Steps of a trajectory in all rollouts: with Flash, fewer follow the window."""
    option = report.config.option
    if option("flash", "0") == "0" or option("strategy", "part") == "all":
        return STEPS * report.config.rollouts
    lasts = [window[-1] for window in windows_of(report)]
    return sum(last + int((STEPS - last) * float(option("compress", "0.7"))) for last in lasts)


def trained(report: Report) -> list[int]:
    """Steps trained per sample in each rollout."""
    option = report.config.option
    if option("strategy", "part") == "part":
        return [len(window) for window in windows_of(report)]
    return [int(option("frozen", "0")) or int((STEPS - 1) * report.config.fraction)] * report.config.rollouts


def rehearse(bench: Bench, ranks: int, per_rollout: int, precision: str, rollouts: int = 2, **options: Any) -> Report:
    """In bf16 with checkpointing, as the launch files have it."""
    report = bench.rehearse(
        "flux", ranks=ranks, precision=precision, updates=rollouts * per_rollout, updates_per_rollout=per_rollout,
        checkpointing=precision == "bf16", options=options,
    )  # fmt: skip
    assert_ok(report)
    assert report.bound.bitwise and report.floor_bitwise and len(report.updates) == rollouts * per_rollout
    return report


@pytest.mark.parametrize(
    ("ranks", "per_rollout", "precision", "options"),
    [
        case(1, 2, wide=False, generations=2, flash=1),
        case(2, 2, wide=False, generations=2, strategy="all"),
        case(1, 4, "bf16", generations=8),
        case(2, 4, generations=8),
        case(2, 2, "bf16", flash=1),
        case(2, 2, step="dance"),
        case(1, 2, step="dance", flash=1, kl=0.01),
        case(1, 1, step="dance", strategy="all", rewards="reward_aggr"),
        case(1, 2, strategy="all", frozen=2, flash=1),
        case(1, 2, step="dpm", same_noise=0),
        case(2, 2, step="dpm", strategy="all", same_noise=0),
        case(1, 2, flash=1, overlap=0, compress=0.4),
        case(2, 2, flash=1, overlap=0, compress=0.4),
        case(2, 1, rewards="reward_aggr", trimmed=0.25, kl=0.1),
        case(1, 2, rewards="advantage_aggr", trimmed=0.25, kl=0.1),
        case(1, 2, rewards="one", group_size=3),
        case(1, 2, group_size=3, overlap=2),
        case(1, 2, same_noise=0, prompts=2, generations=2),
    ],
)
def test_retain_is_bitwise(bench: Bench, ranks: int, per_rollout: int, precision: str, options: dict[str, Any]) -> None:
    rollouts = 1 if options.get("generations") == 2 and "prompts" not in options else 2
    report = rehearse(bench, ranks, per_rollout, precision, rollouts, **options)
    rows, first, turns = report.config.generations, report.config.accumulation, trained(report)
    steps, graphs = sampled(report) * rows, [first * each for each in turns]
    assert report.forwards["native"].no_grad == [steps] * ranks
    assert report.forwards["native"].grad == report.forwards["patched"].grad == [rows * sum(turns)] * ranks
    assert report.forwards["patched"].no_grad == [steps - sum(graphs)] * ranks
    for windows in report.windows:
        assert [(window["replayed"], window["recomputed"]) for window in windows] == [(each, 0) for each in graphs]


@pytest.mark.matrix
@pytest.mark.parametrize(("ranks", "options"), [(1, {"flash": 1}), (2, {"strategy": "all"}), (1, {"step": "dance"})])
def test_recompute_is_bitwise_upstream(bench: Bench, ranks: int, options: dict[str, Any]) -> None:
    report = bench.rehearse("flux", ranks=ranks, updates=2, schedule="recompute", options=options)
    assert_ok(report)
    assert report.bound.bitwise
    assert report.forwards["patched"] == report.forwards["native"]
    assert report.collectives["patched"] == report.collectives["native"]


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("ranks", "buffers", "options"),
    [
        (1, "sample", {"flash": 1}),
        (1, "sample", {"step": "dance", "strategy": "all"}),
        (1, "affine", {"rewards": "reward_aggr"}),
        (1, "affine", {"rewards": "advantage_aggr"}),
        (1, "sample", {"rerange": "balance", "order": "upstream"}),
        (2, "sample", {"flash": 1}),
    ],
)
def test_gradients_in_place_of_graphs(bench: Bench, ranks: int, buffers: str, options: dict[str, Any]) -> None:
    report = bench.rehearse(
        "flux", ranks=ranks, updates=2, updates_per_rollout=2, schedule="reweight", buffers=buffers, options=options
    )  # fmt: skip
    assert_ok(report)
    assert report.bound.rel_l2 == {"sample": 2e-6, "affine": 5e-6}[buffers]
    first = 2 * trained(report)[0]
    assert [(window["replayed"], window["recomputed"]) for (window,) in report.windows] == [(first, 0)] * ranks


@pytest.mark.matrix
def test_late_reductions(bench: Bench) -> None:
    report = bench.rehearse("flux", ranks=2, updates=2, sync="late")
    assert_ok(report)
    assert all(update.grad_rel_l2 <= 1e-6 for update in report.updates)
    # Six units; natively one backward for each of four samples' two steps.
    scattered = [report.collectives[variant]["reduce_scatter"] for variant in ("native", "patched")]
    assert scattered == [2 * 8 * 6, 2 * 6]


@pytest.mark.matrix
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("rerange", ["random", "balance"])
@pytest.mark.parametrize("order", ["held-first", "upstream"])
def test_rows_that_move_after_their_rewards(bench: Bench, ranks: int, rerange: str, order: str) -> None:
    """What the first update trains is replayed as far as it is held; with `upstream` all of it is."""
    report = rehearse(bench, ranks, 2, "fp32", rerange=rerange, order=order)
    rows, first, turns = 4, 2, 2
    for windows in report.windows:
        for window in windows:
            assert window["kept"] == (rows if order == "upstream" else first) * turns
            assert window["replayed"] + window["recomputed"] == first * turns
            if order == "upstream":
                assert window["recomputed"] == 0
    found = [window["replayed"] for windows in report.windows for window in windows]
    if order == "held-first":
        assert min(found) < first * turns  # somewhere a row from behind came first


def test_a_window_that_runs_out_is_refused(bench: Bench) -> None:
    with pytest.raises(KitError) as caught:
        bench.rehearse("flux", updates=2, options={"overlap": 4})
    assert "from step 0 to 4 do not fit before step 4" in caught.value.what
