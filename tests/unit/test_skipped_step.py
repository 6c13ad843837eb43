"""A loss scaler whose first scale is too large: gradients overflow, the step is skipped, later ones go through."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.grpo import Config, Hooks, Policy, Result, train
from torch import Tensor, nn

from leangrpo_core import Lean


class Scaled:
    """An optimizer as a trainer with a loss scaler drives it; the gradients are unscaled before they are clipped."""

    def __init__(self, net: nn.Module) -> None:
        self.optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, backoff_factor=2.0**-110)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def step(self) -> None:
        self.scaler.step(self.optimizer)
        self.scaler.update()


def run(lean: Lean | None) -> Result:
    torch.manual_seed(0)
    net = Policy()
    optimizer = Scaled(net)
    hooks = Hooks(
        loss=lambda loss: optimizer.scaler.scale(loss * 1e4),  # type: ignore[return-value]
        after_flush=lambda net: optimizer.scaler.unscale_(optimizer.optimizer),
    )
    return train(lean, net, optimizer, Config(rollouts=3, rows=4, accumulate=2, trained=2), hooks)


def bits(values: dict[str, Any]) -> dict[str, Tensor]:
    return {name: value.view(torch.int32) for name, value in values.items()}


def test_a_skipped_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bitwise native, NaN and infinity included. The audit cannot judge the first window and takes the next one."""
    monkeypatch.setenv("LEANGRPO_REPORT_DIR", str(tmp_path))
    monkeypatch.setenv("LEANGRPO_AUDIT", "first")
    torch.manual_seed(0)
    start = dict(Policy().named_parameters())
    native, ours = run(None), run(Lean())
    finite = [all(grad.isfinite().all() for grad in grads.values() if grad is not None) for grads in native.gradients]
    assert finite == [False, True, True, True, True, True]
    for theirs, found in zip(native.gradients + native.weights, ours.gradients + ours.weights, strict=True):
        expected, got = bits(theirs), bits(found)
        assert expected.keys() == got.keys() and all(torch.equal(expected[name], got[name]) for name in expected)
    for before, after, same in zip([start, *native.weights[:-1]], native.weights, [True] + [False] * 5, strict=True):
        assert all(torch.equal(before[name], after[name]) for name in after) == same
    windows = [json.loads(line) for line in (tmp_path / "rank0.jsonl").read_text().splitlines()]
    assert [window["replayed"] for window in windows] == [4, 4, 4]
    assert [window["audit_rel_l2"] for window in windows] == [None, 0, None]
