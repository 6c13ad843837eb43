"""Networks that draw random numbers or change buffers in train mode: trained as natively, to the bit, never kept."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support import ranks
from support.check import assert_same
from support.grpo import Config, Policy, Result, train
from support.wrapped import Side, job
from torch import Tensor, nn

from leangrpo_core import Lean

DRAWS = "the network draws random numbers"
CHANGES = "the network changes its buffers"


class Running(Policy):
    """Divides by a statistic that train mode carries on, here as a buffer written in place, below as a new tensor."""

    def __init__(self, **how: Any) -> None:
        super().__init__(**how)
        self.register_buffer("statistic", torch.ones(()))

    def carry_on(self, now: Tensor) -> None:
        self.statistic.mul_(0.5).add_(now / 2)  # type: ignore[operator, union-attr]

    def forward(self, latents: Tensor, *args: Any, **kwargs: Any) -> Any:
        if self.training:
            self.carry_on(latents.detach().abs().mean())
        return super().forward(latents / self.statistic, *args, **kwargs)  # type: ignore[operator]


class RunningAnew(Running):
    def carry_on(self, now: Tensor) -> None:
        self.statistic = self.statistic / 2 + now / 2  # type: ignore[operator]


class Dropping(Policy):
    """Dropout without a module."""

    def drops(self) -> bool:
        return self.training

    def forward(self, latents: Tensor, *args: Any, **kwargs: Any) -> Any:
        return super().forward(nn.functional.dropout(latents, 0.3, self.drops()), *args, **kwargs)


class DropsOnce(Dropping):
    """In its first call in train mode with a graph only."""

    def drops(self) -> bool:
        drops = self.training and not self.calls.get("dropped")
        self.calls["dropped"] = self.calls.get("dropped", 0) + drops
        return drops


class DropsOnOneRank(Dropping):
    def drops(self) -> bool:
        return self.training and torch.distributed.get_rank() == 1


def both(kind: Callable[[], Policy], config: Config) -> tuple[Result, Result]:
    results = []
    for lean in (Lean(), None):
        torch.manual_seed(0)
        net = kind()
        results.append(train(lean, net, torch.optim.AdamW(net.parameters(), lr=1e-2), config))
    return results[0], results[1]


@pytest.mark.parametrize(
    ("kind", "reason", "audit", "schedule"),
    [
        *[(kind, CHANGES, audit, "retain") for kind in (Running, RunningAnew) for audit in ("first", "off")],
        *[(Dropping, DRAWS, audit, "retain") for audit in ("first", "off")],
        *[
            (kind, why, "off", how)
            for kind, why in ((Running, CHANGES), (Dropping, DRAWS))
            for how in ("reweight", "auto")
        ],
    ],
)
def test_trained_as_natively(
    kind: type[Policy], reason: str, audit: str, schedule: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    for name, value in {"AUDIT": audit, "SCHEDULE": schedule, "REPORT_DIR": str(tmp_path)}.items():
        monkeypatch.setenv(f"LEANGRPO_{name}", value)
    assert_same(*both(kind, Config(rollouts=2)))
    windows = [json.loads(line) for line in (tmp_path / "rank0.jsonl").read_text().splitlines()]
    assert windows and all(window["kept"] == window["replayed"] == 0 for window in windows)
    if audit == "off" or kind is Dropping:
        assert reason in windows[0]["reasons"]
    assert "another order" not in capsys.readouterr().out


@pytest.mark.parametrize("audit", ["first", "off"])
def test_never_kept_again(audit: str, monkeypatch: pytest.MonkeyPatch, windows: Any) -> None:
    """Though no later call draws."""
    monkeypatch.setenv("LEANGRPO_AUDIT", audit)
    both(DropsOnce, Config(rollouts=3))
    assert [window["kept"] for window in windows()] == [0, 0, 0]
    assert all(list(window["reasons"]) == [DRAWS] for window in windows())


class Noisy(Policy):
    def forward(self, latents: Tensor, *args: Any, **kwargs: Any) -> Any:
        return super().forward(latents + 0.01 * torch.randn(latents.shape), *args, **kwargs)


@pytest.mark.parametrize("audit", ["first", "off"])
def test_who_draws(audit: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """In eval mode, too: upstream draws orders after the rollout, the runtime before it."""
    monkeypatch.setenv("LEANGRPO_AUDIT", audit)
    both(Noisy, Config())
    said = capsys.readouterr().out
    assert said.count("the network draws from the CPU generator") == 1 and "a reward, perhaps" not in said


def sharded(rank: int, world: int, kind: str, policies: list[type[Policy]]) -> list[tuple[Side, Side]]:
    config = {"rows": 2, "accumulate": 2, "steps": 4, "trained": 1}
    options = [{"policy": p, "config": config, "env": {"LEANGRPO_AUDIT": "off"}} for p in policies]
    return [(job(rank, world, kind, True, case), job(rank, world, kind, False, case)) for case in options]


@pytest.mark.parametrize("kind", ["fsdp", "fsdp2", "ddp"])
def test_ranks_make_the_call_together(kind: str) -> None:
    """Ranks keep calls of other steps, and one of them finds nothing: where a forward communicates, all make it."""
    # Not Running under DDP, which hands the first rank's buffers to all before each call that goes through it.
    policies = [Running, Dropping, DropsOnOneRank] if kind != "ddp" else [Dropping]
    for pairs in ranks.run(sharded, 2, kind, policies, seconds=30):
        for ours, native in pairs:
            assert_same(ours.result, native.result, 1e-6 if kind == "ddp" else 0.0)  # there averaged in another order
            assert all(window["replayed"] == 0 for window in ours.windows)
