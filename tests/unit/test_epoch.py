"""Batches rolled out one by one, filtered and shuffled afterwards, trained in several updates."""

import json
import os
import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from support import ranks
from support.batched import Network
from support.check import assert_same
from support.epoch import Config, Hooks, first_batches_first, train
from support.grpo import Result
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from leangrpo_core import Lean, memory

EXACT = 1e-12  # float64: only the order of additions and the batch a row is in may differ
pytestmark = pytest.mark.usefixtures("in_float64")


def both(config: Config, native: Hooks | None = None, hooks: Hooks | None = None) -> tuple[Result, Result]:
    results = []
    for lean, given in ((Lean(), hooks), (None, native or first_batches_first(config))):
        torch.manual_seed(0)
        results.append(train(lean, Network(), config, given))
    return results[0], results[1]


CONFIGS = {
    "two updates": Config(),
    "four updates": Config(window=1),
    "samples left out": Config(useless=(0, 1, 4, 11)),
    "most of the first update's left out": Config(useless=(0, 1, 2, 3, 4)),
    "a reference": Config(reference=True),
    "in order": Config(shuffled=False),
    "one update": Config(window=4),
    "more accumulated than sampled": Config(window=8, inner_epochs=2),
    "inner epochs": Config(inner_epochs=2),
}


@pytest.mark.parametrize("audit", ["off", "first"])
@pytest.mark.parametrize("name", CONFIGS)
def test_equal(name: str, audit: str, monkeypatch: pytest.MonkeyPatch, windows: Any) -> None:
    monkeypatch.setenv("LEANGRPO_AUDIT", audit)
    config = CONFIGS[name]
    lean, native = both(config)
    assert_same(lean, native, rtol=EXACT)
    survivors = 12 - len(config.useless) + (-(12 - len(config.useless)) % 4 if config.useless else 0)
    selected = min(config.window, 4) * 3 * config.trained * 2
    trained = survivors // 4 * config.window * config.trained * 2
    for window in windows():
        assert window["kept"] == selected and window["replayed"] + window["recomputed"] == trained
        if not config.useless and config.window <= 4:
            assert window["recomputed"] == 0 and window["reasons"] == {}
    assert (windows()[0]["audit_rel_l2"] is not None) == (audit == "first")


