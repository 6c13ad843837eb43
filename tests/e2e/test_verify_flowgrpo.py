"""FlowGRPO's SD3 scripts, patched against unpatched. FLUX and Wan have files of their own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from support.bench import Bench, assert_ok, bench_of

pytestmark = [pytest.mark.upstream, pytest.mark.slow]
TWO: dict[str, Any] = {"updates": 4, "updates_per_rollout": 2}
wide = pytest.mark.matrix


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    yield from bench_of("flowGRPO", tmp_path_factory.mktemp("bench"), ["sd3", "sd3_fast", "sd3_GRPO_Guard"])


def held(window: dict[str, Any]) -> tuple[int, int, int]:
    return window["kept"], window["replayed"], window["recomputed"]


@pytest.mark.parametrize(
    ("script", "options"),
    [
        ("sd3", {"beta": 0.04, "masked": 1}),
        pytest.param("sd3", {}, marks=wide),
        pytest.param("sd3", {"guidance": 0, "lora": 0}, marks=wide),
        pytest.param("sd3", {"batch": 4, "group": 4}, marks=wide),
        ("sd3_GRPO_Guard", {}),
        pytest.param("sd3_GRPO_Guard", {"beta": 0.004, "masked": 1}, marks=wide),
    ],
)
def test_one_rank(bench: Bench, script: str, options: dict[str, Any]) -> None:
    """Two updates per rollout, samples shuffled: against the same order recomputed."""
    report = bench.rehearse(script, **TWO, options=options)
    assert_ok(report)
    assert all(update.grad_rel_l2 <= 5e-6 for update in report.updates)
    batched = options.get("batch") == 4
    for window in report.windows[0]:
        assert window["kept"] == 12  # 4 of 8 rows, 3 steps each
        assert window["recomputed"] == 0 and (window["replayed"] == 12 or options.get("masked"))
    native, patched = report.forwards["native"], report.forwards["patched"]
    # The first update of each of 2 rollouts makes no forward of its own, where nothing was masked.
    assert patched.no_grad[0] == native.no_grad[0] - 2 * (3 if batched else 6)
    assert patched.grad == native.grad


@wide
@pytest.mark.parametrize("ranks", [1, 2])
def test_gradients_in_place_of_graphs(bench: Bench, ranks: int) -> None:
    """LoRA: one backward of a batched call gives each sample's gradient."""
    report = bench.rehearse("sd3", ranks=ranks, **TWO, schedule="reweight")
    assert_ok(report)
    for update in report.updates:
        assert update.grad_rel_l2 <= 2e-6
    for window in report.windows[0]:
        assert window["kept"] == 12 and window["recomputed"] == 0
        assert window["calls"] < 12 and window["gradients"] == 4


@wide
@pytest.mark.parametrize(("script", "options"), [("sd3", {"beta": 0.04}), ("sd3_GRPO_Guard", {})])
def test_losses_that_are_no_weighted_log_probs(bench: Bench, script: str, options: dict[str, Any]) -> None:
    """A KL term, a weight per step: the first window is recomputed, the others keep graphs."""
    report = bench.rehearse(script, **TWO, schedule="reweight", options=options)
    assert_ok(report)
    first, second = report.windows[0]
    assert (first["replayed"], first["recomputed"]) == (0, 12)
    assert (second["replayed"], second["recomputed"], second["gradients"]) == (12, 0, 0)


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=wide)])
def test_fast_is_bitwise(bench: Bench, ranks: int) -> None:
    """Samples in the order they were drawn in, steps of a random window."""
    report = bench.rehearse("sd3_fast", ranks=ranks, **TWO)
    assert_ok(report)
    assert all(update.grad_bitwise and update.weights_bitwise for update in report.updates)
    assert [held(window) for window in report.windows[0]] == [(12, 12, 0)] * 2


@pytest.mark.parametrize(
    ("script", "options"),
    [
        ("sd3", {"beta": 0.04, "masked": 1}),
        pytest.param("sd3", {}, marks=wide),
        pytest.param("sd3_GRPO_Guard", {"beta": 0.004}, marks=wide),
    ],
)
def test_two_ranks(bench: Bench, script: str, options: dict[str, Any]) -> None:
    """Each rank replays what it has; the gradient is averaged once, and replicas stay equal to the bit."""
    report = bench.rehearse(script, ranks=2, **TWO, options=options)
    assert_ok(report)
    assert all(update.grad_rel_l2 <= 5e-6 for update in report.updates)
    assert {window["flush"] for rank in report.windows for window in rank} == {"flat"}
    assert report.replicas == [True] * 4


@pytest.mark.parametrize(
    ("config", "options"),
    [
        ({"updates": 2, "updates_per_rollout": 1}, {}),
        pytest.param(TWO, {"order": "upstream"}, marks=wide),
        pytest.param(TWO, {"inner_epochs": 2}, marks=wide),
    ],
    ids=["one update", "order=upstream", "inner epochs"],
)
def test_upstreams_own_order(bench: Bench, config: dict[str, Any], options: dict[str, Any]) -> None:
    """Nothing is given to the native runs where one update takes all samples, or the order is left alone."""
    report = bench.rehearse("sd3", **config, options=options)
    assert_ok(report)
    assert "stand-in" not in " ".join(report.notes)
    assert [held(window) for window in report.windows[0]] == [(24, 12 if "order" in options else 24, 0)] * 2


@wide
@pytest.mark.parametrize("ranks", [1, 2])
def test_recompute_is_bitwise_upstream(bench: Bench, ranks: int) -> None:
    report = bench.rehearse("sd3", ranks=ranks, schedule="recompute", **TWO, options={"masked": 1, "beta": 0.04})
    assert_ok(report)
    assert report.bound.bitwise and report.forwards["patched"] == report.forwards["native"]


@wide
def test_ema_and_evaluation(bench: Bench) -> None:
    """Evaluation swaps the averaged weights in and samples through the same pipeline: it keeps nothing."""
    report = bench.rehearse("sd3", ema=True, **TWO)
    assert_ok(report)
    assert [held(window) for window in report.windows[0]] == [(12, 12, 0)] * 2


@wide
def test_a_budget(bench: Bench) -> None:
    graph = bench.rehearse("sd3", **TWO).windows[0][0]["graph_bytes"]
    report = bench.rehearse("sd3", **TWO, budget_gb=f"{3.5 * graph / 1e9:.9f}")
    assert_ok(report)
    window = report.windows[0][1]
    assert held(window) == (7, 7, 5)  # three calls of two rows, and one row of the fourth in a call of its own
    assert window["peak_held_bytes"] <= 3.5 * graph
