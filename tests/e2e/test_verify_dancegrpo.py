"""DanceGRPO's own scripts, patched against unpatched: what the main job promises."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.bench import Bench, assert_ok, bench_of

from leangrpo_tools import recipe
from leangrpo_tools.errors import KitError
from leangrpo_tools.rehearsal import verify
from leangrpo_tools.rehearsal.report import Report
from leangrpo_tools.rehearsal.runs import Injection

pytestmark = [pytest.mark.upstream, pytest.mark.slow]
wide = pytest.mark.matrix
FAULTS = Path(__file__).with_name("rehearsal_faults.py")
GRAPH = 143568
"""Bytes of one kept graph of the tiny FLUX, fp32 without checkpointing; the budget tests only need its order."""


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    yield from bench_of("DanceGRPO", tmp_path_factory.mktemp("bench"))


def fault(name: str, *variants: str, rank: int = 1, **args: Any) -> Injection:
    return Injection(f"{FAULTS}:{name}", (rank,), variants or ("patched", "control"), args)


ALL = ("native", "native-again", "patched", "control")


@pytest.mark.parametrize(
    ("precision", "checkpointing", "ema", "per_rollout"),
    [
        ("bf16", True, True, 2),
        ("fp32", False, True, 1),
        pytest.param("bf16", False, False, 1, marks=wide),
        pytest.param("fp32", True, False, 2, marks=wide),
    ],
)
def test_flux_on_one_rank_is_bitwise(
    bench: Bench, precision: str, checkpointing: bool, ema: bool, per_rollout: int
) -> None:
    report = bench.rehearse(
        "flux", precision=precision, checkpointing=checkpointing, ema=ema, updates=4, updates_per_rollout=per_rollout
    )
    assert_ok(report)
    assert report.bound.bitwise and report.floor_bitwise and len(report.updates) == 4
    rollouts = report.config.rollouts
    assert (report.forwards["native"].no_grad, report.forwards["native"].grad) == ([24 * rollouts], [12 * rollouts])
    kept = 12 // per_rollout
    assert report.forwards["patched"].no_grad == [(24 - kept) * rollouts]
    assert report.forwards["patched"].grad == [12 * rollouts]
    assert [window["kept"] for window in report.windows[0]] == [kept] * rollouts


@pytest.mark.parametrize(
    ("script", "ranks", "buffers", "precision", "per_rollout"),
    [
        ("flux", 1, "affine", "fp32", 2),
        pytest.param("flux", 1, "sample", "fp32", 1, marks=wide),
        pytest.param("flux", 2, "sample", "fp32", 2, marks=wide),
        pytest.param("flux", 2, "affine", "fp32", 1, marks=wide),
        pytest.param("flux", 2, "affine", "bf16", 1, marks=wide),
        pytest.param("flux_lora", 1, "affine", "fp32", 2, marks=wide),
        pytest.param("flux_lora", 2, "sample", "fp32", 2, marks=wide),
    ],
)
def test_gradients_in_place_of_graphs(
    bench: Bench, script: str, ranks: int, buffers: str, precision: str, per_rollout: int
) -> None:
    """Two gradients per group, or one per sample; nothing is recomputed; under FSDP1 reduced once per update."""
    report = bench.rehearse(
        script, ranks=ranks, precision=precision, updates=2, updates_per_rollout=per_rollout, schedule="reweight",
        buffers=buffers,
    )  # fmt: skip
    assert_ok(report)
    if precision == "fp32":
        assert report.bound.rel_l2 == {"sample": 2e-6, "affine": 5e-6}[buffers]
    for rank in report.windows:
        for window in rank:
            samples = 4 // per_rollout
            assert (window["kept"], window["replayed"], window["recomputed"]) == (3 * samples, 3 * samples, 0)
            assert window["gradients"] == (samples if buffers == "sample" else min(samples, 3))


@wide
def test_sums_spread_over_the_ranks(bench: Bench) -> None:
    """Shared prompts under FSDP1: of the one gradient and two sums of it each of two ranks has half of the sums."""
    options = {"layout": "shared", "generations": "6"}
    report = bench.rehearse("flux", ranks=2, updates=2, schedule="reweight", buffers="affine", options=options)
    assert_ok(report)
    for rank in report.windows:
        assert all((w["recomputed"], w["gradients"]) == (0, 2) for w in rank if w["kept"])


@wide
def test_wan_in_fp32_learns_which_step_has_other_inputs(bench: Bench) -> None:
    """Its first latent is bf16 in the rollout and fp32 in the update: in fp32 that step is trained natively."""
    report = bench.rehearse("wan_2_1", updates=2, schedule="reweight")
    assert_ok(report)
    first, second = report.windows[0]
    assert first["replayed"] < first["kept"] == 12
    other = sum(steps for reason, steps in second["reasons"].items() if "had other inputs" in reason)
    assert other > 0 and second["replayed"] == second["kept"] == 12 - other


@pytest.mark.parametrize(("precision", "per_rollout"), [("fp32", 1), ("bf16", 2)])
def test_flux_on_two_ranks_is_bitwise(bench: Bench, precision: str, per_rollout: int) -> None:
    report = bench.rehearse("flux", ranks=2, precision=precision, updates=2, updates_per_rollout=per_rollout)
    assert_ok(report)
    assert report.bound.bitwise
    # Six units; one backward for each of the twelve steps, in one update or in two.
    assert reductions(report) == (2 // per_rollout * 72, 2 // per_rollout * 72)


def reductions(report: Report) -> tuple[int, int]:
    """Reduce-scatters of the native and of the patched run."""
    return report.collectives["native"]["reduce_scatter"], report.collectives["patched"]["reduce_scatter"]


def test_flux_on_two_ranks_with_late_reductions(bench: Bench) -> None:
    report = bench.rehearse("flux", ranks=2, sync="late", updates=2)
    assert_ok(report)
    assert not report.bound.bitwise and all(update.grad_rel_l2 <= 1e-6 for update in report.updates)
    assert reductions(report) == (2 * 72, 2 * 6) and not report.replicas


@pytest.mark.parametrize("graphs", [0, pytest.param(1, marks=wide), 6])
def test_flux_on_two_ranks_keeps_what_the_budget_allows(bench: Bench, graphs: int) -> None:
    report = bench.rehearse("flux", ranks=2, updates=2, budget_gb=f"{(graphs + 0.5 * bool(graphs)) * GRAPH / 1e9:.9f}")
    assert_ok(report)
    first, second = zip(*report.windows, strict=True)
    assert len({window["replayed"] for window in first}) == 1  # the size of a graph is being learnt, yet ranks agree
    assert [(window["kept"], window["replayed"]) for window in second] == [(graphs, graphs)] * 2


@pytest.mark.parametrize(
    ("precision", "checkpointing", "per_rollout"), [("fp32", False, 1), pytest.param("bf16", True, 2, marks=wide)]
)
def test_flux_lora_on_one_rank_is_bitwise(bench: Bench, precision: str, checkpointing: bool, per_rollout: int) -> None:
    report = bench.rehearse(
        "flux_lora", precision=precision, checkpointing=checkpointing, updates=2, updates_per_rollout=per_rollout
    )
    assert_ok(report)
    assert report.bound.bitwise and report.floor_bitwise
    assert report.forwards["native"].grad == report.forwards["patched"].grad == [12 * report.config.rollouts]
    kept = 12 // per_rollout
    assert [window["kept"] for window in report.windows[0]] == [kept] * report.config.rollouts


@pytest.mark.parametrize(
    ("precision", "checkpointing", "per_rollout", "sync"),
    [
        ("fp32", False, 1, "upstream"),
        pytest.param("bf16", True, 2, "upstream", marks=pytest.mark.matrix),
        ("fp32", False, 1, "late"),
    ],
)
def test_flux_lora_on_two_ranks(bench: Bench, precision: str, checkpointing: bool, per_rollout: int, sync: str) -> None:
    """Each adapter layer is a unit of FSDP1 of its own, the frozen rest of a block another one."""
    report = bench.rehearse(
        "flux_lora", ranks=2, precision=precision, checkpointing=checkpointing, updates=2,
        updates_per_rollout=per_rollout, sync=sync,
    )  # fmt: skip
    assert_ok(report)
    assert report.bound.bitwise == (sync == "upstream")
    assert all(update.grad_rel_l2 <= 1e-6 for update in report.updates)
    assert {window["replayed"] for windows in report.windows for window in windows} == {12 // per_rollout}
    # Adapters alone are reduced: 34 units in twelve backwards, or, if late, in one.
    native = report.config.rollouts * 12 * 34
    assert reductions(report) == (native, native // 12 if sync == "late" else native)


def test_both_halves_of_each_adapter_are_compared(bench: Bench) -> None:
    """B is zero in a fresh adapter, and A's gradient with it; the rehearsal must not start like that."""
    report = bench.rehearse("flux_lora", fault("skewed_adapters", rank=0), updates=1)
    assert report.exit_code == 1 and report.control_caught
    assert "update 0" in report.problems[0] and "lora_A" in report.problems[0]


