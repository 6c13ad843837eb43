"""Whether a run's windows are reweighted, or why they are not: Retain takes over then, which needs no assumption."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from .. import agree, sync
from ..window import Key, Window
from .buffers import Buffers
from .rollout import Reweight
from .update import in_vain

if TYPE_CHECKING:
    from ..auto.choice import Way


class Reweighting:
    """The state of one run.

    Args:
        once: says something to the user once.

    Attributes:
        instead: what a run does that is not reweighted any more, in words.
        refused: it is not.
        no_affine: one gradient is kept per sample, whatever LEANGRPO_BUFFERS says.
    """

    def __init__(self, once: Callable[[str], None]) -> None:
        self._once = once
        self.instead = "from here on graphs are kept, as with LEANGRPO_SCHEDULE=retain"
        self.refused = self.no_affine = False
        self._other_inputs: set[tuple[int, str]] = set()

    def begin(self, window: Window | None, way: "Way", steps: int, group: int, team: int = 1) -> None:
        """A window opens, of which `steps` per trajectory can be trained.

        Args:
            group, team: how many rows of a rank share a prompt, and how many ranks do.
        """
        if window is None or way.schedule != "reweight" or self.refused:
            return
        affine = way.buffers == "affine" and not self.no_affine
        window.reweight = Reweight(
            window, steps, Buffers(affine, group, window.base), team, set(self._other_inputs), self._once
        )

    def before_call(
        self, window: Window, wrapper: sync.Wrapper, net: nn.Module, keys: Sequence[Key], args: Any, kwargs: Any,
        budget: float,
    ) -> None:  # fmt: skip
        """Before a network call of the rollout."""
        ours = window.reweight
        if ours is None or wrapper.refusal:
            return
        if ours.net is None:
            reason = ours.why_not(net, wrapper, len(keys), args, kwargs)
            if reason:
                self._decline(reason)
                window.reweight = None
                return
            ours.set_room(budget)
        ours.before_call(keys)

    def learn(self, window: Window, wrapper: sync.Wrapper) -> None:
        """After an update: if most samples were recomputed for how the loss weighs them, those of the next would be."""
        ours = window.reweight
        if ours is None:
            return
        if not wrapper.collective:  # there every rank must hold equally many
            self._other_inputs |= ours.other_inputs
        reason = in_vain(ours.samples)
        if wrapper.collective and agree.anyones([bool(reason)])[0]:
            reason = reason or "on another rank most samples were recomputed"
        if not reason:
            return
        if ours.buffers.affine:
            self.no_affine = True
            self._once(f"{reason}: from the next rollout on one gradient is kept per sample")
        else:
            self._decline(reason)

    def _decline(self, reason: str) -> None:
        self.refused = True
        self._once(f"{reason}: {self.instead}")
