"""Reduces gradients of natively recomputed calls once per update, or prompt group, under FSDP1 and FSDP2.

Both have a switch for gradient accumulation without communication. It is read in the backward, which is upstream's own
and comes after the call, so it is turned off at a call and stays off until the last one before gradients are due. That
one's backward reduces what has added up. Until then each rank holds a whole gradient.
"""

import math
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel

from . import agree, fsdp1, layermajor, memory, sync
from .capture import where
from .errors import LeanError
from .guard import FSDPModule
from .kept import autocast_state
from .leftover import Leftover
from .values import tensors_of


@dataclass
class _Call:
    """A native call, so that it can be made again."""

    net: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def __post_init__(self) -> None:
        self._device = where(self.args, self.kwargs)
        self._autocast = autocast_state(self._device)

    def walk_with_zeros(self) -> None:
        """Forward and backward once more, with zero for the loss: adds nothing, and lets the wrapper reduce."""
        enabled, dtype = self._autocast
        training = [module for module in self.net.modules() if module.training]
        for module in training:
            module.training = False  # no dropout, and no statistics counted twice
        try:
            with (
                torch.random.fork_rng([self._device] if self._device.type == "cuda" else []),
                torch.enable_grad(),
                torch.autocast(self._device.type, dtype=dtype, enabled=enabled),
            ):
                outs = [out for out in tensors_of(self.net(*self.args, **self.kwargs)) if out.requires_grad]
            torch.autograd.backward(outs, [torch.zeros_like(out) for out in outs])
        finally:
            for module in training:
                module.training = True


