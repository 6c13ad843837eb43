"""FlowGRPO's Wan script, patched against unpatched; and ranks of its SD3 scripts that have nothing to learn from."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.bench import Bench, bench_of

from leangrpo_tools.errors import KitError
from leangrpo_tools.rehearsal.report import Report
from leangrpo_tools.rehearsal.runs import Injection

pytestmark = [pytest.mark.upstream, pytest.mark.slow]
FAULTS = Path(__file__).with_name("rehearsal_faults.py")
NATIVE, PATCHED = ("native", "native-again"), ("patched", "control")
TOLERANCE = 5e-5
SAMPLES, TRAINED = 8, 3
"""Samples of a rollout on a rank, in batches of two, and the steps that are trained of four."""


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    yield from bench_of("flowGRPO", tmp_path_factory.mktemp("bench"), ["wan2_1"])


def rehearse(bench: Bench, *inject: Injection, script: str = "wan2_1", **config: Any) -> Report:
    return bench.rehearse(script, *inject, timeout_s=120, **config)


def fault(name: str, *variants: str, **args: Any) -> Injection:
    return Injection(f"{FAULTS}:{name}", None, variants, args)


def assert_ok(report: Report, bitwise: bool = False) -> None:
    assert report.ok, report.render()
    assert len(report.updates) == report.config.updates and report.floor_bitwise
    assert all(update.grad_rel_l2 <= TOLERANCE for update in report.updates)
    assert report.config.ranks == 1 or report.replicas == [True] * report.config.updates
    assert not bitwise or all(update.grad_bitwise and update.weights_bitwise for update in report.updates)


def assert_first_update_is_free(report: Report, sites: int = 2) -> None:
    """Every forward with grad of the first update is one that the rollout made without: nothing else has changed.

    Rollout, reference and evaluation make equally many as natively, and evaluation keeps none.
    """
    config = report.config
    kept = SAMPLES // config.updates_per_rollout * TRAINED * sites
    calls = kept // 2
    for rank, windows in enumerate(report.windows):
        figures = [(w["selected"], w["kept"], w["calls"], w["replayed"], w["recomputed"]) for w in windows]
        assert figures == [(kept, kept, calls, kept, 0)] * config.rollouts
        native, patched = report.forwards["native"], report.forwards["patched"]
        assert patched.grad[rank] == native.grad[rank] == config.rollouts * config.updates_per_rollout * calls
        assert native.no_grad[rank] - patched.no_grad[rank] == config.rollouts * calls


def test_several_videos_per_prompt_and_a_reference(bench: Bench) -> None:
    """Guidance in two calls, evaluation in between, two updates per rollout."""
    report = rehearse(bench, updates=2, updates_per_rollout=2, options={"repeat": 2, "beta": 0.004})
    assert_ok(report)
    assert_first_update_is_free(report)
    assert report.updates[1].grad_bitwise and not report.bound.bitwise
    assert "gradient checkpointing on" in " ".join(report.tested)


@pytest.mark.matrix
@pytest.mark.parametrize(
    "options", [{"guidance": 0, "repeat": 2}, {"guidance": 0, "beta": 0.004}, {"batch": 1, "group": 1}]
)
def test_the_reference_in_the_rollout_stays_native(bench: Bench, options: dict[str, Any]) -> None:
    """A KL reward evaluates the network without its adapter after each step."""
    plain, rewarded = (
        rehearse(bench, updates=2, updates_per_rollout=2, options=options | {"kl_reward": weight})
        for weight in (0, 0.1)
    )
    for report in (plain, rewarded):
        assert_ok(report)
    (native, patched), (more_native, more_patched) = (
        [report.forwards[name].no_grad[0] for name in ("native", "patched")] for report in (plain, rewarded)
    )
    # A call for each batch and step, guidance or not.
    assert more_native - native == more_patched - patched == SAMPLES // int(options.get("batch", 2)) * 4
    assert [w["recomputed"] for w in rewarded.windows[0]] == [0]


@pytest.mark.matrix
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    ("config", "options"),
    [
        ({"updates_per_rollout": 1}, {}),
        ({"updates_per_rollout": 2, "ema": True}, {"repeat": 2}),
        ({"updates_per_rollout": 2}, {"beta": 0.004, "evaluate": 0}),
        ({"updates_per_rollout": 2}, {"guidance": 0}),
    ],
)
def test_wan(bench: Bench, ranks: int, config: dict[str, Any], options: dict[str, Any]) -> None:
    report = rehearse(bench, ranks=ranks, updates=4, options=options, **config)
    assert_ok(report)
    assert_first_update_is_free(report, sites=1 if options.get("guidance") == 0 else 2)


@pytest.mark.matrix
@pytest.mark.parametrize("ranks", [1, 2])
def test_in_upstreams_own_order_some_samples_are_replayed(bench: Bench, ranks: int) -> None:
    report = rehearse(bench, ranks=ranks, updates=4, updates_per_rollout=2, options={"order": "upstream"})
    assert_ok(report)
    held = SAMPLES // 2 * TRAINED * 2
    for window in [window for windows in report.windows for window in windows]:
        assert window["kept"] == 2 * held and window["replayed"] == held and window["recomputed"] == 0


@pytest.mark.matrix
@pytest.mark.parametrize("ranks", [1, 2])
def test_prompts_without_an_advantage_are_left_out(bench: Bench, ranks: int) -> None:
    report = rehearse(bench, ranks=ranks, updates=4, updates_per_rollout=2, options={"masked": 1, "beta": 0.004})
    assert_ok(report)
    windows = [window for windows in report.windows for window in windows]
    assert all(0 < window["replayed"] <= SAMPLES // 2 * TRAINED * 2 for window in windows)
    assert any(window["replayed"] < window["kept"] for window in windows)


@pytest.mark.matrix
@pytest.mark.parametrize("guidance", [0, 1])
def test_only_new_batches_make_a_difference(bench: Bench, guidance: int) -> None:
    """Where the update trains the rollout's own batches in their order, every bit of the gradient is upstream's."""
    report = rehearse(bench, fault("unshuffled", *NATIVE, *PATCHED), updates=2, options={"guidance": guidance})
    assert_ok(report, bitwise=True)
    assert_first_update_is_free(report, sites=1 + guidance)


@pytest.mark.matrix
def test_recompute_is_bitwise_upstream(bench: Bench) -> None:
    report = rehearse(bench, updates=4, updates_per_rollout=2, schedule="recompute", options={"beta": 0.004})
    assert_ok(report, bitwise=True)
    assert report.bound.bitwise and report.forwards["patched"] == report.forwards["native"]


@pytest.mark.matrix
@pytest.mark.parametrize("inputs", ["exact", "rounded"])
def test_bf16_replays_where_rounding_is_allowed(bench: Bench, inputs: str) -> None:
    """The update hands over prompt embeddings of another dtype than the rollout, with equal values."""
    report = rehearse(bench, updates=2, updates_per_rollout=2, precision="bf16", options={"inputs": inputs})
    (window,) = report.windows[0]
    if inputs == "rounded":
        assert report.ok and (window["replayed"], window["recomputed"]) == (24, 0), report.render()
        return
    assert_ok(report, bitwise=True)
    (reason,) = window["reasons"]
    assert (window["replayed"], window["recomputed"]) == (0, 24) and "encoder_hidden_states" in reason


@pytest.mark.matrix
def test_a_budget_holds_for_both_calls_of_a_step(bench: Bench) -> None:
    free = rehearse(bench, updates=2)
    one = free.windows[0][-1]["peak_held_bytes"] / free.windows[0][-1]["kept"]
    report = rehearse(bench, updates=2, budget_gb=f"{21 * one / 1e9:.9f}")
    assert_ok(report)
    window = report.windows[0][-1]
    assert window["kept"] == window["replayed"] == 20 and window["recomputed"] == 28
    assert window["peak_held_bytes"] <= 21 * one


@pytest.mark.matrix
@pytest.mark.parametrize("script", ["wan2_1", "sd3_fast"])
@pytest.mark.parametrize("beta", [0, 0.004])
def test_a_rank_without_advantages_trains_all_the_same(bench: Bench, script: str, beta: float) -> None:
    """These scripts give such a rank something to do: advantages of 1e-6, or some samples with zeros."""
    report = rehearse(
        bench, fault("without_advantages", *NATIVE, *PATCHED, rank=1), script=script, ranks=2, updates=4,
        updates_per_rollout=2, options={"beta": beta},
    )  # fmt: skip
    assert_ok(report)
    assert all(window["replayed"] for windows in report.windows for window in windows)


@pytest.mark.matrix
@pytest.mark.parametrize("script", ["sd3", "sd3_GRPO_Guard"])
def test_a_rank_without_advantages_fails_as_upstreams(bench: Bench, script: str) -> None:
    """Upstream cannot put no samples into batches. The patch neither hides that nor makes the other rank wait."""
    with pytest.raises(KitError) as native:
        rehearse(
            bench,
            fault("without_advantages", *NATIVE, rank=1),
            script=script,
            ranks=2,
            updates=2,
            updates_per_rollout=2,
        )
    report = rehearse(
        bench, fault("without_advantages", *PATCHED, rank=1), script=script, ranks=2, updates=2, updates_per_rollout=2
    )
    assert native.value.code == "LG401" and report.exit_code == 1 and not report.updates
    (patched,) = [text for text in report.failures if "the patched script ended badly" in text]
    theirs, ours = (re.search(r"rank 1: (.*?)(;|$)", text) for text in (native.value.what, patched))
    assert theirs and ours and theirs[1] == ours[1]
    assert ours[1].startswith("RuntimeError: cannot reshape tensor of 0 elements")
    assert "rank 0: LeanError: LG611: rank 1 did not come here" in patched and "hung" not in patched
