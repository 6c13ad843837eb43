"""FlowGRPO's Qwen-Image scripts, patched against unpatched. The wide combinations run with the matrix."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from support.bench import Bench, assert_first_update_is_replayed, assert_ok, bench_of

from leangrpo_tools.rehearsal.rehearse import find_script

pytestmark = [pytest.mark.upstream, pytest.mark.slow]
SCRIPTS = ("qwenimage", "qwenimage_edit")
SMALL: dict[str, Any] = {"generations": 4, "steps": 3, "fraction": 0.7, "updates": 2, "updates_per_rollout": 2}
TWO: dict[str, Any] = {"updates": 4, "updates_per_rollout": 2}
wide = pytest.mark.matrix


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    yield from bench_of("flowGRPO", tmp_path_factory.mktemp("bench"), list(SCRIPTS))


def assert_bitwise(report: Any) -> None:
    assert_ok(report)
    assert report.floor_bitwise and report.bound.bitwise
    assert all(update.grad_bitwise and update.weights_bitwise for update in report.updates)


def test_qwenimage(bench: Bench) -> None:
    report = bench.rehearse("qwenimage", **SMALL)
    assert_bitwise(report)
    assert_first_update_is_replayed(report)


@wide
@pytest.mark.parametrize("script", SCRIPTS)
def test_two_ranks_as_upstream_runs_them(bench: Bench, script: str) -> None:
    """bf16 weights and reductions, checkpointing. For Edit each rank trains the steps of a window of its own."""
    report = bench.rehearse(script, ranks=2, precision="bf16", checkpointing=True, **TWO)
    assert_bitwise(report)
    assert_first_update_is_replayed(report)


@wide
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize(
    "config",
    [
        TWO,
        {"updates": 2, "updates_per_rollout": 1},
        TWO | {"options": {"beta": 0.04, "masked": 1}},
        TWO | {"options": {"window": 0}, "precision": "bf16"},
        TWO | {"options": {"lora": 0, "batch": 4, "group": 4}, "precision": "bf16", "checkpointing": True},
        TWO | {"options": {"inner_epochs": 2}},
    ],
    ids=["two updates", "one update", "reference", "no window", "full weights", "inner epochs"],
)
def test_combinations(bench: Bench, script: str, config: dict[str, Any], ranks: int) -> None:
    report = bench.rehearse(script, ranks=ranks, **config)
    assert_bitwise(report)
    if "inner_epochs" in dict(report.config.options):  # its first update takes the whole rollout
        return
    assert_first_update_is_replayed(report)


@wide
def test_the_optimizer_s_state_off_the_device(bench: Bench) -> None:
    """Hooks of upstream's own on the optimizer's step."""
    report = bench.rehearse("qwenimage", options={"offload": 1}, **TWO)
    assert_bitwise(report)
    assert_first_update_is_replayed(report)


@wide
@pytest.mark.parametrize("script", SCRIPTS)
def test_recompute_is_bitwise_upstream(bench: Bench, script: str) -> None:
    report = bench.rehearse(script, ranks=2, schedule="recompute", **TWO)
    assert_bitwise(report)
    assert report.forwards["patched"] == report.forwards["native"]


@wide
def test_late(bench: Bench) -> None:
    """All graphs of an update in one backward."""
    report = bench.rehearse("qwenimage", ranks=2, sync="late", **TWO)
    assert_ok(report)
    assert all(update.grad_rel_l2 <= 1e-6 for update in report.updates)
    assert_first_update_is_replayed(report)


@wide
@pytest.mark.parametrize("ranks", [1, 2])
def test_reweight_keeps_graphs(bench: Bench, ranks: int) -> None:
    """Gradients per sample of one call are not had through FSDP: as with retain from the first window on."""
    report = bench.rehearse("qwenimage", ranks=ranks, schedule="reweight", **TWO)
    assert_bitwise_updates(report)
    assert_first_update_is_replayed(report)
    assert [window["gradients"] for window in report.windows[0]] == [0, 0]


def assert_bitwise_updates(report: Any) -> None:
    """Where the bound itself is wider."""
    assert_ok(report)
    assert all(update.grad_bitwise for update in report.updates)


@wide
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_budget_within_a_batch(bench: Bench, ranks: int) -> None:
    """Under FSDP whole calls are held, on one rank as well."""
    graph = bench.rehearse("qwenimage", ranks=ranks, **TWO).windows[0][0]["graph_bytes"]
    report = bench.rehearse("qwenimage", ranks=ranks, budget_gb=f"{3.5 * graph / 1e9:.9f}", **TWO)
    assert_ok(report)
    window = report.windows[0][1]
    assert (window["kept"], window["replayed"], window["recomputed"]) == (6, 6, 6)
    assert window["peak_held_bytes"] <= 3.5 * graph


def test_what_upstream_s_scripts_cannot_do() -> None:
    for script, wanted, words in (
        ("qwenimage", {"ema": True}, "no EMA"),
        ("qwenimage", {"options": (("inner_epochs", "2"),)}, "must end with an update"),
        ("qwenimage_edit", {"options": (("offload", "1"),)}, "loses its optimizer"),
    ):
        rehearsal = find_script(f"flowgrpo_{script}")
        assert words in (rehearsal.supports(rehearsal.configure(**wanted)) or "")
