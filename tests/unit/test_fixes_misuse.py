"""Edits of a script after which torch itself says nothing that helps: the runtime's error, and its fix followed."""

from __future__ import annotations

import copy
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import ranks
from support.check import assert_same
from support.fixes import follows
from support.grpo import Config, Hooks, Policy, train
from support.wrapped import both, wrap
from torch import Tensor, nn

from leangrpo_core import Lean, LeanError

WORDS = {
    "graph in the rollout": ("LG610", "torch.no_grad():` back around the rollout"),
    "copy": ("LG610", "the network that lean.flush gets and the optimizer trains"),
    "inside": ("LG610", "the wrapped network, without `.module`"),
    "no_grad": ("LG610", "take no_grad from around the update"),
    "detached": ("LG610", ".detach()"),
    "flush left out": ("LG603", "call lean.flush(model, optimizer)"),
}


def hooks_of(fault: str) -> Hooks:
    copies: list[nn.Module] = []

    def copied(net: nn.Module) -> nn.Module:
        copies.append(copies[0] if copies else copy.deepcopy(getattr(net, "module", net)))
        return copies[0]

    return {
        "graph in the rollout": lambda: Hooks(rollout_context=torch.enable_grad),
        "copy": lambda: Hooks(policy=copied),
        "inside": lambda: Hooks(policy=lambda net: net.module),  # type: ignore[arg-type]
        "no_grad": lambda: Hooks(update_context=torch.no_grad),
        "detached": lambda: Hooks(update_output=lambda out, row, step: out.detach()),
        "flush left out": lambda: Hooks(no_flush=True),
        "flush left out, nothing replayed": lambda: Hooks(
            no_flush=True, update_latents=lambda latents, row, step: latents * 2
        ),
    }[fault]()


def job(rank: int, world: int, kind: str, fault: str, faulty: int, shown: Callable[[Any], None]) -> None:
    """A training that `faulty` edits, or every rank (-1); as a script ends that raises."""
    sys.excepthook = lambda kind, error, trace: shown(error)
    torch.manual_seed(0)
    net = wrap(kind, Policy()) if world > 1 else Policy()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    hooks = hooks_of(fault) if faulty in (rank, -1) else Hooks()
    try:
        train(Lean(), net, optimizer, Config(rank=rank, rollouts=1), hooks)
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)


def on_a_rank(rank: int, world: int, kind: str, fault: str, faulty: int) -> None:
    """Raises what a user would be shown."""
    found: list[BaseException] = []
    job(rank, world, kind, fault, faulty, found.append)
    if world > 1 and faulty in (rank, -1):
        time.sleep(4)  # a process can take long to die: its connections stay open
    raise found[0]


@follows("LG610", "LG603")
@pytest.mark.parametrize("fault", ["graph in the rollout", "copy", "no_grad", "detached", "flush left out"])
def test_alone(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    with pytest.raises(LeanError) as caught:
        on_a_rank(0, 1, "none", fault, 0)
    assert caught.value.code == WORDS[fault][0] and WORDS[fault][1] in str(caught.value)
    lean, native = (
        train(runtime, net, torch.optim.AdamW(net.parameters(), lr=1e-3), Config(rollouts=1))
        for runtime, net in ((Lean(), seeded()), (None, seeded()))
    )
    assert_same(lean, native)


def seeded() -> Policy:
    torch.manual_seed(0)
    return Policy()


@follows("LG610", "LG603", "LG611")
@pytest.mark.parametrize(
    ("kind", "fault", "faulty"),
    [
        ("ddp", "graph in the rollout", -1),
        ("ddp", "copy", -1),
        ("ddp", "detached", 1),
        ("ddp", "no_grad", 1),
        ("fsdp", "inside", -1),
        ("fsdp", "inside", 1),
        ("fsdp", "graph in the rollout", -1),
        ("ddp", "flush left out", 1),
        ("ddp", "flush left out, nothing replayed", 1),
        ("fsdp", "flush left out", 1),
        ("fsdp2", "flush left out", 1),
    ],
)
def test_on_two_ranks(kind: str, fault: str, faulty: int) -> None:
    code, words = WORDS[fault.split(",")[0]]
    with pytest.raises(ranks.RankFailed) as caught:
        ranks.run(on_a_rank, 2, kind, fault, faulty, seconds=20)
    if (kind, fault) == ("fsdp", "flush left out"):  # rank 1 goes on to FSDP's clipping, where gloo aborts the process
        assert "LeanError: LG611" in caught.value.errors[0]
        assert "rank 1 did not come to lean.flush" in caught.value.errors[0]
        return
    if (kind, fault) == ("fsdp", "graph in the rollout"):  # ranks keep calls of other steps, so one comes to it first
        assert any(f"LeanError: {code}" in text and words in text for text in caught.value.errors.values())
        return
    for rank in (0, 1):
        text = caught.value.errors[rank]
        if faulty in (rank, -1):
            assert f"LeanError: {code}" in text and words in text
        else:
            assert "LeanError: LG611" in text and f"rank {faulty} stopped: LeanError: {code}" in text
            assert "in lean.flush" in text or "flush" not in fault


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_without_the_edit_all_is_well(kind: str) -> None:
    for lean, native in both(kind, config={"rollouts": 1}):
        assert_same(lean.result, native.result, 0 if kind == "fsdp" else 1e-6)  # DDP averages once, not per backward


def test_the_error_of_torch_stays_in_sight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    found: list[BaseException] = []
    job(0, 1, "none", "detached", 0, found.append)
    assert "does not require grad" in str(found[0].__cause__)


def test_an_error_of_others_is_shown_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[BaseException] = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, trace: shown.append(error))

    def fails(loss: Tensor) -> Tensor:
        raise RuntimeError("the reward model is gone")

    lean = Lean()
    net = Policy()
    with pytest.raises(RuntimeError) as caught:
        train(lean, net, torch.optim.SGD(net.parameters()), Config(rollouts=1), Hooks(loss=fails))
    sys.excepthook(RuntimeError, caught.value, None)
    lean.flush(net, torch.optim.SGD(net.parameters()))
    nothing = torch.zeros(1)
    with pytest.raises(RuntimeError) as other:
        nothing.sum().backward()
    sys.excepthook(RuntimeError, other.value, None)  # no policy call since the flush: not the update's
    assert shown == [caught.value, other.value]
