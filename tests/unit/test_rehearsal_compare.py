"""The comparison and the verdict: what must never pass as a match."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from leangrpo_rehearsal.base import Bound, Config
from leangrpo_rehearsal.compare import Run, compare, compare_update, replicas
from leangrpo_rehearsal.scripts import dancegrpo_flux, dancegrpo_wan_2_1
from leangrpo_tools.rehearsal.render import render
from leangrpo_tools.rehearsal.report import NOT_TESTED, Counts, Report
from leangrpo_tools.rehearsal.verdict import Verdict

BITWISE, CLOSE = Bound(True, 0.0), Bound(False, 1e-6)
Edit = Callable[[dict[str, Any]], None]


def record(seed: int, edit: Edit | None = None) -> dict[str, Any]:
    """What one rank recorded of one update."""
    generator = torch.Generator().manual_seed(seed)
    grads = {name: torch.randn(6, generator=generator) for name in ("block.weight", "block.bias")}
    weights = {name: torch.randn(6, generator=generator) for name in grads}
    made = {"grads": grads, "weights": weights, "notes": {"rewards": [torch.tensor(0.5)]}, "seconds": 0.1}
    if edit is not None:
        edit(made)
    return made


def run(updates: int = 2, ranks: int = 2, edit: Edit | None = None, at: tuple[int, int] = (1, 1)) -> Run:
    """A run whose record of update `at[0]` on rank `at[1]` is edited."""
    rows = [
        [record(10 * update + rank, edit if (update, rank) == at else None) for rank in range(ranks)]
        for update in range(updates)
    ]
    summary = {"seconds": 1.0, "collectives": {"all_reduce": 2}, "grad": 12, "no_grad": 24, "peak_rss_bytes": 10}
    return Run(rows, [summary] * ranks)


def flip(made: dict[str, Any]) -> None:
    made["grads"]["block.weight"] = -made["grads"]["block.weight"]


REPLAYED: list[list[dict[str, Any]]] = [[{"replayed": 12, "reasons": {}}]] * 2


def report(
    edit: Edit | None = None, *, control: Edit | None = flip, bound: Bound = BITWISE, config: Config | None = None,
    windows: list[list[dict[str, Any]]] = REPLAYED, gradients: float = 0, **extra: Any,
) -> Report:  # fmt: skip
    native, patched = run(), run(edit=edit)
    return Report(
        upstream="toy", script="toy", config=config or Config(ranks=2, updates=2), bound=bound,
        updates=compare(native, patched), floor=compare(native, run()),
        control=compare(native, run(updates=1, edit=control, at=(0, 0))),
        forwards={"native": Counts([12, 12], [24, 24]), "patched": Counts([12, 12], [12, 12])},
        collectives={"native": {"all_reduce": 2}, "patched": {"all_reduce": 2}},
        seconds={"native": 1.0, "patched": 0.8}, peak_held_bytes=100,
        gradients=gradients, gradient_bytes=2_000_000, peak_rss_bytes={"native": 1, "patched": 2}, windows=windows,
        not_tested=list(NOT_TESTED), **extra,
    )  # fmt: skip


def edit_grad(name: str, value: Any) -> Edit:
    def edit(made: dict[str, Any]) -> None:
        grad = made["grads"][name]
        made["grads"][name] = value(grad) if callable(value) else value

    return edit


def test_equal_runs_match() -> None:
    good = report()
    assert good.ok and good.exit_code == 0 and good.control_caught and good.floor_bitwise
    assert all(update.grad_bitwise and update.weights_bitwise and update.worst is None for update in good.updates)


@pytest.mark.parametrize(
    ("windows", "reason"),
    [
        ([[], []], "never opened a window"),
        ([[{"replayed": 0, "reasons": {"dropout 0.1 is active": 12}}]] * 2, "dropout 0.1 is active"),
    ],
)
def test_equal_and_nothing_replayed_is_a_verdict_of_its_own(windows: list[list[dict[str, Any]]], reason: str) -> None:
    found = report(windows=windows)
    (warned,) = found.warnings
    assert found.verdict is Verdict.WARNED and found.ok and not found.problems
    assert warned.code == "LG411" and reason in warned.text
    assert (found.exit_code, report(windows=windows, strict=True).exit_code) == (0, 1)
    assert "warning LG411: " in found.render() and found.render().endswith("\nMATCH with warnings")
    plain = found.to_json()
    assert (plain["ok"], plain["verdict"]) == (True, "MATCH with warnings")
    assert plain["warnings"] == [{"code": "LG411", "text": warned.text}]
    # recompute, or a budget of nothing, asks for no replay
    for config in (Config(ranks=2, updates=2, schedule="recompute"), Config(ranks=2, updates=2, budget_gb="0")):
        assert report(windows=windows, config=config).verdict is Verdict.MATCH


def test_a_warning_hides_no_mismatch() -> None:
    """Nor does a mismatch or a crash come with a word on what it replayed."""
    nothing: list[list[dict[str, Any]]] = [[], []]
    for strict in (False, True):
        wrong = report(flip, windows=nothing, strict=strict)
        assert wrong.verdict is Verdict.MISMATCH and wrong.exit_code == 1 and wrong.to_json()["verdict"] == "MISMATCH"
        assert report(strict=strict).exit_code == 0
    assert not report(windows=nothing, failures=["the patched script ended badly"]).warnings


def test_further_branches_count() -> None:
    """Each of their warnings is told once, with the branch; a mismatch of one makes the whole one."""
    nothing: list[list[dict[str, Any]]] = [[], []]
    found = report(further=[("one", report()), ("two", report(windows=nothing)), ("three", report(windows=nothing))])
    assert [warned.text.split(":")[0] for warned in found.warnings] == ["two", "three"]
    assert (found.verdict, found.exit_code) == (Verdict.WARNED, 0)
    found = report(further=[("one", report(flip)), ("two", report())])
    assert (found.verdict, found.exit_code) == (Verdict.MISMATCH, 1) and found.problems[0].startswith("one: update")
    assert [further["verdict"] for further in found.to_json()["further"]] == ["MISMATCH", "MATCH"]


def test_a_run_that_has_nothing_to_replay() -> None:
    """Where the script knows that, a replay is the problem."""
    nothing, some = ([[{"replayed": steps, "reasons": {}}]] * 2 for steps in (0, 3))
    found = report(windows=nothing, nothing_to_replay="inputs are rounded")
    assert found.ok and [(warned.code, "rounded" in warned.text) for warned in found.warnings] == [("LG411", True)]
    found = report(windows=some, nothing_to_replay="inputs are rounded")
    assert found.problems == ["6 steps were replayed, though inputs are rounded"] and not found.ok


def test_a_difference_names_update_tensor_parameter_and_rank() -> None:
    bad = report(edit_grad("block.bias", lambda grad: grad * 1.5))
    assert bad.exit_code == 1 and [update.index for update in bad.mismatches] == [1]
    (problem,) = bad.problems
    assert "update 1" in problem and "gradient of block.bias on rank 1" in problem
    update = bad.updates[1]
    assert not update.grad_bitwise and update.weights_bitwise and 0 < update.grad_rel_l2 < 0.5


def test_the_worst_tensor_is_the_one_with_the_largest_relative_difference() -> None:
    def edit(made: dict[str, Any]) -> None:
        made["grads"]["block.weight"] *= 1.001
        made["grads"]["block.bias"] *= 1.1

    worst = report(edit).updates[1].worst
    assert worst is not None and worst.parameter == "block.bias" and worst.rel_l2 == pytest.approx(0.1, rel=1e-3)


def test_a_single_bit_is_a_mismatch_under_the_bitwise_bound_only() -> None:
    def edit(made: dict[str, Any]) -> None:
        grad = made["grads"]["block.weight"]
        grad[0] = torch.nextafter(grad[0], torch.tensor(math.inf))

    assert not report(edit).ok
    assert report(edit, bound=CLOSE).ok


def test_zeros_of_another_sign_are_told_apart() -> None:
    zero = {"grads": {"w": torch.zeros(1)}, "weights": {}, "notes": {}, "seconds": 0.0}
    minus = zero | {"grads": {"w": -torch.zeros(1)}}
    assert not compare_update(0, [zero], [minus]).grad_bitwise


def test_a_run_that_stopped_is_no_word_on_its_control() -> None:
    stopped = report(failures=["the patched script ended badly"])
    stopped.control, stopped.updates = [], []
    assert stopped.problems == ["the patched script ended badly"]
    assert stopped.to_json()["control_caught"] is None
    assert "flipped: not run\n" in stopped.render() and "NOT CAUGHT" not in stopped.render()


@pytest.mark.parametrize(
    ("script", "config", "says"),
    [
        (dancegrpo_flux, {"updates_per_rollout": 2, "options": (("updates", "on-policy"),)}, "takes whole prompts"),
        (dancegrpo_wan_2_1, {"ranks": 2, "options": (("layout", "shared"),)}, "--sync late"),
    ],
)
def test_what_cannot_be_rehearsed_with_parts_is_said_before(script: Any, config: dict[str, Any], says: str) -> None:
    rehearsal = script.SCRIPT
    assert says in (rehearsal.supports(rehearsal.configure(**config)) or "")
    assert rehearsal.supports(rehearsal.configure()) is None


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("kind", ["grads", "weights"])
@pytest.mark.parametrize("bound", [BITWISE, CLOSE])
def test_not_finite_is_never_ok(value: float, kind: str, bound: Bound) -> None:
    def edit(made: dict[str, Any]) -> None:
        made[kind]["block.weight"][2] = value

    bad = report(edit, bound=bound)
    assert bad.exit_code == 1 and "not finite" in bad.problems[0]
    json.dumps(bad.to_json(), allow_nan=False)
    assert "not finite" in render(bad, terminal=False)


def test_the_same_nan_in_both_runs_is_not_ok_either() -> None:
    def edit(made: dict[str, Any]) -> None:
        made["grads"]["block.weight"][:] = math.nan

    native = run(edit=edit)
    (_, update) = compare(native, run(edit=edit))
    assert not update.finite and not update.matches(CLOSE) and not update.matches(BITWISE)


@pytest.mark.parametrize("bound", [BITWISE, CLOSE])
def test_a_gradient_that_is_absent_in_one_run(bound: Bound) -> None:
    bad = report(edit_grad("block.bias", None), bound=bound)
    assert not bad.ok and "absent in the other run" in bad.problems[0]


def test_a_gradient_of_zeros_is_not_an_absent_one() -> None:
    zeros = {"grads": {"w": torch.zeros(2)}, "weights": {}, "notes": {}, "seconds": 0.0}
    absent = zeros | {"grads": {"w": None}}
    for bound in (BITWISE, CLOSE):
        assert not compare_update(0, [zeros], [absent]).matches(bound)


def test_another_dtype_or_shape_is_a_mismatch() -> None:
    for value in (lambda grad: grad.double(), lambda grad: grad[:3]):
        bad = report(edit_grad("block.bias", value))
        assert not bad.ok and "became" in bad.problems[0]


@pytest.mark.parametrize("bound", [BITWISE, CLOSE])
def test_other_rewards_are_a_mismatch(bound: Bound) -> None:
    def edit(made: dict[str, Any]) -> None:
        made["notes"]["rewards"] = [torch.tensor(0.25)]

    bad = report(edit, bound=bound)
    assert not bad.ok and "the rewards differ" in bad.problems[0]


def test_weights_alone_can_differ() -> None:
    def edit(made: dict[str, Any]) -> None:
        made["weights"]["block.weight"] += 0.1

    bad = report(edit, bound=CLOSE)
    assert not bad.ok and "weight of block.weight" in bad.problems[0]


@pytest.mark.parametrize("control", [None, edit_grad("block.bias", lambda grad: grad * (1 + 1e-6))])
def test_a_control_that_is_not_caught_fails_the_rehearsal(control: Edit | None) -> None:
    bad = report(control=control)
    assert not bad.control_caught and bad.exit_code == 1
    assert "negative control was not caught" in bad.problems[-1]


def test_too_few_updates_are_a_failure() -> None:
    short = report()
    short.updates = short.updates[:1]
    assert not short.ok and "only 1 of 2 updates" in short.problems[0]


def test_a_failed_run_is_a_failure() -> None:
    failed = report(failures=["the patched script ended badly: rank 0: ValueError: no"])
    assert failed.exit_code == 1 and failed.problems[0].endswith("ValueError: no")


def test_json_holds_what_later_work_reads() -> None:
    plain = json.loads(json.dumps(report().to_json(), allow_nan=False))
    for name in ("ok", "updates", "forwards", "collectives", "seconds", "peak_held_bytes", "control_caught"):
        assert name in plain
    assert plain["forwards"]["patched"] == {"grad": [12, 12], "no_grad": [12, 12]}
    assert {"index", "grad_rel_l2", "grad_bitwise", "weights_bitwise"} <= plain["updates"][0].keys()
    assert plain["floor"]["bitwise"] is True and plain["not_tested"]


def test_gradients_in_place_of_graphs_are_named_where_there_are_any() -> None:
    assert "in place of graphs: 1.5 gradients of 2.000 MB each" in render(report(gradients=1.5), terminal=False)
    assert "in place of graphs" not in render(report(), terminal=False)


@pytest.mark.parametrize("terminal", [False, True])
def test_the_text_says_the_verdict_the_floor_and_what_was_not_tested(terminal: bool) -> None:
    text = render(report(), terminal=terminal)
    assert text.endswith("MATCH") and "not tested: CUDA kernels" in text and "agree bitwise" in text
    assert ("\x1b[" in text) is terminal
    assert render(report(flip), terminal=terminal).endswith("MISMATCH")


def test_replicas_that_differ_are_a_problem() -> None:
    def edit(made: dict[str, Any]) -> None:
        made["weights"]["block.weight"][0] += 1

    assert replicas(Run([[record(0), record(0)], [record(1), record(1, edit)]], [])) == [True, False]
    assert report(replicas=[True, True]).ok
    apart = report(replicas=[True, False])
    assert apart.problems == ["update 1: the ranks' weights differ from each other"]
    assert "weights equal to the bit after 1 of 2 updates" in apart.render()
    assert apart.to_json()["replicas_equal"] == [True, False]