@pytest.mark.parametrize("window", [6, 3])
def test_updates_and_rollouts_out_of_step(window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """An update may take samples of two rollouts: what is replayed of the first is walked before the second."""
    monkeypatch.setenv("LEANGRPO_ORDER", "upstream")
    lean, native = both(Config(window=window, rollouts=6), native=Hooks())
    assert len(native.gradients) == 24 // window
    assert_same(lean, native, rtol=EXACT)


def test_samples_of_held_batches_come_first(windows: Any) -> None:
    """Of nine samples that are left five are held: all of them are replayed, though an update takes half of them."""
    config = Config(useless=(0, 3, 7, 9), rollouts=1)
    both(config)
    assert (windows()[0]["replayed"], windows()[0]["recomputed"]) == (4 * 3 * 2, 0)


def test_upstreams_own_order(monkeypatch: pytest.MonkeyPatch, windows: Any) -> None:
    """All are held then, so whichever come first are replayed; the others are let go."""
    monkeypatch.setenv("LEANGRPO_ORDER", "upstream")
    lean, native = both(Config(rollouts=2), native=Hooks())
    assert_same(lean, native, rtol=EXACT)
    for window in windows():
        assert (window["kept"], window["replayed"], window["recomputed"]) == (72, 36, 0)
        assert window["reasons"] == {"held, not used by the first update": 36}


def test_one_update_has_upstreams_own_order() -> None:
    config = Config(window=4, rollouts=2)
    assert_same(*both(config, native=Hooks()), rtol=EXACT)


def test_a_later_inner_epoch_has_its_own_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the first shuffle after a rollout is put in another order, and none where upstream's was asked for."""
    config = Config(inner_epochs=2, rollouts=1)
    assert_same(*both(config), rtol=EXACT)
    monkeypatch.setenv("LEANGRPO_ORDER", "upstream")
    assert_same(*both(config, native=Hooks()), rtol=EXACT)


def test_in_order_is_bitwise() -> None:
    assert_same(*both(Config(shuffled=False)))


def test_forwards(windows: Any) -> None:
    """Nothing is kept in the evaluation, nothing computed with grad in the first update; the reference is native."""
    lean, native = both(Config(rollouts=1, reference=True))
    # evaluation 8; rollout 32, of which 2 batches x 3 steps x 2 calls are kept; 24 calls of the updates; 24 references
    assert native.calls == {"grad": 24, "no_grad": 8 + 32 + 24}
    assert lean.calls == {"grad": 24, "no_grad": 8 + 32 - 12 + 24}
    assert windows()[0]["kept"] == 36


@pytest.mark.parametrize("order", ["held-first", "upstream"])
def test_recompute_is_upstream(order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LEANGRPO_SCHEDULE", "recompute")
    monkeypatch.setenv("LEANGRPO_ORDER", order)
    lean, native = both(Config(inner_epochs=2, useless=(1, 2)), native=Hooks())
    assert_same(lean, native)
    assert lean.calls == native.calls


def test_a_budget_does_not_change_the_order(monkeypatch: pytest.MonkeyPatch, windows: Any) -> None:
    """Otherwise what is trained first would depend on free memory."""
    both(Config(rollouts=1))
    one = windows()[0]["graph_bytes"]
    monkeypatch.setenv("LEANGRPO_BUDGET_GB", str(4.2 * one / 1e9))
    lean, native = both(Config(rollouts=3))
    assert_same(lean, native, rtol=EXACT)
    for window in windows()[2:]:
        assert 0 < window["kept"] == window["replayed"] < 36 and window["replayed"] + window["recomputed"] == 36


def rounded_time(time: torch.Tensor) -> torch.Tensor:
    return time.to(torch.bfloat16).to(time.dtype) * (1 + 2**-12)


@pytest.mark.parametrize("inputs", ["exact", "rounded"])
def test_inputs_that_differ_by_rounding(
    inputs: str, monkeypatch: pytest.MonkeyPatch, windows: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """`exact` recomputes and is native; `rounded` trains on the rollout's own outputs. Both say so once."""
    monkeypatch.setenv("LEANGRPO_INPUTS", inputs)
    config = Config(shuffled=False)
    update = Hooks(update_time=lambda time: time.to(torch.bfloat16).to(time.dtype))
    lean, native = both(config, native=update if inputs == "exact" else Hooks(), hooks=update)
    first = Result(lean.gradients[:1], [], {}), Result(native.gradients[:1], [], {})
    assert_same(*(first if inputs == "rounded" else (lean, native)), rtol=EXACT)
    window = windows()[0]
    assert (window["replayed"], window["recomputed"]) == ((36, 0) if inputs == "rounded" else (0, 36))
    said = [line for line in capsys.readouterr().out.splitlines() if "but for rounding: timestep differs by" in line]
    told = [line for line in said if "LEANGRPO_INPUTS=rounded" in line]
    assert len(told) == 1 and ("replayed all the same" in told[0]) == (inputs == "rounded")
    # The largest amount of the steps at 0.1, 0.2 and 0.3, not the first one.
    assert f"by up to {torch.tensor(0.3).bfloat16().double() - 0.3:.3g}: " in told[0]


def test_inputs_that_differ_by_more_than_rounding(monkeypatch: pytest.MonkeyPatch, windows: Any) -> None:
    monkeypatch.setenv("LEANGRPO_INPUTS", "rounded")
    update = Hooks(update_time=lambda time: (time * 1.01).to(torch.bfloat16).to(time.dtype))
    lean, native = both(Config(shuffled=False, rollouts=1), native=update, hooks=update)
    assert_same(lean, native, rtol=EXACT)
    assert windows()[0]["replayed"] == 0


def test_a_rollout_that_breaks_off() -> None:
    """The next one begins anew, and what a caller does with batches out of turn keeps nothing."""
    lean, net = Lean(), Network()

    def stop(batch: int, step: int) -> None:
        if (batch, step) == (1, 2):
            raise ArithmeticError

    with pytest.raises(ArithmeticError):
        train(lean, net, Config(), Hooks(in_rollout=stop))
    with lean.rollout_batch(1, batches=4, rows=3, steps=3, window=2, model=net):
        lean.rollout_call(net, lean.rows, 0, torch.randn(3, 3, 8), torch.zeros(()), torch.randn(3, 8))
    assert net.calls[-1] == ("no_grad" if not torch.is_grad_enabled() else "grad", 3)
    torch.manual_seed(0)
    native, fresh = Network(), Network()
    fresh.load_state_dict(native.state_dict())
    config = Config(rollouts=1)
    assert_same(train(lean, fresh, config), train(None, native, config, first_batches_first(config)), rtol=EXACT)


class Adapted(nn.Module):
    """As peft wraps a network: anything goes in, the network inside takes it."""

    def __init__(self, net: Network) -> None:
        super().__init__()
        self.inner = net

    @property
    def calls(self) -> list[tuple[str, int]]:
        return self.inner.calls

    def get_base_model(self) -> nn.Module:
        return self.inner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs)


def test_a_network_inside_peft() -> None:
    """An argument that the update leaves to its default is the same one."""
    lean, net = Lean(), Adapted(Network())
    latents, prompts = torch.randn(3, 3, 8), torch.randn(3, 8)
    with torch.no_grad(), lean.rollout_batch(0, batches=1, rows=3, steps=1, window=1, model=net):
        lean.rollout_call(net, lean.rows, 0, latents, torch.zeros(()), prompts=prompts, scale=1.0)
    ids = lean.identity("cpu")
    lean.policy_call(net, ids["lean_row"], ids["lean_step"][:, 0], latents, timestep=torch.zeros(3), prompts=prompts)
    assert net.calls == [("grad", 3)]


def rank_job(rank: int, world: int, lean: bool, options: dict[str, Any]) -> tuple[Result, list[dict[str, Any]]]:
    torch.set_default_dtype(torch.float64)
    useless, budget = options["useless"][rank], options["budget"][rank]
    memory.Sizes.fits = lambda self, budget_bytes: budget  # in this forked process only
    config = Config(
        rank=rank, useless=useless, reference=options["reference"], rollouts=3, window=options.get("window", 2)
    )
    with tempfile.TemporaryDirectory() as folder:
        os.environ["LEANGRPO_REPORT_DIR"] = folder
        torch.manual_seed(0)
        net = Network()
        wrapped: nn.Module = DistributedDataParallel(net)
        hooks = None if lean else first_batches_first(config)
        with nullcontext() if lean else ranks.natively():
            result = train(Lean() if lean else None, net, config, hooks, wrapped)
        lines = Path(folder, f"rank{rank}.jsonl")
        return result, [json.loads(line) for line in lines.read_text().splitlines()] if lean else []


@pytest.mark.parametrize(
    "options",
    [
        {"useless": ((0, 1, 2, 3), ()), "budget": (100, 100), "reference": True},
        {"useless": ((), (5, 6)), "budget": (100, 5), "reference": True},
        {"useless": ((), ()), "budget": (0, 100), "reference": False},
        {"useless": ((), (5,)), "budget": (100, 20), "reference": False, "window": 6},
    ],
    ids=["samples left out on one rank", "budget and samples", "no budget on one rank", "updates out of step"],
)
def test_two_ranks(options: dict[str, Any]) -> None:
    """Ranks replay unequal numbers of calls. Forwards through DDP share buffers and agree on buckets, and must not."""
    native, ours = (ranks.run(rank_job, 2, lean, options) for lean in (False, True))
    for (lean, _), (theirs, _) in zip(ours, native, strict=True):
        assert_same(lean, theirs, rtol=EXACT)
    assert ours[0][1][0]["replayed"] != ours[1][1][0]["replayed"]
    for a, b in zip(ours[0][0].weights, ours[1][0].weights, strict=True):
        assert all(torch.equal(a[name], b[name]) for name in a), "replicas differ"
