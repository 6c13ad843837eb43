"""Whether upstream has thrown away gradients that wait on each rank for their reduction, and letting go of them.

Natively they are in `.grad`, where `zero_grad()` finds them. FSDP1 leaves them there until they are reduced. FSDP2
keeps them out of sight, so zeros are put into one weight's `.grad`: what upstream does to them, it does to all.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from . import fsdp1, guard, layermajor


class Leftover:
    """Watches the gradients of one network while they wait."""

    def __init__(self) -> None:
        self._mark: tuple[nn.Parameter, Tensor, int] | None = None
        self._ours = -1  # the mark's own version of its values, if the zeros are ours

    def watch(self, net: nn.Module) -> None:
        """From here on gradients may wait."""
        self.unmark()
        shares = (p for p in net.parameters() if p.requires_grad and isinstance(p, DTensor))
        parameter = next(shares, None) if isinstance(net, guard.FSDPModule) else None
        if parameter is None:
            return
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
            self._ours = guard.local(parameter.grad)._version
        self._mark = parameter, parameter.grad, parameter.grad._version

    def marked_gone(self) -> bool:
        """Under FSDP2: whether upstream has set the mark to None or written into it. FSDP2 adds to its local values."""
        if self._mark is None:
            return False
        parameter, grad, version = self._mark
        return parameter.grad is not grad or grad._version != version

    def gone(self, net: nn.Module) -> bool:
        """Whether upstream has thrown them away. Outside forward and backward only."""
        if isinstance(net, FullyShardedDataParallel):
            return all(p.grad is None for p in guard.parameters_of(net) if p.requires_grad)
        return self.marked_gone()

    def unclear(self, net: nn.Module) -> bool:
        """Under FSDP1: nothing but zeros beside what an earlier group has reduced. Upstream's, or thrown away?"""
        grads = (p.grad for p in guard.parameters_of(net))
        return fsdp1.reduced_beside(net) and not any(_nonzero(grads))

    def forget(self, net: nn.Module) -> None:
        """Drops what waits, and what FSDP1 has put aside to add it to."""
        if isinstance(net, FullyShardedDataParallel):
            fsdp1.forget_gradients(net)
        else:
            layermajor.forget_gradients(net)
        if self._mark is not None and self._ours >= 0:
            self._mark[0].grad = None
        self._mark, self._ours = None, -1

    def unmark(self) -> None:
        """Takes zeros back to which no gradient was added: natively such a weight has None."""
        mark, ours = self._mark, self._ours
        self._mark, self._ours = None, -1
        if mark is not None and mark[0].grad is mark[1] and guard.local(mark[1])._version == ours:
            mark[0].grad = None


def _nonzero(grads: Iterable[Tensor | None]) -> Iterable[bool]:
    return (bool(grad.any()) for grad in grads if grad is not None)
