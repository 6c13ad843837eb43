"""How a kept call runs: under grad, in train mode, measured, its graph cut at the output."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from . import guard, memory, offload, plain, sync
from .cutting import Cuts
from .errors import LeanError
from .fsdp1 import Held
from .host import HostMemory
from .kept import Kept, tolerance
from .offload import OVER_HOST, Moved, to_host
from .unlike import CHANGES, DRAWS, unchanged
from .values import Uncuttable, as_tuple, detach_all, leaves, named, tensors_of
from .window import Key, Window

OVER_BUDGET = "over LEANGRPO_BUDGET_GB"


@contextmanager
def training_mode(net: nn.Module) -> Iterator[None]:
    """Train mode as in upstream's update: some networks checkpoint activations in that mode only.

    Only the flag changes: a `train()` of the network's own, which may merge weights, is not called.
    """
    evaluating = [module for module in net.modules() if not module.training]
    for module in evaluating:
        module.training = True
    try:
        yield
    finally:
        for module in evaluating:
            module.training = False


def where(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device:
    """The device a call runs on: that of its first tensor off the CPU, since small arguments may stay there."""
    devices = [item.device for _, item in leaves((args, kwargs)) if isinstance(item, Tensor)]
    return next((device for device in devices if device.type != "cpu"), torch.device("cpu"))


def probe(window: Window, wrapper: sync.Wrapper, net: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Compares a forward as upstream's rollout makes it with one as a kept call runs.

    If they differ the window keeps nothing. Made at the same call of a window on every rank, since a wrapper may
    communicate in a forward.
    """
    device = where(args, kwargs)
    with unchanged(net, device) as before:
        rolled = tensors_of(net(*args, **kwargs))
        with training_mode(net), torch.enable_grad(), sync.keeping(net, wrapper):
            trained = tensors_of(as_tuple(net(*args, **_by_name(kwargs)), kwargs))
        if before.drawn():
            window.refusal = DRAWS
    torch.clear_autocast_cache()
    for a, b in zip(rolled, trained, strict=True):
        size = b.detach().double().norm().item()
        off = (a.detach().double() - b.detach().double()).norm().item()
        if not off <= tolerance(b.dtype) * size:
            window.refusal = (
                window.refusal or f"in train mode the network computes something else (by {off:.3g} of {size:.3g})"
            )


