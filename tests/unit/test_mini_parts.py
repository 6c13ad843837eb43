"""The embedded trainer's own parts: sampler, log-probabilities, reward, average; and the demo's verdict."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import pytest
import torch

from leangrpo_tools import data
from leangrpo_tools.demo import Comparison, read_metrics

TREE = data.data_root() / "patches/mini/tree"


@pytest.fixture(autouse=True)
def on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(TREE))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)


def test_noise_levels_fall_from_one_to_zero() -> None:
    from mini_grpo.sampling import noise_levels

    levels = noise_levels(8, 3.0)
    assert (levels[0], levels[-1], len(levels)) == (1.0, 0.0, 9)
    assert levels == sorted(levels, reverse=True)


def test_log_likelihood_is_the_normal_density() -> None:
    from mini_grpo.sampling import log_likelihood

    mean, outcome = torch.randn(2, 5, 3), torch.randn(2, 5, 3)
    expected = torch.distributions.Normal(mean, 0.3).log_prob(outcome).mean(dim=(1, 2))
    torch.testing.assert_close(log_likelihood(outcome, mean, 0.3), expected)


def test_transition_without_noise_follows_the_velocity() -> None:
    from mini_grpo.sampling import transition

    state, velocity = torch.randn(1, 4, 3), torch.randn(1, 4, 3)
    mean, deviation = transition(velocity, state, 0.8, 0.6, 0.0)
    torch.testing.assert_close(mean, state - (0.8 - 0.6) * velocity)
    assert deviation == 0
    assert transition(velocity, state, 0.8, 0.6, 0.5)[1] == pytest.approx(0.5 * math.sqrt(0.2))


def test_advantages_are_standardised_per_group() -> None:
    from mini_grpo.rewards import group_advantages

    advantages = group_advantages(torch.tensor([1.0, 2.0, 3.0, 10.0, 10.0, 13.0]), 3).view(2, 3)
    torch.testing.assert_close(advantages.mean(dim=1), torch.zeros(2), atol=1e-6, rtol=0)
    torch.testing.assert_close(advantages.std(dim=1), torch.ones(2))


def test_prompts_repeat_and_differ() -> None:
    from mini_grpo.data import prompt_at

    first, second, again = (prompt_at(number, 32, torch.device("cpu")) for number in (0, 1, 6))
    assert torch.equal(first.tokens, again.tokens) and not torch.equal(first.tokens, second.tokens)


def test_average_trades_places_and_back() -> None:
    from mini_grpo.ema import Average

    module = torch.nn.Linear(2, 2)
    start = module.weight.detach().clone()
    average = Average(module, 0.5)
    torch.nn.init.zeros_(module.weight)
    average.follow()
    average.swap()
    torch.testing.assert_close(module.weight.detach(), start / 2)
    average.swap()
    assert not module.weight.detach().any()


def record(update: int, gradients: str = "g", weights: str = "w") -> dict[str, object]:
    return {
        "update": update, "gradients": gradients, "weights": weights, "seconds": 2.0,
        "forwards": {"grad": 24, "no_grad": 32},
    }  # fmt: skip


def test_comparison_agrees(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(record(n)) + "\n" for n in (1, 2)))
    run = read_metrics(tmp_path / "a.jsonl")
    assert Comparison(run, run).equal
    assert "native 2.00, patched 2.00, ratio 1.00" in Comparison(run, run).speed()
    assert "equal" in Comparison(run, run).table() and "2 updates" in Comparison(run, run).verdict()


@pytest.mark.parametrize(
    ("native", "patched"),
    [
        ([record(1)], [record(1, gradients="other")]),
        ([record(1)], [record(1, weights="other")]),
        ([record(1), record(2)], [record(1)]),
        ([], []),
        ([record(1, gradients="")], [record(1, gradients="")]),
    ],
)
def test_comparison_never_passes_by_accident(native, patched) -> None:
    assert not Comparison(native, patched).equal
    assert Comparison(native, patched).verdict().startswith("NOT EQUAL")
    assert Comparison(native, patched).table()


def test_missing_metrics_are_no_agreement(tmp_path: Path) -> None:
    assert read_metrics(tmp_path / "none.jsonl") == []
