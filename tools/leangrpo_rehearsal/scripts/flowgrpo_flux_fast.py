"""FlowGRPO, `scripts/train_flux_fast.py`: steps of a random window, samples in the order they were drawn in."""

from __future__ import annotations

from typing import Any

from leangrpo_rehearsal.base import Config
from leangrpo_rehearsal.scripts.flowgrpo import random_window
from leangrpo_rehearsal.scripts.flowgrpo_flux import Flux


class FluxFast(Flux):
    """The network of `flowgrpo_flux`."""

    name = "flux_fast"
    path = "scripts/train_flux_fast.py"
    shuffled = False
    options = (*Flux.options, "sde_type")

    def preset(self, config: Config) -> dict[str, Any]:
        """The window holds the trained steps."""
        return super().preset(config) | random_window(self, config)


SCRIPT = FluxFast()
