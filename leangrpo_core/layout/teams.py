"""Exchange among the ranks that serve a prompt together: `size` neighbours each."""

import hashlib
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .. import agree
from ..errors import LeanError
from ..values import map_tensors


def fingerprint(state: Tensor) -> str:
    """Of a generator's state, the same in every process: Python's own hash of bytes is not."""
    return hashlib.sha256(state.numpy().tobytes()).hexdigest()


class Team:
    """The team of this rank.

    Args:
        size: ranks per team; all of them, and every team, call this together.

    Raises:
        LeanError: LG613 if two members would draw the same noise.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.first = agree.rank() // size * size
        self.member = agree.rank() - self.first
        self._group: Any = None
        if size > 1:
            self._group, _ = dist.new_subgroups(size)
            self._compare_generators()

    def _compare_generators(self) -> None:
        states = [torch.get_rng_state()]
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            states.append(torch.cuda.get_rng_state())
        # Upstream may draw noise from either; a seed that is the same on two ranks sets both alike.
        found = agree.everyones([fingerprint(state) for state in states])
        ours = found[self.first : self.first + self.size]
        twins = [rank for rank, states in enumerate(ours) if states in ours[:rank]]
        if agree.anyones([bool(twins)])[0]:
            raise LeanError(
                "LG613",
                "ranks that would share a prompt have the same random state: they would draw the same samples",
                "seed each rank differently, or set LEANGRPO_LAYOUT=native",
            )

    def everyones(self, value: Any) -> list[Any]:
        """`value` of each member, by member: tensors, plain values and containers of them.

        Tensors come where this rank's own at that place is; else where collectives have theirs.
        """
        return [self._from(member, value) for member in range(self.size)] if self.size > 1 else [value]

    def _from(self, member: int, value: Any) -> Any:
        ours = member == self.member
        tensors: list[Tensor] = []

        def out(tensor: Tensor) -> Tensor:
            tensors.append(tensor)
            return torch.tensor(len(tensors) - 1)

        described: list[Any] = [None]
        frame = map_tensors(value, out)
        if ours:
            described = [(frame, [(tuple(t.shape), t.dtype) for t in tensors])]
        dist.broadcast_object_list(described, self.first + member, group=self._group, device=agree.device())
        frame, shapes = described[0]
        received = []
        for place, (shape, dtype) in enumerate(shapes):
            theirs = (
                tensors[place].to(agree.device()).contiguous()
                if ours
                else (torch.empty(shape, dtype=dtype, device=agree.device()))
            )
            dist.broadcast(theirs, self.first + member, group=self._group)
            received.append(theirs.to(tensors[place].device) if place < len(tensors) else theirs)
        return value if ours else map_tensors(frame, lambda place: received[int(place)])
