"""Where the gradients of live samples are until their weight in the loss is known.

One gradient per sample, or, `affine`, two per prompt group: GRPO's advantages are affine in the reward, so G0 = sum g_i
and G1 = sum (r_i - r_ref) g_i suffice to make sum (a + b (r_i - r_ref)) g_i, however many samples there are. r_ref is
the group's first reward: without it a large mean would eat up the digits that tell samples apart.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

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
        if grad is not None:
            add_at(into, place, grad, weight)


def add_at(into: Gradient, place: int, grad: Tensor, weight: float = 1.0) -> None:
    """The same for one weight's gradient."""
    held = into[place]
    if held is None:
        into[place] = grad * weight if weight else torch.zeros_like(grad)
    elif weight:
        held.add_(grad, alpha=weight)


def finite(grads: Gradient) -> bool:
    """Whether all values are; one device synchronisation.

    Their sums tell: a value that is not finite makes its sum so, and a gradient is read once (on the CPU `isfinite`
    takes far longer). A sum beyond the dtype's range counts as not finite, too: that sample is recomputed.
    """
    sums = [grad.sum() for grad in grads if grad is not None]
    return bool(torch.stack([total.to(sums[0].device) for total in sums]).isfinite().all()) if sums else True


@dataclass
class Group:
    """A prompt group's sums.

    Attributes:
        reference: r_ref.
        sums, products: G0 and G1; the second is empty as long as all its samples have the reward r_ref.
        rewards: r_i - r_ref of each sample in the sums, by its name (:meth:`Buffers.name`).
    """

    reference: float
    sums: Gradient
    products: Gradient | None = None
    rewards: dict[Any, float] = field(default_factory=dict)

    def fold(self, row: int, grads: Gradient, reward: float) -> None:
        """Takes a sample in."""
        x = reward - self.reference
        self.rewards[row] = x
        for place, grad in enumerate(grads):
            if grad is not None:
                self.take_in(place, grad, x)

    def take_in(self, place: int, grad: Tensor, x: float) -> None:
        """Takes in one weight's gradient of a sample whose reward is r_ref + x."""
        add_at(self.sums, place, grad)
        if x and self.products is None:
            self.products = [None for _ in self.sums]
        if self.products is not None:
            add_at(self.products, place, grad, x)

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
        affine, group, base: as given.
        single: by sample, those that are not folded.
        groups: by number.
        peak: how many gradients there were at most at a time.
        waited: a sample's reward came after the next one's gradient had begun.
        shares: of the weighted sum, what this rank has for all; only where sums are spread over ranks (`spread.py`).
    """

    def __init__(self, affine: bool = False, group: int = 1, base: int = 0) -> None:
        self.affine, self.group, self.base = affine, max(group, 1), base
        self.single: dict[int, Gradient] = {}
        self.groups: dict[Any, Group] = {}
        self.shares: Gradient = []
        self._rewards: dict[int, float] = {}
        self._complete: set[int] = set()
        self.peak, self.waited = 0.0, False

    @property
    def live(self) -> float:
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

    def _folds(self, row: int) -> bool:
        """Whether a sample can go into its group's sums: not if it would spoil them."""
        reward = self._rewards.get(row, math.nan)
        ready = self.affine and row in self.single and row in self._complete and math.isfinite(reward)
        return ready and finite(self.single[row])

    def _number(self, row: int) -> int:
        return (row - self.base) // self.group

    def _fold(self, row: int) -> None:
        if not self._folds(row):
            return
        grads, number, reward = self.single.pop(row), self._number(row), self._rewards[row]
        if number not in self.groups:
            self.groups[number] = Group(reward, grads, rewards={row: 0.0})
        else:
            self.groups[number].fold(row, grads, reward)
        self.peak = max(self.peak, self.live)

    def exchange(self) -> None:
        """Takes in what is complete on any rank, where sums are spread over ranks. All call it at the same places."""

    def name(self, row: int) -> Any:
        """By which groups know a sample."""
        return row

    def everyones(self, points: Mapping[int, Any]) -> dict[Any, Any]:
        """What is known of each sample, by its name: of all ranks' samples where sums are spread over them."""
        return dict(points)

    def take(self, weights: Mapping[int, float], lines: Mapping[Any, tuple[float, float]]) -> Gradient:
        """The weighted sum of this rank's gradients, which ends all buffers.

        Args:
            weights: c of samples that have a gradient of their own; those without one are left out.
            lines: a and b of groups; those without are left out.
        """
        total: Gradient = []
        for number, line in lines.items():
            total = add_up(total, self.groups.pop(number).weighted(*line))
        for row, c in weights.items():
            total = add_up(total, self.single.pop(row), c)
        self.single.clear()
        self.groups.clear()
        return total


def add_up(total: Gradient, grads: Gradient, weight: float = 1.0) -> Gradient:
    """total + weight * grads, in the place of one of them; an empty total is nothing."""
    if total:
        add(total, grads, weight)
        return total
    for grad in grads:
        if grad is not None:
            grad.mul_(weight) if weight else grad.zero_()
    return grads