@pytest.mark.parametrize(
    ("precision", "ranks"),
    [("fp32", 1), ("bf16", 2), pytest.param("fp32", 2, marks=wide), pytest.param("bf16", 1, marks=wide)],
)
def test_wan_is_bitwise_on_every_rank(bench: Bench, precision: str, ranks: int) -> None:
    report = bench.rehearse("wan_2_1", ranks=ranks, precision=precision, updates=2, checkpointing=ranks == 1)
    assert_ok(report)
    assert report.bound.bitwise
    assert report.forwards["native"].no_grad == [48] * ranks
    assert report.forwards["patched"].no_grad == [24] * ranks
    assert report.collectives["patched"].get("reduce_scatter", 0) == 0


def test_qwenimage_in_low_precision_on_two_ranks(bench: Bench) -> None:
    """The other scripts are in tests/matrix/test_dancegrpo_scripts.py."""
    report = bench.rehearse("qwenimage", ranks=2, precision="bf16", updates=1)
    assert_ok(report)
    assert report.bound.bitwise and report.forwards["patched"].no_grad == [12, 12]
    assert [(windows[0]["replayed"], windows[0]["flush"]) for windows in report.windows] == [(12, "armed")] * 2


@pytest.mark.parametrize("schedule", ["retain", "recompute"])
def test_wan_on_two_ranks_with_late_reductions(bench: Bench, schedule: str) -> None:
    """The native runs average by a stand-in; replicas stay equal, which upstream's do not."""
    report = bench.rehearse("wan_2_1", ranks=2, sync="late", schedule=schedule, updates=2)
    assert_ok(report)
    assert not report.bound.bitwise and report.replicas == [True, True]
    assert "by a stand-in" in report.render() and "sync late" in report.render()


