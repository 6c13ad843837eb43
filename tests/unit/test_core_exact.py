"""Retain on one rank without a wrapper: every update is the native one, to the bit."""

import gc
import json
import weakref
from pathlib import Path

import pytest
import torch
from support.check import assert_same
from support.grpo import Config, Hooks, Policy, Result, train

from leangrpo_core import Lean, LeanError


def run(lean: Lean | None, config: Config, hooks: Hooks | None = None, **policy: object) -> Result:
    torch.manual_seed(0)
    net = Policy(**policy)  # type: ignore[arg-type]
    return train(lean, net, torch.optim.AdamW(net.parameters(), lr=1e-2), config, hooks)


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointing"])
@pytest.mark.parametrize("accumulate", [4, 2, 1, 3])
def test_bitwise(bf16: bool, checkpointing: bool, accumulate: int) -> None:
    config = Config(bf16=bf16, accumulate=accumulate)
    native = run(None, config, checkpointing=checkpointing)
    lean = run(Lean(), config, checkpointing=checkpointing)
    assert_same(lean, native)
    trained, rolled = config.rows * config.trained * config.rollouts, config.rows * config.steps * config.rollouts
    replayed = accumulate * config.trained * config.rollouts
    assert native.calls == {"grad": trained, "no_grad": rolled}
    assert lean.calls == {"grad": trained, "no_grad": rolled - replayed}


@pytest.mark.parametrize("trained", [1, 6])
def test_any_share_of_steps(trained: int) -> None:
    config = Config(trained=trained)
    assert_same(run(Lean(), config), run(None, config))


