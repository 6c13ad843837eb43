"""Batched calls: rows of several kept calls in one batch of the update, guidance halves, rows that are not held."""

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support import ranks
from support.batched import Config, Hooks, Network, train
from support.check import assert_same
from support.grpo import Block, Result
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel

from leangrpo_core import Lean, memory

EXACT = 1e-12  # float64: only the order of additions and the batch a row is in may differ
pytestmark = pytest.mark.usefixtures("in_float64")


def both(config: Config, hooks: Callable[[], Hooks] = Hooks) -> tuple[Result, Result, Network]:
    results = []
    for lean in (Lean(), None):
        torch.manual_seed(0)
        net = Network()
        results.append(train(lean, net, config, hooks()))
        if lean is not None:
            patched = net
    return results[0], results[1], patched


CONFIGS = {
    "one update": Config(),
    "no guidance": Config(guidance=False),
    "rows in order": Config(shuffled=False),
    "two updates": Config(accumulate=1),
    "some steps": Config(trained=2),
    "smaller batches": Config(train_batch=2, accumulate=4),
    "smaller batches, two updates, some steps": Config(train_batch=2, accumulate=2, trained=2),
    "larger batches": Config(sample_batch=2, batches=4, train_batch=4),
    "inner epochs": Config(inner_epochs=2),
    "single rows rolled out": Config(sample_batch=1, batches=4, train_batch=2, accumulate=2),
    "single rows trained": Config(train_batch=1, accumulate=8),
}


@pytest.mark.parametrize("audit", ["off", "first"])
@pytest.mark.parametrize("name", CONFIGS)
def test_equal(name: str, audit: str, monkeypatch: pytest.MonkeyPatch, windows: Any) -> None:
    monkeypatch.setenv("LEANGRPO_AUDIT", audit)
    config = CONFIGS[name]
    lean, native, _ = both(config)
    assert_same(lean, native, rtol=EXACT)
    selected = config.train_batch * config.accumulate * config.trained
    for window in windows():
        assert (window["kept"], window["replayed"], window["recomputed"]) == (selected, selected, 0)
        assert window["reasons"] == {}
    assert (windows()[0]["audit_rel_l2"] is not None) == (audit == "first")
    if audit == "first":
        assert windows()[0]["audit_rel_l2"] <= EXACT


@pytest.mark.parametrize(
    "config",
    [
        Config(sample_batch=1, batches=4, train_batch=1, accumulate=4),
        Config(shuffled=False, steps=1, trained=1, batches=1, accumulate=1),
    ],
    ids=["single rows", "a batch as it was rolled out"],
)
def test_the_same_calls_are_bitwise(config: Config) -> None:
    lean, native, _ = both(config)
    assert_same(lean, native)


def test_forwards(windows: Any) -> None:
    """All of an update from the tape: as many network calls as the rollout makes, all of them with a graph."""
    lean, native, _ = both(Config(rollouts=1))
    assert native.calls == {"grad": 8, "no_grad": 8} and lean.calls == {"grad": 8, "no_grad": 0}
    assert windows()[0]["calls"] == 8


def test_rows_that_no_update_needs_run_without_a_graph() -> None:
    """A call whose rows are not all selected is made in two parts: together as many samples as natively."""
    lean, _, net = both(Config(rollouts=1, accumulate=1))
    rolled = sum(size for _, size in net.calls[: lean.calls["no_grad"] + lean.calls["grad"] - 4])
    assert rolled == 8 * 4 * 2
    assert sum(size for kind, size in net.calls[:-4] if kind == "grad") == 4 * 4 * 2


def test_a_budget_of_some_rows(monkeypatch: pytest.MonkeyPatch, windows: Any) -> None:
    both(Config(rollouts=1))
    one = windows()[0]["graph_bytes"]
    monkeypatch.setenv("LEANGRPO_BUDGET_GB", str(3.3 * one / 1e9))
    lean, native, _ = both(Config(rollouts=2))
    assert_same(lean, native, rtol=EXACT)
    for window in windows()[1:]:
        assert 8 < window["kept"] <= 13 and window["kept"] + window["recomputed"] == 32
        assert window["replayed"] == window["kept"] and window["peak_held_bytes"] <= 3.3 * one


def spoil(latents: Tensor, rows: Tensor) -> Tensor:
    """Other inputs for one row of each batch of four."""
    return latents + 1e-3 * (rows % 4 == 1)[:, None, None]


def test_other_inputs_in_one_row(windows: Any) -> None:
    """That row is recomputed in a call of its own, the others are replayed."""
    lean, native, net = both(Config(rollouts=1), lambda: Hooks(update_latents=spoil))
    assert_same(lean, native, rtol=EXACT)
    (window,) = windows()
    assert (window["replayed"], window["recomputed"]) == (24, 8)
    assert window["reasons"] == {"inputs differ from the rollout's: latents differs by up to 0.001": 8}
    assert net.calls[-1] == ("grad", 2)  # one row, with and without its prompt


def test_an_audit_waits_for_all_rows_of_a_graph(monkeypatch: pytest.MonkeyPatch, windows: Any) -> None:
    """Native rows in every call, and graphs of which some rows are trained much later: compared as a whole."""
    monkeypatch.setenv("LEANGRPO_AUDIT", "first")
    config = Config(rollouts=1, train_batch=2, accumulate=4)
    lean, native, _ = both(
        config, lambda: Hooks(update_latents=lambda x, rows: x + 1e-3 * (rows % 4 == 1)[:, None, None])
    )
    assert_same(lean, native, rtol=EXACT)
    assert windows()[0]["audit_rel_l2"] <= EXACT and windows()[0]["recomputed"] == 8


