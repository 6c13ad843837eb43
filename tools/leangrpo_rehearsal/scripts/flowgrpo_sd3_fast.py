"""FlowGRPO, `scripts/train_sd3_fast.py`: steps of a random window, samples in the order they were drawn in."""

from __future__ import annotations

from typing import Any

from leangrpo_rehearsal.base import Config
from leangrpo_rehearsal.scripts.flowgrpo import random_window
from leangrpo_rehearsal.scripts.flowgrpo_sd3 import Sd3


class Sd3Fast(Sd3):
    """The network of `flowgrpo_sd3`."""

    name = "sd3_fast"
    path = "scripts/train_sd3_fast.py"
    shuffled = False
    options = (*Sd3.options, "sde_type")

    def preset(self, config: Config) -> dict[str, Any]:
        """The window holds the trained steps."""
        return super().preset(config) | random_window(self, config)


SCRIPT = Sd3Fast()