@pytest.mark.parametrize(
    ("schedule", "chosen"), [("retain", (3, 1)), ("retain", (4,)), ("retain", ()), ("recompute", (3, 1))]
)
def test_steps_known_before_the_rollout(
    schedule: str, chosen: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Upstream draws no order of steps, then, and no random number more."""
    monkeypatch.setenv("LEANGRPO_SCHEDULE", schedule)
    config = Config(chosen=chosen, trained=len(chosen), accumulate=2)
    native, lean = run(None, config), run(Lean(), config)
    assert_same(lean, native)
    replayed = 2 * len(chosen) * config.rollouts if schedule == "retain" else 0
    assert lean.calls["no_grad"] == native.calls["no_grad"] - replayed
    assert lean.calls.get("grad") == native.calls.get("grad")  # what was kept was not in vain


@pytest.mark.parametrize(("order", "kept", "replayed"), [("held-first", 6, 3), ("upstream", 12, 6)])
@pytest.mark.parametrize("moved", [(3, 1, 0, 2), (1, 3, 2)], ids=["all", "one left out"])
def test_rows_that_move_after_the_rollout(
    order: str, kept: int, replayed: int, moved: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Held are those that come first if none moves, or all; the first update trains one of the former."""
    monkeypatch.setenv("LEANGRPO_ORDER", order)
    config = Config(moved=(moved,), accumulate=2)
    native, lean = run(None, config), run(Lean(), config)
    assert_same(lean, native)
    assert lean.calls["no_grad"] == native.calls["no_grad"] - kept * config.rollouts
    assert lean.calls["grad"] == native.calls["grad"] + (kept - replayed) * config.rollouts


def test_order_upstream_holds_no_more_where_no_row_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LEANGRPO_ORDER", "upstream")
    config = Config(accumulate=2)
    lean = run(Lean(), config)
    assert lean.calls == {"grad": 24, "no_grad": 48 - 12}


def test_recompute_is_upstream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LEANGRPO_SCHEDULE", "recompute")
    config = Config(accumulate=2)
    native, lean = run(None, config), run(Lean(), config)
    assert_same(lean, native)
    assert lean.calls == native.calls


@pytest.mark.parametrize("graphs", [0, 1, 5, 100])
def test_budget_keeps_a_prefix(graphs: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With room for some graphs, the first calls of the update are replayed and the others recomputed: exact."""
    monkeypatch.setenv("LEANGRPO_REPORT_DIR", str(tmp_path))
    config = Config(rollouts=1)
    native = run(None, config)
    run(Lean(), config)
    one = json.loads((tmp_path / "rank0.jsonl").read_text())["graph_bytes"]
    monkeypatch.setenv("LEANGRPO_BUDGET_GB", str((graphs + 0.5) * one / 1e9))
    (tmp_path / "rank0.jsonl").unlink()
    assert_same(run(Lean(), config), native)
    figures = json.loads((tmp_path / "rank0.jsonl").read_text())
    assert figures["kept"] == figures["replayed"] == min(graphs, 12)
    assert figures["recomputed"] == 12 - figures["kept"]
    assert figures["reasons"] == ({"over LEANGRPO_BUDGET_GB": 12 - graphs} if graphs < 12 else {})
    assert figures["peak_held_bytes"] <= (graphs + 0.5) * one


@pytest.mark.parametrize("checkpointing", [False, True])
def test_held_bytes_are_those_of_the_graphs(
    checkpointing: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Followed storage by storage, the peak is the number of kept calls times one graph, within 10 %."""
    monkeypatch.setenv("LEANGRPO_REPORT_DIR", str(tmp_path))
    run(Lean(), Config(rollouts=1), checkpointing=checkpointing)
    figures = json.loads((tmp_path / "rank0.jsonl").read_text())
    assert figures["kept"] == 12
    assert figures["peak_held_bytes"] == pytest.approx(12 * figures["graph_bytes"], rel=0.1)


def test_a_kept_call_checkpoints_activations(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Some networks checkpoint in train mode only, and rollouts run in eval mode."""
    monkeypatch.setenv("LEANGRPO_REPORT_DIR", str(tmp_path))
    for checkpointing in (False, True):
        run(Lean(), Config(rollouts=1), checkpointing=checkpointing)
    plain, checkpointed = (json.loads(line)["graph_bytes"] for line in (tmp_path / "rank0.jsonl").open())
    assert checkpointed < plain / 2


def test_one_autocast_region_around_the_rollout() -> None:
    """Weights that autocast cached for other calls of the region do not enter a kept graph."""
    config = Config(bf16=True, one_autocast=True)
    assert_same(run(Lean(), config), run(None, config))


def test_cached_casts_are_forgotten_before_a_kept_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """On some older versions of torch a weight cast under no_grad could enter a later graph without its gradient."""
    lean, net = Lean(), Policy()
    events: list[str] = []
    monkeypatch.setattr(torch, "clear_autocast_cache", lambda: events.append("forget"))
    net.wrap = lambda out: events.append("kept call") or (out,) if out.requires_grad else (out,)
    with lean.rollout(rows=1, steps=1, trained=1, window=1), torch.no_grad():
        lean.rollout_call(net, [0], 0, torch.randn(1, 4, 8), torch.zeros(1), torch.randn(1, 8))
    assert events[:2] == ["forget", "kept call"]


def test_modes_are_put_back() -> None:
    lean, net = Lean(), Policy()
    net.eval()
    net.blocks[1].train()
    modes = [module.training for module in net.modules()]
    with lean.rollout(rows=1, steps=1, trained=1, window=1), torch.no_grad():
        lean.rollout_call(net, [0], 0, torch.randn(1, 4, 8), torch.zeros(1), torch.randn(1, 8))
    assert [module.training for module in net.modules()] == modes


def test_nothing_is_held_after_the_flush() -> None:
    """Every output with a graph that the rollout made dies with the flush."""
    torch.manual_seed(0)
    net, lean = Policy(), Lean()
    outputs: list[weakref.ref[torch.Tensor]] = []
    alive_before_flush = []

    def remember(out: torch.Tensor) -> tuple[torch.Tensor]:
        if out.requires_grad:
            outputs.append(weakref.ref(out))
        return (out,)

    net.wrap = remember
    hooks = Hooks(before_flush=lambda _: alive_before_flush.append(sum(ref() is not None for ref in outputs)))
    train(lean, net, torch.optim.AdamW(net.parameters()), Config(rollouts=1), hooks)
    gc.collect()
    assert alive_before_flush == [12]
    assert [ref() for ref in outputs] == [None] * 12


def test_the_folder_of_figures_is_made_before_the_rollout(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LEANGRPO_REPORT_DIR", str(tmp_path / "new" / "folder"))
    run(Lean(), Config(rollouts=1))
    assert (tmp_path / "new" / "folder" / "rank0.jsonl").exists()
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("LEANGRPO_REPORT_DIR", str(tmp_path / "file" / "folder"))
    with pytest.raises(LeanError, match="LG601"), Lean().rollout(rows=1, steps=1, trained=1, window=1):
        raise AssertionError("the rollout must not start")


def test_random_numbers_of_a_reward_are_noticed(capsys: pytest.CaptureFixture[str]) -> None:
    hooks = Hooks(after_rollout=lambda _: torch.rand(1))
    run(Lean(), Config(), hooks)
    run(Lean(), Config())
    assert capsys.readouterr().out.count("draws from the CPU generator") == 1


def test_audit_covers_what_was_replayed_before_a_native_call(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Also when the budget ends within the window, or one sample is recomputed."""
    monkeypatch.setenv("LEANGRPO_AUDIT", "first")
    monkeypatch.setenv("LEANGRPO_REPORT_DIR", str(tmp_path))
    config = Config(rollouts=2)
    hooks = Hooks(update_latents=lambda latents, row, step: latents + 0.01 if row == 1 else latents)
    assert_same(run(Lean(), config, hooks), run(None, config, hooks))
    windows = [json.loads(line) for line in (tmp_path / "rank0.jsonl").read_text().splitlines()]
    assert [(window["replayed"], window["audit_rel_l2"]) for window in windows] == [(9, 0.0), (9, None)]


class Skipping(torch.optim.SGD):
    """Skips a step whose gradient is not finite, as a loss scaler does."""

    def step(self, closure: None = None) -> None:
        if all(p.grad.isfinite().all() for p in self.param_groups[0]["params"]):
            super().step(closure)


def test_audit_waits_for_a_window_it_can_judge(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An overflow of a loss scale is upstream's own business: it skips the step, and the next window is audited."""
    monkeypatch.setenv("LEANGRPO_AUDIT", "first")
    monkeypatch.setenv("LEANGRPO_REPORT_DIR", str(tmp_path))
    scales = iter([torch.inf] * 12 + [1.0] * 12)
    torch.manual_seed(0)
    net = Policy()
    hooks = Hooks(loss=lambda loss: loss * next(scales))
    train(Lean(), net, Skipping(net.parameters(), lr=1e-2), Config(rollouts=2), hooks)
    windows = [json.loads(line) for line in (tmp_path / "rank0.jsonl").read_text().splitlines()]
    assert [window["audit_rel_l2"] for window in windows] == [None, 0.0]


def test_audit_agrees_and_changes_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LEANGRPO_AUDIT", "every:2")
    monkeypatch.setenv("LEANGRPO_REPORT_DIR", str(tmp_path))
    config = Config(rollouts=3)
    native, lean = run(None, config), run(Lean(), config)
    assert_same(lean, native)
    windows = [json.loads(line) for line in (tmp_path / "rank0.jsonl").read_text().splitlines()]
    assert [window["audit_rel_l2"] for window in windows] == [0.0, None, 0.0]
    assert lean.calls["grad"] == native.calls["grad"] + 2 * (12 + 1)  # one forward compares the modes
