"""DanceGRPO's scripts beyond FLUX and Wan, patched against unpatched, by ranks, precision and settings."""

from collections.abc import Iterator
from typing import Any

import pytest
from support.bench import Bench, assert_ok, bench_of

pytestmark = [pytest.mark.matrix, pytest.mark.upstream, pytest.mark.slow]
FORWARDS = {"hunyuan": (36, 12), "sd": (48, 24)}
"""Rows evaluated per rank and rollout natively, without grad and with, in an epoch; 24 and 12 in the other scripts."""
TWO: dict[str, Any] = {"updates_per_rollout": 2}
CASES: list[tuple[str, int, str, dict[str, Any], float]] = [
    *(("qwenimage", ranks, precision, TWO, 0.0) for ranks in (1, 2) for precision in ("fp32", "bf16")),
    ("qwenimage", 2, "bf16", {"ema": True}, 0.0),
    ("qwenimage", 2, "fp32", {"sync": "late"}, 1e-6),
    ("qwenimage", 2, "fp32", {"options": {"layout": "shared"}}, 1e-6),
    *(("qwenimage_edit", ranks, precision, {}, 0.0) for ranks in (1, 2) for precision in ("fp32", "bf16")),
    *(("skyreels_i2v", ranks, precision, {}, 0.0) for ranks in (1, 2) for precision in ("fp32", "bf16")),
    ("skyreels_i2v", 2, "bf16", {"checkpointing": True}, 0.0),
    ("skyreels_i2v", 1, "fp32", {"options": {"guidance": "1.0"}}, 0.0),
    *(
        ("hunyuan", ranks, precision, TWO | {"options": {"order": "upstream"}}, 0.0)
        for ranks in (1, 2)
        for precision in ("fp32", "bf16")
    ),
    ("hunyuan", 2, "bf16", {"checkpointing": True, "options": {"order": "upstream"}}, 0.0),
    ("sd", 1, "fp32", TWO, 1e-5),
    ("sd", 2, "fp32", TWO, 1e-5),
    *(("sd", 1, precision, {"options": {"batch": "1"}}, 0.0) for precision in ("fp32", "bf16")),
    ("sd", 1, "fp32", TWO | {"options": {"inner_epochs": "2"}}, 1e-5),
]


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    yield from bench_of("DanceGRPO", tmp_path_factory.mktemp("bench"))


@pytest.mark.parametrize(("script", "ranks", "precision", "chosen", "bound"), CASES)
def test_every_step_of_the_first_update_is_replayed(
    bench: Bench, script: str, ranks: int, precision: str, chosen: dict[str, Any], bound: float
) -> None:
    updates = chosen.get("updates_per_rollout", 1)
    report = bench.rehearse(script, ranks=ranks, precision=precision, updates=2, timeout_s=240, **chosen)
    assert_ok(report)
    assert report.bound.bitwise == (bound == 0) and all(update.grad_rel_l2 <= bound for update in report.updates)
    assert report.floor_bitwise and report.control_caught
    rows = int(report.config.option("batch", "2")) if script == "sd" else 1
    no_grad, grad = (count // rows for count in FORWARDS.get(script, (24, 12)))
    rollouts = report.config.rollouts
    assert report.forwards["native"].no_grad == [no_grad * rollouts] * ranks
    epochs = int(chosen.get("options", {}).get("inner_epochs", "1"))
    assert report.forwards["native"].grad == [grad * epochs * rollouts] * ranks
    parts = updates // epochs
    for window in (window for rank in report.windows for window in rank):
        if report.config.option("layout", "native") == "native":
            assert (window["replayed"], window["recomputed"]) == (grad * rows // parts, 0)


@pytest.mark.parametrize("script", ["qwenimage", "qwenimage_edit", "skyreels_i2v", "hunyuan", "sd"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_recompute_is_bitwise_upstream(bench: Bench, script: str, ranks: int) -> None:
    report = bench.rehearse(script, ranks=ranks, updates=2, schedule="recompute", timeout_s=240)
    assert_ok(report)
    assert report.bound.bitwise and report.forwards["patched"] == report.forwards["native"]
    assert report.collectives["patched"] == report.collectives["native"]


@pytest.mark.parametrize(("script", "options"), [("hunyuan", {}), ("sd", {"train_cfg": "0"})])
def test_nothing_is_replayed_where_nothing_can_be(bench: Bench, script: str, options: dict[str, str]) -> None:
    report = bench.rehearse(script, ranks=2, updates=2, options=options, timeout_s=240)
    assert_ok(report)
    assert report.nothing_to_replay
    assert all(window["replayed"] == 0 for rank in report.windows for window in rank)


def test_hunyuan_trains_all_samples_where_none_is_chosen(bench: Bench) -> None:
    report = bench.rehearse("hunyuan", ranks=2, updates=2, options={"drawn": "4"}, timeout_s=240)
    assert_ok(report)
    assert report.bound.bitwise
    assert {window["replayed"] for rank in report.windows for window in rank} == {12}
