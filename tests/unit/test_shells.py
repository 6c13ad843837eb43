"""Rollouts that come batch by batch and are shuffled afterwards; updates through a module that only hands calls on."""

import functools
import os
from typing import Any

import pytest
import torch
from support import ranks
from support.batched import Adapters, Config, Network, train
from support.check import assert_same
from support.grpo import Result
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from leangrpo_core import Lean, sync

EXACT = 1e-12  # float64: only the order of additions and the batch a row is in may differ
pytestmark = pytest.mark.usefixtures("in_float64")

CONFIGS = {
    "one update": Config(),
    "two updates": Config(accumulate=1),
    "smaller batches, two updates, some steps": Config(train_batch=2, accumulate=2, trained=2),
    "inner epochs": Config(inner_epochs=2),
}


def both(config: Config, adapters: bool) -> tuple[Result, Result]:
    config.by_batch = True
    results = []
    for lean in (Lean(), None):
        torch.manual_seed(0)
        net = Network()
        results.append(train(lean, net, config, shell=shell_of(net) if adapters else None))
    return results[0], results[1]


def shell_of(net: nn.Module) -> Adapters:
    """Trains two layers of one shape, in another order than the network has them, and nothing else."""
    net.requires_grad_(False)
    shell = Adapters(net, "enter", "prompt")
    shell.requires_grad_(True)
    return shell


@pytest.mark.parametrize("adapters", [False, True])
@pytest.mark.parametrize("name", CONFIGS)
def test_equal(name: str, adapters: bool, monkeypatch: pytest.MonkeyPatch, windows: Any) -> None:
    monkeypatch.setenv("LEANGRPO_AUDIT", "first")
    config = CONFIGS[name]
    lean, native = both(config, adapters)
    assert_same(lean, native, rtol=EXACT)
    trained = config.train_batch * config.accumulate * config.trained
    for window in windows():
        assert window["kept"] == window["replayed"] == trained
        assert window["recomputed"] == 0
    assert windows()[0]["audit_rel_l2"] <= EXACT


@pytest.mark.parametrize("accumulate", [1, 2])
def test_gradients_in_place_of_graphs(accumulate: int, monkeypatch: pytest.MonkeyPatch, windows: Any) -> None:
    """They are kept in the network's order and go to the weights that the shell names in another."""
    monkeypatch.setenv("LEANGRPO_SCHEDULE", "reweight")
    lean, native = both(Config(accumulate=accumulate), adapters=True)
    assert_same(lean, native, rtol=1e-10)
    assert all(window["recomputed"] == 0 < window["gradients"] for window in windows())


def test_recompute_draws_as_natively(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LEANGRPO_SCHEDULE", "recompute")
    assert_same(*both(Config(accumulate=1), adapters=True))


def test_a_shell_that_does_something_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    """As accelerate does it: autocast within the update's calls only, where nobody sees it from outside."""

    def results(lean: Lean | None) -> Result:
        torch.manual_seed(0)
        net = Network()
        shell = shell_of(net)
        plain = shell.forward

        @functools.wraps(plain)
        def doubled(*args: Any, **kwargs: Any) -> Any:
            found = plain(*args, **kwargs)
            found.sample = found.sample * 2
            return found

        shell.forward = doubled  # type: ignore[method-assign]
        return train(lean, net, Config(by_batch=True), shell=shell)

    lean, native = results(Lean()), results(None)
    assert_same(lean, native)
    assert lean.calls == native.calls
    said = [line for line in capsys.readouterr().out.splitlines() if "whose forward was replaced" in line]
    assert len(said) == 1 and "through Adapters, " in said[0] and "nothing is kept" in said[0]


def test_weights_of_the_network_beside_the_shells_are_watched(windows: Any) -> None:
    """A frozen weight that changes between rollout and update is seen, though the shell does not hold it."""
    net, lean = Network(), Lean()
    shell = shell_of(net)
    inputs = torch.randn(2, 3, 8), torch.tensor(0.1), torch.randn(2, 8)
    with (
        lean.rollout_batch(
            0, batches=1, rows=2, steps=1, of=1, window=1, batch_rows=2, shuffled=True, model=shell, calls=net
        ),
        torch.no_grad(),
    ):
        lean.rollout_call(net, lean.rows, 0, *inputs)
    lean.row_order(2)
    lean.step_order(2, 1)
    ids = lean.identity()
    with torch.no_grad():
        net.leave.bias.add_(1)
    rows = ids["lean_row"] - ids["lean_row"].min()
    lean.policy_call(
        shell, ids["lean_row"], ids["lean_step"][:, 0], inputs[0][rows], inputs[1], inputs[2][rows]
    ).sample.sum().backward()
    lean.flush(shell, None)
    (window,) = windows()
    assert window["replayed"] == 0 and any("weights changed" in reason for reason in window["reasons"])


def test_names_of_arguments_are_the_networks() -> None:
    net = Network()
    shell = shell_of(net)
    assert sync.bare(shell) is sync.innermost(shell) is shell  # until somebody says so
    sync.hands_on(shell, net)
    assert sync.bare(shell) is sync.innermost(shell) is net
    assert sync.bare(net) is sync.innermost(net) is net


def rank_job(rank: int, world: int, patched: bool, accumulate: int, schedule: str) -> tuple[Result, list[int]]:
    os.environ["LEANGRPO_SCHEDULE"] = schedule
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    net, lean = Network(), Lean() if patched else None
    config = Config(accumulate=accumulate, rank=rank, by_batch=True)
    shell = DistributedDataParallel(shell_of(net))
    result = train(lean, net, config, shell=shell)
    return result, [result.calls["grad"], result.calls["no_grad"]]


@pytest.mark.parametrize(("accumulate", "schedule"), [(2, "retain"), (1, "reweight")])
def test_two_ranks(accumulate: int, schedule: str) -> None:
    """DDP around the adapters averages them, also where their graphs were kept and no call went through it."""
    ours = ranks.run(rank_job, 2, True, accumulate, schedule)
    theirs = ranks.run(rank_job, 2, False, accumulate, schedule)
    for (lean, calls), (native, _) in zip(ours, theirs, strict=True):
        assert_same(lean, native, rtol=1e-10)
        assert accumulate == 1 or calls == [16, 0]
    for name, grad in ours[0][0].gradients[0].items():
        assert torch.equal(grad, ours[1][0].gradients[0][name])
