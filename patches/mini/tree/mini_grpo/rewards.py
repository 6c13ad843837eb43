"""The reward: does the picture have the prompt's colour, and is it calm rather than noisy."""

from __future__ import annotations

from torch import Tensor


def colour_reward(picture: Tensor, colour: Tensor) -> Tensor:
    """Score of one picture [1, tokens, channels] against a colour [3]; higher is better, 0 is perfect.

    The first three channels are read as red, green and blue.
    """
    rgb = picture[0, :, :3].float()
    off_colour = (rgb.mean(dim=0) - colour).square().mean()
    restless = rgb.var(dim=0).mean()
    return -(off_colour + 0.1 * restless)


def group_advantages(rewards: Tensor, group: int) -> Tensor:
    """Standardise rewards [n] inside each run of `group` samples of one prompt."""
    grouped = rewards.view(-1, group)
    centred = grouped - grouped.mean(dim=1, keepdim=True)
    return (centred / (grouped.std(dim=1, keepdim=True) + 1e-6)).flatten()
