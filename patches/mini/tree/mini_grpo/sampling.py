"""Draw pictures from the policy with a stochastic flow-matching sampler that knows its own log-probabilities."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn

from mini_grpo.data import Prompt

SIDE, CHANNELS = 16, 16


@dataclass
class Trajectory:
    """One sample: the noisy states [1, T + 1, tokens, channels], log-probs [1, T - 1] and the finished picture."""

    states: Tensor
    log_probs: Tensor
    picture: Tensor


@dataclass(frozen=True)
class Sampler:
    """How to sample: noise levels from 1 to 0, diffusion `eta`, and whether the network runs in bf16 autocast."""

    levels: list[float]
    eta: float
    bf16: bool


def noise_levels(steps: int, shift: float) -> list[float]:
    """Noise levels from 1 (pure noise) down to 0, `steps + 1` of them, denser near 1 for shift > 1."""
    plain = (1 - n / steps for n in range(steps + 1))
    return [shift * level / (1 + (shift - 1) * level) for level in plain]


def grid_ids(device: torch.device) -> Tensor:
    """Positions of the picture's tokens, [SIDE * SIDE, 3]."""
    rows, columns = torch.meshgrid(torch.arange(SIDE), torch.arange(SIDE), indexing="ij")
    return torch.stack([torch.zeros_like(rows), rows, columns], dim=-1).reshape(-1, 3).to(device)


def conditioning(prompt: Prompt, level: float) -> dict[str, Tensor]:
    """Everything the network is given beside the noisy state, for one prompt at one noise level."""
    device = prompt.tokens.device
    return {
        "encoder_hidden_states": prompt.tokens,
        "pooled_projections": prompt.pooled,
        "timestep": torch.full((1,), level, device=device),
        "txt_ids": torch.zeros(prompt.tokens.shape[1], 3, device=device),
        "img_ids": grid_ids(device),
    }


def transition(velocity: Tensor, state: Tensor, level: float, following: float, eta: float) -> tuple[Tensor, float]:
    """Mean and standard deviation of the next state under the reverse-time SDE with constant diffusion `eta`."""
    span = level - following
    noise_estimate = state + (1 - level) * velocity.float()
    score = -noise_estimate / level
    return state - span * velocity.float() + 0.5 * eta**2 * span * score, eta * math.sqrt(span)


def log_likelihood(outcome: Tensor, mean: Tensor, deviation: float) -> Tensor:
    """Gaussian log-density of `outcome`, averaged over tokens and channels: [batch]."""
    scaled = (outcome - mean) / deviation
    return (-0.5 * scaled.square() - math.log(deviation * math.sqrt(2 * math.pi))).mean(dim=(1, 2))


def draw(
    policy: nn.Module,
    prompt: Prompt,
    sampler: Sampler,
    noise: torch.Generator,
) -> Trajectory:
    """Sample one picture. The last step adds no noise, so it has no log-probability and is never trained."""
    device = prompt.tokens.device
    state = torch.randn(1, SIDE * SIDE, CHANNELS, generator=noise, device=noise.device).to(device)
    states, log_probs = [state], []
    for step, (level, following) in enumerate(pairwise(sampler.levels)):
        inputs = conditioning(prompt, level)
        with torch.autocast(device.type, torch.bfloat16, enabled=sampler.bf16):
            velocity = policy(hidden_states=state, return_dict=False, **inputs)[0]
        if step == len(sampler.levels) - 2:
            state = state - level * velocity.float()
        else:
            mean, deviation = transition(velocity, state, level, following, sampler.eta)
            fresh = torch.randn(state.shape, generator=noise, device=noise.device).to(device)
            state = mean + deviation * fresh
            log_probs.append(log_likelihood(state, mean, deviation))
        states.append(state)
    return Trajectory(torch.stack(states, dim=1), torch.stack(log_probs, dim=1), state)


@torch.no_grad()
def rollout(policy: nn.Module, prompts: list[Prompt], sampler: Sampler, noise: torch.Generator) -> list[Trajectory]:
    """Sample one picture per entry of `prompts`. Training and evaluation both come through here."""
    policy.eval()
    drawn = []
    for prompt in prompts:
        drawn.append(draw(policy, prompt, sampler, noise))
    return drawn