@pytest.mark.parametrize(("script", "ranks"), [pytest.param("flux", 1, marks=wide), ("flux", 2), ("wan_2_1", 2)])
def test_recompute_is_bitwise_upstream(bench: Bench, script: str, ranks: int) -> None:
    report = bench.rehearse(script, ranks=ranks, updates=2, schedule="recompute")
    assert_ok(report)
    assert report.bound.bitwise
    assert report.forwards["patched"] == report.forwards["native"]
    assert report.collectives["patched"] == report.collectives["native"]
    assert report.peak_held_bytes == 0


@pytest.mark.parametrize("call", [pytest.param(2, marks=wide), 7])
def test_other_inputs_on_one_rank_are_recomputed_on_both(bench: Bench, call: int) -> None:
    report = bench.rehearse("flux", fault("other_inputs", *ALL, call=call), ranks=2, updates=1)
    assert_ok(report)
    assert [(windows[0]["replayed"], windows[0]["recomputed"]) for windows in report.windows] == [(11, 1)] * 2


def test_a_lower_budget_on_one_rank_is_agreed_on(bench: Bench) -> None:
    report = bench.rehearse("flux", fault("lower_budget", bytes=3.5 * GRAPH), ranks=2, updates=2)
    assert_ok(report)
    replayed = [[window["replayed"] for window in windows] for windows in report.windows]
    assert replayed[0] == replayed[1] and max(replayed[0]) <= 3


def test_a_rank_whose_advantages_are_all_zero(bench: Bench) -> None:
    report = bench.rehearse("flux", fault("advantages", *ALL, value=0.0), ranks=2, updates=1)
    assert_ok(report)


def test_nan_on_one_rank_is_a_failure_and_no_hang(bench: Bench) -> None:
    report = bench.rehearse("flux", fault("advantages"), ranks=2, updates=1)
    assert report.exit_code == 1
    assert report.failures or not report.updates[0].finite


def test_a_small_error_is_found_and_named(bench: Bench) -> None:
    report = bench.rehearse("flux", fault("skewed_gradient", rank=0), updates=1, precision="fp32")
    assert report.exit_code == 1 and report.control_caught
    assert "update 0" in report.problems[0] and "worst: gradient of" in report.problems[0]


def test_a_hanging_rank_is_ended_and_named(bench: Bench) -> None:
    report = bench.rehearse("flux", fault("sleep"), ranks=2, updates=1, timeout_s=6)
    assert report.exit_code == 1
    assert "rank 1 hung" in report.failures[0] and "in asleep" in report.failures[0]


def test_a_script_that_does_not_start_is_no_mismatch(bench: Bench) -> None:
    with pytest.raises(KitError) as caught:
        bench.rehearse("flux", fault("missing_module", *ALL, rank=0), updates=1)
    assert caught.value.code == "LG401" and caught.value.exit_code == 3
    assert "accelerate" in caught.value.what


def test_a_script_without_a_rehearsal_says_why(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    load = recipe.load

    def without(upstream: str) -> recipe.Recipe:
        found = load(upstream)
        flux = dataclasses.replace(found.scripts["flux"], rehearsal="", not_rehearsed="it needs a kernel")
        return dataclasses.replace(found, scripts=found.scripts | {"flux": flux})

    monkeypatch.setattr(recipe, "load", without)
    with pytest.raises(KitError) as caught:
        verify("dancegrpo", script="flux", tree=bench.root, updates=1, session=bench.session)
    assert caught.value.code == "LG401" and caught.value.exit_code == 3 and caught.value.cause == "it needs a kernel"


def test_verify_of_a_patched_tree_leaves_it_alone(bench: Bench) -> None:
    def listing() -> dict[str, int]:
        files = (file for file in bench.root.rglob("*") if file.is_file() and ".git" not in file.parts)
        return {str(file): file.stat().st_mtime_ns for file in files}

    before = listing()
    report = verify("dancegrpo", script="wan_2_1", tree=bench.root, updates=1, session=bench.session)
    assert_ok(report)
    plain = report.to_json()
    assert plain["ok"] and plain["control_caught"] and plain["updates"][0]["grad_rel_l2"] == 0.0
    assert listing() == before
