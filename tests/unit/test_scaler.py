"""A trainer in DanceGRPO's shape that steps through a gradient scaler: patched by the recipe, it trains as before."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import leangrpo_core
from leangrpo_tools import recipe
from leangrpo_tools.transform import Patched, transform

TRAINER = """\
import torch


def run_sample_step(z, steps, transformer, noise):
    kept = [z]
    for i in range(steps):
        pred = transformer(z)
        z = (z - 0.1 * pred + 0.3 * torch.randn(z.shape, generator=noise)).detach()
        kept.append(z)
    return torch.stack(kept, dim=1)


def grpo_one_step(before, after, advantage, transformer):
    pred = transformer(before)
    score = -(after - before + 0.1 * pred).square().mean()
    return -advantage * torch.exp(score - score.detach())


def sample_reference_model(args, transformer, words):
    drawn = []
    for batch_idx in torch.chunk(torch.arange(len(words)), len(words)):
        with torch.no_grad():
            drawn.append(run_sample_step(words[batch_idx], args.sampling_steps - 1, transformer, args.noise))
    return torch.cat(drawn)


def train_one_step(args, transformer, optimizer, scaler, encoder_hidden_states, device):
    latents = sample_reference_model(args, transformer, encoder_hidden_states)
    rewards = latents[:, -1].mean((1, 2))
    samples = {"latents": latents, "advantages": (rewards - rewards.mean()) / (rewards.std() + 1e-8)}
    perms = torch.stack([torch.randperm(args.sampling_steps - 1) for _ in range(len(latents))]).to(device)
    samples_batched = {name: value.unsqueeze(1) for name, value in samples.items()}
    for i, x in enumerate(zip(*samples_batched.values())):
        sample = dict(zip(samples_batched, x))
        for _ in range(2):
            step = perms[i][_]
            loss = grpo_one_step(
                sample["latents"][:, step], sample["latents"][:, step + 1], sample["advantages"], transformer
            )
            scaler.scale(loss * args.size).backward()
        if (i + 1) % args.gradient_accumulation_steps == 0:
UPDATE
            optimizer.zero_grad()
"""

PLAIN = """\
            scaler.unscale_(optimizer)
            args.seen(transformer)
            torch.nn.utils.clip_grad_norm_(transformer.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()"""
BRANCHES = """\
            if scaler.is_enabled():
                scaler.unscale_(optimizer)
            args.seen(transformer)
            norm = torch.nn.utils.clip_grad_norm_(transformer.parameters(), 0.5)
            if norm is not None:
                scaler.step(optimizer)
                scaler.update()"""
EDITS = ("rollout", "rollout_rows", "policy", "policy_rows", "policy_steps", "window", "order", "identity", "flush")


def patched(text: str) -> str:
    """With the recipe's own edits, less those of options that this trainer has nothing for."""
    every = recipe.load("DanceGRPO").without_vendor().scripts["flux"].edits
    chosen = [edit for edit in every if edit.address.split(".")[1] in EDITS or edit.codemod == "add_parameter"]
    chosen += [edit for edit in every if edit.codemod == "insert_import"]
    result = transform("train.py", text.encode(), chosen)
    assert isinstance(result, Patched), [item.text() for item in result]
    return result.data.decode()


class Policy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


def train(text: str, scale: float) -> tuple[list[dict[str, Tensor]], list[float]]:
    """Gradients before clipping and weights of each update, and the scales."""
    torch.manual_seed(0)
    net = Policy()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, backoff_factor=2.0**-110, growth_interval=1)
    found: list[dict[str, Tensor]] = []
    scales: list[float] = []

    def seen(net: nn.Module) -> None:
        found.append({name: p.grad.clone() for name, p in net.named_parameters() if p.grad is not None})
        found.append({name: p.detach().clone() for name, p in net.named_parameters()})
        scales.append(scaler.get_scale())

    args = SimpleNamespace(
        sampling_steps=4, timestep_fraction=0.7, gradient_accumulation_steps=2, num_generations=4, use_group=True,
        size=1e3, seen=seen,
        noise=torch.Generator().manual_seed(1),  # as on a GPU, apart from what the CPU draws
    )  # fmt: skip
    names: dict[str, Any] = {}
    exec(compile(text, "train.py", "exec"), names)
    for _ in range(3):
        names["train_one_step"](args, net, optimizer, scaler, torch.randn(4, 3, 8, generator=args.noise), "cpu")
    return found, scales


@pytest.mark.parametrize("update", [PLAIN, BRANCHES], ids=["in the block", "in branches"])
@pytest.mark.parametrize("scale", [2.0**10, 2.0**127], ids=["fits", "overflows"])
def test_bitwise_through_a_scaler(update: str, scale: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the first scale is too large, so that a step is skipped. The scale grows after each step."""
    monkeypatch.setenv("LEANGRPO_REPORT_DIR", str(tmp_path))
    monkeypatch.setattr(leangrpo_core, "lean", leangrpo_core.Lean())
    text = TRAINER.replace("UPDATE", update)
    ours = patched(text)
    assert ours.index("lean.flush(") < ours.index("scaler.unscale_(")
    (native, scales), (found, same) = train(text, scale), train(ours, scale)
    assert scales == same and len(set(scales)) > 2
    assert len(native) == len(found) == 12 and all(native)
    for theirs, mine in zip(native, found, strict=True):
        assert theirs.keys() == mine.keys()
        assert all(torch.equal(theirs[name].view(torch.int32), mine[name].view(torch.int32)) for name in theirs)
    assert all(grad.isfinite().all() for grad in native[0].values()) == (scale < 2.0**100)
    windows = [json.loads(line) for line in (tmp_path / "rank0.jsonl").read_text().splitlines()]
    assert [window["replayed"] for window in windows] == [4, 4, 4]


def test_a_flush_below_the_unscaling_is_no_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """Why the place matters: the scaler would see no gradient in the first update, and the scaled one later."""
    monkeypatch.setattr(leangrpo_core, "lean", leangrpo_core.Lean())
    flush = "            lean.flush(transformer, optimizer)\n"
    unscale = "            scaler.unscale_(optimizer)\n"
    right = patched(TRAINER.replace("UPDATE", PLAIN))
    assert flush + unscale in right
    with pytest.raises(AssertionError):
        train(right.replace(flush + unscale, unscale + flush), 2.0**10)
