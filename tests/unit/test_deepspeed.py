"""A launch with DeepSpeed: nothing is kept from the first rollout on, and the run says what to use instead."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from support import ranks
from support.wrapped import Engine
from torch import Tensor, nn

from leangrpo_core import Lean

ROWS, BATCHES, STEPS, EPOCHS = 2, 2, 3, 2


class Network(nn.Module):
    """Counts its calls with and without grad."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.calls = {"grad": 0, "no_grad": 0}

    def forward(self, x: Tensor) -> Tensor:
        self.calls["grad" if torch.is_grad_enabled() else "no_grad"] += 1
        return self.layer(x).tanh()


def train(rank: int, world: int, folder: str, env: dict[str, str]) -> dict[str, Any]:
    """Two epochs as a patched script of FlowGRPO makes them: around the engine in the rollout, later through it."""
    os.environ |= env | {"LEANGRPO_REPORT_DIR": folder}
    torch.manual_seed(0)
    lean, net = Lean(), Network()
    engine = Engine(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    torch.manual_seed(rank)
    orders, gradients = [], []
    for _ in range(EPOCHS):
        rolled = []
        for batch in range(BATCHES):
            x = torch.randn(ROWS, 4)
            with torch.no_grad(), lean.rollout_batch(
                batch, batches=BATCHES, rows=ROWS, steps=STEPS, window=1, model=engine
            ):  # fmt: skip
                for step in range(STEPS):
                    lean.rollout_call(net, lean.rows, step, x + step)
            rolled.append(x)
        samples = {"x": torch.cat(rolled)} | lean.identity()
        state = torch.get_rng_state()
        order = lean.row_order(ROWS * BATCHES, ids=samples["lean_row"])
        torch.set_rng_state(state)
        orders.append((order.tolist(), torch.randperm(ROWS * BATCHES).tolist()))
        samples = {name: value[order] for name, value in samples.items()}
        for first in range(0, ROWS * BATCHES, ROWS):
            part = {name: value[first : first + ROWS] for name, value in samples.items()}
            for step in range(STEPS):
                out = lean.policy_call(engine, part["lean_row"], part["lean_step"][:, step], part["x"] + step)
                out.square().mean().backward()
            lean.flush(engine, optimizer)
            gradients.append([p.grad.clone() for p in net.parameters() if p.grad is not None])
            optimizer.step()
            optimizer.zero_grad()
    windows = [json.loads(line) for file in Path(folder).glob("*.jsonl") for line in file.read_text().splitlines()]
    return {"calls": net.calls, "orders": orders, "gradients": gradients, "windows": windows}


@pytest.mark.parametrize("sync", ["upstream", "late"])
def test_nothing_is_kept_and_the_run_says_why(
    sync: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LEANGRPO_AUDIT", "first")
    env = {"LEANGRPO_SYNC": sync}
    ours = ranks.run(train, 2, str(tmp_path), env)
    said = [line for line in capfd.readouterr().out.splitlines() if "DeepSpeed" in line or "no wrapper" in line]
    native = ranks.run(train, 2, str(tmp_path / "native"), env | {"LEANGRPO_SCHEDULE": "recompute"})
    calls = EPOCHS * BATCHES * STEPS
    for lean, upstream in zip(ours, native, strict=True):
        assert lean["calls"] == upstream["calls"] == {"grad": calls, "no_grad": calls}
        assert all(order == drawn for order, drawn in lean["orders"]) and lean["windows"] == []
        for a, b in zip(lean["gradients"], upstream["gradients"], strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0)
    assert len(said) == 1 and "multi_gpu.yaml" in said[0] and "nothing is kept" in said[0]
    # Sharing gradients is the engine's business. This one does not, and the ranks have other samples.
    assert not torch.equal(ours[0]["gradients"][0][0], ours[1]["gradients"][0][0])