def test_guidance_in_the_rollout_only(windows: Any) -> None:
    """The update's calls are half as large: recomputed, with the reason; the next window keeps nothing."""
    lean, native, _ = both(Config(train_guidance=False))
    assert_same(lean, native, rtol=EXACT)
    first, second = windows()
    assert (first["kept"], first["replayed"], first["recomputed"]) == (32, 0, 32)
    assert all("latents has shape (4, 3, 8), had (8, 3, 8)" in reason for reason in first["reasons"])
    assert (second["kept"], second["recomputed"]) == (0, 32)
    assert list(second["reasons"]) == ["no step of an earlier window had the inputs of the update"]


def test_another_network_of_the_process_is_not_given_up(windows: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was learnt about one network says nothing about the next; that is audited, too."""
    monkeypatch.setenv("LEANGRPO_AUDIT", "first")
    lean = Lean()
    for config in (Config(train_guidance=False), Config()):
        torch.manual_seed(0)
        train(lean, Network(), config)
    kept = [window["kept"] for window in windows()]
    assert kept == [32, 0, 32, 32]
    assert [window["audit_rel_l2"] is None for window in windows()] == [True, True, False, True]


def test_samples_without_ids_are_computed_natively() -> None:
    """A trainer's subclass may bring its own."""
    lean, net = Lean(), Network()
    with lean.rollout(rows=1, steps=2, trained=2, window=1):
        lean.at(range(1))
        assert list(lean.rows) == [0]
    lean.at(torch.tensor([0]), torch.tensor([[1, 0]]), 1)
    assert lean.rows.tolist() == lean.steps.tolist() == [0]
    lean.at(None, None, 1)
    assert lean.rows is lean.steps is None
    lean.policy_call(net, lean.rows, lean.steps, torch.randn(1, 3, 8), torch.zeros(()), torch.randn(1, 8))
    assert net.calls == [("grad", 1)]


def test_recompute_is_upstream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LEANGRPO_SCHEDULE", "recompute")
    lean, native, _ = both(Config(inner_epochs=2, accumulate=1))
    assert_same(lean, native)
    assert lean.calls == native.calls


def test_permuted_ids_never_answer_for_another_row(windows: Any) -> None:
    """Equal values in another order are not the same evaluation: rows are compared one by one."""
    swap = lambda latents, rows: latents[torch.tensor([1, 0, 2, 3])]  # noqa: E731
    lean, native, _ = both(Config(rollouts=1), lambda: Hooks(update_latents=swap))
    assert_same(lean, native, rtol=EXACT)
    assert windows()[0]["replayed"] == 16


def rank_job(
    rank: int, world: int, kind: str, lean: bool, config: dict[str, Any]
) -> tuple[Result, list[dict[str, Any]]]:
    """One rank of a training run: `around` rolls out around DDP and trains through it, as accelerate's users do."""
    torch.set_default_dtype(torch.float64)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["LEANGRPO_REPORT_DIR"] = folder
        os.environ["LEANGRPO_SYNC"] = "late" if kind == "fsdp" else "upstream"
        torch.manual_seed(0)
        net: nn.Module = Network()
        hooks = Hooks()
        if kind == "fsdp":
            net = FullyShardedDataParallel(
                net, auto_wrap_policy=ModuleWrapPolicy({Block}), device_id=torch.device("cpu"), use_orig_params=True
            )
        else:
            wrapped = DistributedDataParallel(net)
            if kind == "around":
                hooks = Hooks(update_net=lambda net: wrapped)
            else:
                net = wrapped
        result = train(Lean() if lean else None, net, Config(rank=rank, **config), hooks)
        lines = Path(folder, "rank" + str(rank) + ".jsonl")
        return result, [json.loads(line) for line in lines.read_text().splitlines()] if lean else []


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        ("around", {}),
        ("around", {"trained": 2, "accumulate": 1}),
        ("through", {"train_batch": 2}),
        ("fsdp", {}),
        ("fsdp", {"train_batch": 2, "trained": 2}),
    ],
)
def test_two_ranks(kind: str, config: dict[str, Any]) -> None:
    ours, native = (ranks.run(rank_job, 2, kind, lean, config) for lean in (True, False))
    for (lean, windows), (theirs, _) in zip(ours, native, strict=True):
        assert_same(lean, theirs, rtol=EXACT)
        for window in windows:
            assert window["replayed"] == window["kept"] > 0 and window["recomputed"] == 0
    if kind != "fsdp":
        for a, b in zip(ours[0][0].weights, ours[1][0].weights, strict=True):
            assert all(torch.equal(a[name], b[name]) for name in a), "replicas differ"


def over_budget(rank: int, world: int, lean: bool) -> tuple[Result, list[dict[str, Any]]]:
    memory.Sizes.fits = lambda self, budget_bytes: 9 if rank else 100  # in this forked process only
    return rank_job(rank, world, "around", lean, {"rollouts": 2, "inner_epochs": 2})


def test_a_budget_on_one_rank_only() -> None:
    """Each rank replays what it holds; its first forwards through DDP, which share buffers, are not another rank's."""
    ours, native = (ranks.run(over_budget, 2, lean) for lean in (True, False))
    for (lean, windows), (theirs, _), held in zip(ours, native, (32, 9), strict=True):
        assert_same(lean, theirs, rtol=EXACT)
        assert (windows[0]["replayed"], windows[0]["recomputed"]) == (held, 32 - held)
