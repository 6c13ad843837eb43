"""Networks that cannot be replayed because a call changes more than its result: random numbers, or their buffers.

What such a call has changed is put back, and the call is made as upstream makes it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from . import agree, guard
from .errors import LeanError
from .sync import Wrapper

if TYPE_CHECKING:
    from .window import Window

DRAWS = "the network draws random numbers"
CHANGES = "the network changes its buffers"


class State:
    """What a call of `net` on `device` could change: generators and, where asked for, copies of all buffers."""

    def __init__(self, net: nn.Module, device: torch.device, buffers: bool = True) -> None:
        self.device = device
        self._generators = guard.generator_states(device)
        owned = [(module, name) for module in net.modules() if buffers for name in module._buffers]
        found = [(module._buffers, name, module._buffers[name]) for module, name in owned]
        self._buffers = [(own, name, value, value.detach().clone()) for own, name, value in found if value is not None]

    def drawn(self) -> bool:
        """Whether a generator has moved."""
        return not all(map(torch.equal, self._generators, guard.generator_states(self.device)))

    @torch.no_grad()
    def restore(self) -> None:
        """Puts all of it back."""
        torch.set_rng_state(self._generators[0])
        if len(self._generators) > 1:
            torch.cuda.set_rng_state(self._generators[1], self.device)
        for own, name, value, before in self._buffers:
            own[name] = value
            if not torch.equal(value, before):
                value.copy_(before)


@contextmanager
def unchanged(net: nn.Module, device: torch.device) -> Iterator[State]:
    """Calls of `net` within leave generators and buffers as they were."""
    state = State(net, device)
    try:
        yield state
    finally:
        state.restore()


class Unlike:
    """Whether the network of a run is one of them; then it is never kept again.

    Attributes:
        reason: why; empty as long as it is not.
    """

    def __init__(self) -> None:
        self.reason = ""
        self._settled = False  # ranks know it of each other, one way or the other
        self._refused = False

    @property
    def draws(self) -> bool:
        """Whether it draws random numbers."""
        return DRAWS in self.reason

    def before(self, window: "Window", net: nn.Module, device: torch.device) -> State:
        """Before a call of the rollout that may be kept."""
        window.refusal = window.refusal or self.reason
        if window.refusal in (DRAWS, CHANGES):
            self.reason = window.refusal
        self._refused = bool(window.refusal)
        return State(net, device, buffers=not window.calls and not self._refused)

    def after(
        self, window: "Window", wrapper: Wrapper, net: nn.Module, before: State, args: Any, kwargs: Any, result: Any
    ) -> Any:
        """After it: its `result`, or that of upstream's own call if it is found out.

        Where a forward communicates, every rank makes that call.

        Raises:
            LeanError: LG610 under such a wrapper, if the network draws that did not when its first calls were kept.
        """
        ours = not self._refused and window.refusal in (DRAWS, CHANGES)
        again = ours
        if wrapper.collective and not self._settled:
            again = self._settled = agree.anyones([ours])[0]
        elif wrapper.collective and ours:
            raise LeanError("LG610", f"{window.refusal}, and did not before", "train with LEANGRPO_SCHEDULE=recompute")
        if not again:
            return result
        self.reason = window.refusal = window.refusal or f"on another rank {DRAWS} or changes its buffers"
        if ours:
            before.restore()
            return net(*args, **kwargs)
        with unchanged(net, before.device):
            net(*args, **kwargs)
        return result

    def learn(self, window: "Window") -> None:
        """The window is over: calls that every rank has kept were sound."""
        self._settled = self._settled or bool(window.agreed)