class Late:
    """The switch of one process, for one network at a time.

    Args:
        once: says something to the user once.

    Attributes:
        pending: gradients may be waiting for their reduction.
    """

    def __init__(self, once: Callable[[str], None]) -> None:
        self._once = once
        self._off: ExitStack | None = None
        self._allowed: bool | None = None  # in this update, once it was looked at
        self._last: _Call | None = None
        self._leftover = Leftover()
        self.pending = False

    def call(self, wrapper: sync.Wrapper, call: tuple[nn.Module, Any, Any], due: bool, upstreams: bool) -> Any:
        """A native call of the update, under grad.

        Args:
            call: the network and its arguments.
            due: gradients are due after it.
            upstreams: in this update they must be reduced as upstream does.
        """
        net, args, kwargs = call
        if self.pending and self._leftover.marked_gone():
            self._forget(net)
        if self._allowed is None:
            self._allowed = not upstreams and self._may(wrapper, net, where(args, kwargs))
        if not self._allowed:
            return net(*args, **kwargs)
        if due:
            self.on()
        else:
            self._turn_off(net)
        result = net(*args, **kwargs)
        self._last = _Call(net, args, kwargs)
        for out in tensors_of(result):
            if due and out.requires_grad:
                out.register_hook(self._reduced)
        return result

    def on(self) -> None:
        """From here on backward passes reduce, as upstream's do."""
        off, self._off = self._off, None
        if off is not None:
            off.close()

    def keep_local(self, net: nn.Module) -> None:
        """From here on, and until :meth:`on`, backward passes leave gradients as they are on each rank."""
        self._turn_off(net)

    def was_reduced(self) -> None:
        """A backward through the whole network has reduced what was waiting."""
        self.pending = self.pending and self._off is not None

    def finish(self, wrapper: sync.Wrapper) -> None:
        """Reduces what is still waiting at the boundary: upstream made other calls than the rollout announced.

        Raises:
            LeanError: LG609 or LG612, on every rank, if some gradient is not reduced after that.
        """
        self.on()
        last, used = self._last, bool(self._allowed)
        self._last = self._allowed = None
        if last is None and agree.world_size() > 1 and wrapper.late and agree.anyones([self.pending])[0]:
            what = "parts of an update were walked, and none of its calls is left to reduce their gradients"
            raise LeanError("LG612", what, "set LEANGRPO_SYNC=group")
        if not used or last is None:
            return
        if agree.anyones([self.pending])[0]:
            last.walk_with_zeros()
            self.pending = False
        self._leftover.unmark()
        _check(wrapper, last.net)

    def new_rollout(self, wrapper: sync.Wrapper) -> None:
        """A rollout begins, and upstream's last update is not full: gradients may be waiting.

        They are forgotten if upstream has thrown them away, else reduced, so that upstream finds in `.grad` what it
        would find natively, to throw it away or to add to it. What is left of replayed calls goes on waiting.

        Raises:
            LeanError: LG610, on every rank, where it cannot be known.
        """
        last = self._last
        if not wrapper.late or last is None:
            return
        gone = self.pending and self._leftover.gone(last.net)
        unclear = self.pending and self._leftover.unclear(last.net)
        some_wait, some_kept, some_gone, some_clear = agree.anyones(
            [self.pending, self.pending and not gone, gone, self.pending and not unclear]
        )
        if not some_wait:
            self._leftover.unmark()
            self._last = self._allowed = None
        elif not some_kept:
            self._forget(last.net)
        elif some_gone or not some_clear:
            what = "a new rollout began, and it cannot be known whether gradients that were not reduced still count"
            raise LeanError("LG610", what, "set LEANGRPO_SYNC=upstream")
        else:
            self.finish(wrapper)

    def _forget(self, net: nn.Module) -> None:
        self.on()
        self._leftover.forget(net)
        self._last = self._allowed = None
        self.pending = False

    def _reduced(self, grad: Tensor) -> None:
        self.was_reduced()

    def _turn_off(self, net: nn.Module) -> None:
        self.pending = True
        if self._off is not None:
            return
        self._leftover.watch(net)
        self._off = ExitStack()
        if isinstance(net, FullyShardedDataParallel):
            self._off.enter_context(net.no_sync())
        elif isinstance(net, FSDPModule):
            net.set_requires_gradient_sync(False)
            self._off.callback(net.set_requires_gradient_sync, True)

    def _may(self, wrapper: sync.Wrapper, net: nn.Module, device: torch.device) -> bool:
        """Whether each rank has room for a whole gradient, and upstream does not use the switch itself."""
        needed, free = memory.gradient_bytes(net, wrapper.shards), memory.free_bytes(device)
        reason = ""
        if needed > free:
            reason = f"whole gradients take {needed / 1e9:.3g} GB, {free / 1e9:.3g} GB are free"
        elif isinstance(net, FullyShardedDataParallel) and not fsdp1.reduces(net):
            reason = "upstream uses no_sync itself"
        if agree.minimum(int(not reason)) == 1:
            return True
        reason = reason or "no room on another rank"
        self._once(f"{wrapper.kind}: {reason}; natively recomputed updates reduce gradients as upstream does")
        return False


def late_bytes(net: nn.Module) -> float:
    """What LEANGRPO_SYNC=late would add at its peak on this rank; infinite where it would not reduce once."""
    wrapper = sync.classify(net, late=True)
    if not wrapper.late:
        return math.inf
    joint = wrapper.flush == "joint"
    return memory.joint_bytes(net, wrapper.shards) if joint else memory.gradient_bytes(net, wrapper.shards)


def _check(wrapper: sync.Wrapper, net: nn.Module) -> None:
    if wrapper.kind == "fsdp1":
        # Outside forward and backward weights are this rank's share; a gradient that was not reduced is whole.
        left = sum(p.grad is not None and p.grad.shape != p.shape for p in net.parameters())
        if wrapper.shards == 1:
            sync.same_gradients([p for p in net.parameters() if p.requires_grad])
    else:
        left = layermajor.unreduced(net)
    most = -agree.minimum(-left)
    if most:
        raise LeanError(
            "LG612",
            f"up to {most} weights of a rank have a gradient that no backward reduced",
            "set LEANGRPO_SYNC=upstream: a part of this network is not used by every call",
        )
