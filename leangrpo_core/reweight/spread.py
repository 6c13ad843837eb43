"""Sums per prompt group, spread over the ranks, where ranks share prompts and weights.

A rank's own sums would be two whole gradients. Instead each owns a run of every weight's places, of all groups. As
samples become complete each rank sends every other one its run, weight by weight. So a rank holds the gradient that
comes in and two shards per team of ranks: with g ranks per prompt one whole gradient and 2/g of one.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor

from .. import agree
from .buffers import Buffers, Gradient, Group, add_up


class Sent(NamedTuple):
    """A sample that goes into its group's sums.

    Attributes:
        row: its id on its rank.
        group: the group's number there.
        reward: as it came.
        sizes: how many values each weight's gradient has; 0 where there is none.
    """

    row: int
    group: int
    reward: float
    sizes: tuple[int, ...]


def runs(size: int, ranks: int) -> list[int]:
    """How many of `size` places each rank owns, one after the other."""
    each = -(-size // ranks)
    return [max(min(each, size - rank * each), 0) for rank in range(ranks)]


def run_of(whole: Tensor) -> Tensor:
    """This rank's run of a contiguous tensor; a view."""
    return whole.view(-1).split(runs(whole.numel(), agree.world_size()))[agree.rank()]


class SpreadBuffers(Buffers):
    """As `Buffers` with `affine`, but groups are those of all ranks, numbered (team, number there).

    Args:
        group, base: as there, of this rank's own samples.
        team: how many ranks, one after the other, serve a prompt together.
        weights: what gradients belong to, in order, here and now.
    """

    def __init__(self, group: int, base: int, team: int, weights: Sequence[Tensor]) -> None:
        super().__init__(True, group, base)
        self._team, self._weights = team, weights

    @property
    def live(self) -> float:
        sums = sum(1 + (group.products is not None) for group in self.groups.values())
        return len(self.single) + sums / agree.world_size()

    def _fold(self, row: int) -> None:
        """Not before all ranks do: :meth:`exchange`."""

    def exchange(self) -> None:
        ours: list[Sent] = []
        for row, grads in self.single.items():
            if self._folds(row):
                sizes = tuple(0 if grad is None else grad.numel() for grad in grads)
                ours.append(Sent(row, self._number(row), self._rewards[row], sizes))
        everyones: list[list[Sent]] = agree.everyones(ours)
        for turn in range(max(map(len, everyones))):
            self._take_in(
                {rank: found[turn] for rank, found in enumerate(everyones) if turn < len(found)},
                self.single[ours[turn].row] if turn < len(ours) else [],
            )
            self.peak = max(self.peak, self.live)
            if turn < len(ours):
                del self.single[ours[turn].row]

    def _take_in(self, sent: Mapping[int, Sent], grads: Gradient) -> None:
        """A sample of each rank that has one, and this rank's own gradient, which is used up."""
        groups: dict[int, tuple[Group, float]] = {}
        for rank, sample in sent.items():
            key = rank // self._team, sample.group
            group = self.groups.setdefault(key, Group(sample.reward, [None] * len(sample.sizes)))
            x = group.rewards[rank, sample.row] = sample.reward - group.reference
            groups[rank] = group, x
        for place, weight in enumerate(self._weights):
            sizes = {rank: sample.sizes[place] for rank, sample in sent.items() if sample.sizes[place]}
            if not sizes:
                continue
            own = grads[place] if grads else None
            if own is not None:
                grads[place] = None
            shares = _from_each(list(sizes), own, max(sizes.values()), weight)
            for rank, share in zip(sizes, shares, strict=True):
                group, x = groups[rank]
                group.take_in(place, share, x)

    def everyones(self, points: Mapping[int, Any]) -> dict[Any, Any]:
        found = agree.everyones(dict(points))
        return {(rank, row): point for rank, theirs in enumerate(found) for row, point in theirs.items()}

    def name(self, row: int) -> Any:
        return agree.rank(), row

    def take(self, weights: Mapping[int, float], lines: Mapping[Any, tuple[float, float]]) -> Gradient:
        self.shares = []
        for number, line in lines.items():
            self.shares = add_up(self.shares, self.groups.pop(number).weighted(*line))
        return super().take(weights, {})


def _from_each(senders: Sequence[int], own: Tensor | None, size: int, like: Tensor) -> list[Tensor]:
    """This rank's run of the gradients of `senders`, `size` values each, of the dtype and where the weight `like` is.

    Args:
        own: this rank's gradient, if it is one of them.
    """
    split = runs(size, agree.world_size())
    run = split[agree.rank()]
    received = like.new_empty(len(senders) * run)
    out = [run if rank in senders else 0 for rank in range(agree.world_size())]
    given = like.new_empty(0) if own is None else own.reshape(-1)
    dist.all_to_all_single(received, given, out, split if own is not None else [0] * len(split))
    return list(received.view(len(senders), run))