def _by_name(kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a kept call: it asks for a named result, which can answer callers that want either kind."""
    return kwargs | {"return_dict": True} if kwargs.get("return_dict", True) is False else kwargs


@dataclass
class Capture:
    """What it takes to keep calls of a network.

    Attributes:
        budget: bytes of graphs this rank may hold on the device.
        host: the host memory for graphs beyond that.
        sizes: what graphs of calls with such arguments weigh, as far as measured.
        measure: follow the bytes of each call in any case.
    """

    window: Window
    wrapper: sync.Wrapper
    net: nn.Module
    budget: float
    host: HostMemory
    sizes: memory.Sizes
    measure: bool

    def __post_init__(self) -> None:
        self.over_budget = OVER_BUDGET  # why a step is not held that has no room
        if self.host.limit:
            reason = offload.why_not(self.net)
            self.over_budget += f", and not in host memory: {reason}" if reason else f" and {OVER_HOST[5:]}"
            self.host = HostMemory(0.0) if reason else self.host

    def set_limits(self) -> None:
        """How many places there is room for, by what is known of a graph's weight."""
        window = self.window
        window.on_device, window.limit = self.sizes.room(self.budget, self.host.limit, len(window.positions))
        for place in window.places_on_host():  # held there before more was known, it leaves its place to another
            window.on_device += place <= window.on_device

    def keep(self, wanted: dict[Key, int], rows: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs the call under grad, holds its graph, returns the result without it, in the type the network returns.

        Args:
            wanted: the steps that the update will ask for, and their places among the rows.
            rows: how many rows the call has.
        """
        window = self.window
        device, first = where(args, kwargs), not window.calls
        seen = window.see(self.net)
        generators = guard.generator_states(device)
        asked, kwargs = kwargs, _by_name(kwargs)
        aside = bool(self.host.limit) and max(window.positions[key[:2]] for key in wanted) >= window.on_device
        result, held, moved = self._run(args, kwargs, device, aside)
        window.graph_bytes = self.sizes.graph_bytes(args, kwargs)
        arguments = named(sync.innermost(self.net), args, kwargs)
        left = max(window.graph_bytes - moved.bytes, 0) if moved else window.graph_bytes
        try:
            call = Kept(result, arguments, rows, device, left)
        except Uncuttable as reason:
            window.refusal = str(reason)
            window.pass_by(wanted, window.refusal)
            detach_all(result)
            return as_tuple(result, asked)
        call.held = held
        if moved:
            call.host_bytes, call.on_host = moved.host_bytes, not moved.refusal
        if not call.outs:
            window.refusal = "the network's output needs no gradient"
            window.pass_by(wanted, window.refusal)
            return as_tuple(result, asked)
        self.sizes.per_row(args, kwargs, len(wanted), site=next(iter(wanted))[2])
        self.set_limits()
        if first:
            window.books = plain.books(seen.attributes, plain.attributes_of(sync.bare(self.net)))
        if not all(map(torch.equal, generators, guard.generator_states(device))):
            window.refusal = DRAWS
        elif first and guard.checksum(self.net.buffers()) != seen.buffers:
            window.refusal = CHANGES
        elif isinstance(held, Cuts):
            window.refusal = held.refusal
        if window.refusal:
            window.pass_by(wanted, window.refusal)
        elif moved and moved.refusal and any(window.positions[key[:2]] >= window.on_device for key in wanted):
            window.pass_by(wanted, moved.refusal)
        elif any(window.positions[key[:2]] >= window.limit for key in wanted):
            # The first call of all: only now it is known what it weighs, and its graph is one.
            window.pass_by(wanted, self.over_budget)
        else:
            return as_tuple(self.hold(call, wanted), asked)
        return as_tuple(call.for_rollout(), asked)

    def hold(self, call: Kept, wanted: dict[Key, int]) -> Any:
        """Holds rows of a call until an update asks for them; returns what the rollout goes on with."""
        self.window.hold(call, wanted)
        return call.for_rollout()

    def parts(self, wanted: dict[Key, int]) -> list[dict[Key, int]]:
        """Which of the wanted rows run in one call."""
        return [wanted]

    def beyond(self, wanted: dict[Key, int]) -> list[Key]:
        """Wanted steps for which there is no room: all of a call, where it is replayed whole."""
        over = [key for key in wanted if self.window.positions[key[:2]] >= self.window.limit]
        return list(wanted) if over and self.window.calls_whole(self.wrapper) else over

    def _run(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device, aside: bool
    ) -> tuple[Any, Held | Cuts | None, Moved | None]:
        """The result, with its graph, what its backward will need besides, and what lies in host memory (`aside`)."""
        window = self.window
        moving = to_host(self.net, (args, kwargs), self.host, device) if aside else nullcontext()
        # Low-precision copies of weights that autocast cached without grad, or for another graph, must not enter this.
        torch.clear_autocast_cache()
        with training_mode(self.net), torch.enable_grad(), sync.keeping(self.net, self.wrapper) as held:
            try:
                if not self.measure and self.sizes.settled(args, kwargs):
                    with moving as moved:
                        result = self.net(*args, **kwargs)
                    torch.clear_autocast_cache()
                    return result, held, moved
                with window.meter.measure(device) as figure:
                    with moving as moved:
                        result = self.net(*args, **kwargs)
                    torch.clear_autocast_cache()
            except torch.OutOfMemoryError as error:
                held = window.held_bytes() / 1e9
                raise LeanError(
                    "LG608",
                    f"out of memory while the graphs of {window.calls} calls, {held:.3g} GB, were held: {error}",
                    f"set LEANGRPO_BUDGET_GB to less than {held:.3g}; what does not fit is recomputed",
                ) from error
        window.measured += 1
        if moved is None:
            self.sizes.add(args, kwargs, figure[0])
        else:
            # Off CUDA the copies are among what the meter followed.
            counted = 0 if device.type == "cuda" else moved.host_bytes
            self.sizes.add(args, kwargs, figure[0] - counted + moved.bytes)
            if not moved.refusal:
                self.sizes.add_moved(args, kwargs, moved.bytes, moved.host_bytes)
        return result, held, moved
