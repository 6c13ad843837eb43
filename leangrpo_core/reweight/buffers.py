"""Where the gradients of live samples are until their weight in the loss is known.

One gradient per sample, or, `affine`, two per prompt group: GRPO's advantages are affine in the reward, so G0 = sum g_i
and G1 = sum (r_i - r_ref) g_i suffice to make sum (a + b (r_i - r_ref)) g_i, however many samples there are. r_ref is
the group's first reward: without it a large mean would eat up the digits that tell samples apart.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

Gradient = list[Tensor | None]
"""One tensor per trainable weight, fp32 or wider; None where no backward has reached it."""


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which gradients of such a weight add up."""
    return torch.promote_types(dtype, torch.float32)


def add(into: Gradient, grads: Gradient, weight: float = 1.0) -> None:
    """`into` += weight * `grads`, in place. With weight 0 zeros where there was nothing: AdamW tells them from None."""
    for place, grad in enumerate(grads):
        if grad is None:
            continue
        held = into[place]
        if held is None:
            into[place] = grad * weight if weight else torch.zeros_like(grad)
        elif weight:
            held.add_(grad, alpha=weight)


def finite(grads: Gradient) -> bool:
    """Whether all values are; one device synchronisation."""
    flags = [grad.isfinite().all() for grad in grads if grad is not None]
    return bool(torch.stack([flag.to(flags[0].device) for flag in flags]).all()) if flags else True


@dataclass
class Group:
    """A prompt group's sums.

    Attributes:
        reference: r_ref.
        sums, products: G0 and G1; the second is empty as long as all its samples have the reward r_ref.
        rewards: r_i - r_ref of each sample in the sums.
    """

    reference: float
    sums: Gradient
    products: Gradient | None = None
    rewards: dict[int, float] = field(default_factory=dict)

    def fold(self, row: int, grads: Gradient, reward: float) -> None:
        """Takes a sample in; `grads` is used up."""
        x = reward - self.reference
        self.rewards[row] = x
        add(self.sums, grads)
        if not x:
            return
        if self.products is None:
            self.products = [grad if grad is None else grad.mul_(x) for grad in grads]
        else:
            add(self.products, grads, x)

    def weighted(self, a: float, b: float) -> Gradient:
        """a G0 + b G1, in the place of G0, which is used up."""
        for grad in self.sums:
            if grad is not None:
                grad.mul_(a)
        if self.products is not None:
            add(self.sums, self.products, b)
        return self.sums


class Buffers:
    """Gradients of the samples of a window.

    Args:
        affine: fold a sample into its group once its gradient is complete and its reward is known.
        group: how many samples, one after the other, share a prompt.
        base: the number of the first sample.

    Attributes:
        affine: as given.
        single: by sample, those that are not folded.
        groups: by number.
        peak: how many gradients there were at most at a time.
        waited: a sample's reward came after the next one's gradient had begun.
    """

    def __init__(self, affine: bool = False, group: int = 1, base: int = 0) -> None:
        self.affine, self._group, self._base = affine, max(group, 1), base
        self.single: dict[int, Gradient] = {}
        self.groups: dict[int, Group] = {}
        self._rewards: dict[int, float] = {}
        self._complete: set[int] = set()
        self.peak, self.waited = 0, False

    @property
    def live(self) -> int:
        """How many gradients there are."""
        return len(self.single) + sum(1 + (group.products is not None) for group in self.groups.values())

    def of(self, row: int, weights: int) -> Gradient:
        """The gradient of a sample, to be added to; empty the first time."""
        if row not in self.single:
            self.waited = self.waited or (self.affine and bool(self.single))
            self.single[row] = [None] * weights
            self.peak = max(self.peak, self.live)
        return self.single[row]

    def complete(self, rows: Iterable[int]) -> None:
        """Nothing more will be added to these samples' gradients."""
        for row in rows:
            self._complete.add(row)
            self._fold(row)

    def reward(self, row: int, reward: float) -> None:
        """A sample's reward."""
        self._rewards[row] = reward
        self._fold(row)

    def _fold(self, row: int) -> None:
        reward = self._rewards.get(row, math.nan)
        if not (self.affine and row in self.single and row in self._complete and math.isfinite(reward)):
            return
        if not finite(self.single[row]):  # it would spoil the sums
            return
        grads, number = self.single.pop(row), (row - self._base) // self._group
        if number not in self.groups:
            self.groups[number] = Group(reward, grads, rewards={row: 0.0})
        else:
            self.groups[number].fold(row, grads, reward)
        self.peak = max(self.peak, self.live)

    def take(self, weights: Mapping[int, float], lines: Mapping[int, tuple[float, float]]) -> Gradient:
        """The weighted sum, which ends all buffers.

        Args:
            weights: c of samples that have a gradient of their own; those without one are left out.
            lines: a and b of groups; those without are left out.
        """
        total: Gradient = []
        for number, line in lines.items():
            group = self.groups.pop(number).weighted(*line)
            total = _sum(total, group, 1.0)
        for row, c in weights.items():
            total = _sum(total, self.single.pop(row), c)
        self.single.clear()
        self.groups.clear()
        return total


def _sum(total: Gradient, grads: Gradient, weight: float) -> Gradient:
    if total:
        add(total, grads, weight)
        return total
    for grad in grads:
        if grad is not None:
            grad.mul_(weight) if weight else grad.zero_()
    return grads
