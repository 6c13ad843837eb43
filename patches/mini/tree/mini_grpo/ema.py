"""An exponential moving average of the weights, to evaluate with."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP


class Average:
    """Follows a module's weights and can trade places with them. Under FSDP every rank keeps the whole average."""

    def __init__(self, module: nn.Module, decay: float) -> None:
        self._module, self._decay = module, decay
        with self._whole():
            self._mean = [p.detach().clone() for p in module.parameters()]

    def _whole(self) -> AbstractContextManager[None]:
        # Outside this, FSDP shows shards or, after a forward, partly gathered weights: their shapes change.
        return FSDP.summon_full_params(self._module) if isinstance(self._module, FSDP) else nullcontext()

    @torch.no_grad()
    def follow(self) -> None:
        """Move the average a little towards the weights."""
        with self._whole():
            torch._foreach_lerp_(self._mean, [p.detach() for p in self._module.parameters()], 1 - self._decay)

    @torch.no_grad()
    def swap(self) -> None:
        """Put the average into the module and the weights aside; a second call undoes it."""
        with self._whole():
            for live, mean in zip(self._module.parameters(), self._mean, strict=True):
                aside = live.detach().clone()
                live.copy_(mean)
                mean.copy_(aside)
