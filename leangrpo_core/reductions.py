"""How gradients of the network are reduced over the ranks, by its wrapper and LEANGRPO_SYNC."""

from typing import Any

import torch
from torch import nn

from . import agree, keep, sync
from .late import Late
from .report import Report


class Reductions:
    """The wrapper of the network that was looked at last, and what follows from it.

    Attributes:
        setting: LEANGRPO_SYNC.
        net, wrapper: None before the first look.
        late: reduces natively recomputed calls once for all.
    """

    def __init__(self, report: Report) -> None:
        self._report = report
        self._compared = False
        self.setting = "upstream"
        self.net: nn.Module | None = None
        self.wrapper: sync.Wrapper | None = None
        self.late = Late(report.once)

    def classify(self, net: nn.Module, rollout: bool = False) -> sync.Wrapper:
        """How to treat `net`. A rollout may go around the wrapper; that is not what a user should be told about."""
        if self.net is not net or self.wrapper is None:
            around = rollout and self.net is not None and sync.bare(self.net) is sync.bare(net)
            self.net, self.wrapper = net, sync.classify(net, self.setting != "upstream")
            told = "" if around else self.wrapper.told(self.setting)
            if told:
                self._report.once(told)
        return self.wrapper

    def with_room(self, net: nn.Module, wrapper: sync.Wrapper, device: torch.device) -> sync.Wrapper:
        """One backward for all graphs only where every rank has room for it, else one after the other from here on."""
        reason = keep.no_room(wrapper, net, device)
        if agree.minimum(int(not reason)) == 1:
            return wrapper
        self._report.once(f"FSDP1: {reason or 'no room on another rank'}; gradients are reduced as upstream does")
        self.wrapper = sync.classify(net)
        return self.wrapper

    def native(self, net: nn.Module, args: Any, kwargs: Any, *, due: bool, apart: bool, audited: bool) -> Any:
        """A native call of the update. Where gradients are reduced late, its backward may leave them as they are.

        Args:
            due: gradients are due after it.
            apart: other ranks may replay in its place, so DDP must not communicate.
            audited: replayed calls of this update are compared with native ones, which must be reduced alike.
        """
        if self.setting != "upstream":
            wrapper = self.classify(net)
            if wrapper.late:
                return self.late.call(wrapper, (net, args, kwargs), due, upstreams=audited)
        if apart or self.setting != "upstream":
            net, args, kwargs = sync.around_ddp(net, args, kwargs)
        return net(*args, **kwargs)

    def new_rollout(self) -> None:
        """See :meth:`Late.new_rollout`."""
        if self.wrapper is not None:
            self.late.new_rollout(self.wrapper)

    def finish(self, model: nn.Module, flush: str) -> None:
        """At the boundary: reduces what waits, and averages where the flush, or the setting, asks for it."""
        if self.wrapper is not None:
            self.late.finish(self.wrapper)
        late = self.setting != "upstream" and agree.world_size() > 1 and sync.classify(model).kind in ("none", "ddp")
        if flush != "flat" and not late:
            return
        parameters = [p for p in model.parameters() if p.requires_grad]
        sync.flat_mean(parameters)
        if not self._compared:
            self._compared = True
            sync.same_gradients(parameters)
