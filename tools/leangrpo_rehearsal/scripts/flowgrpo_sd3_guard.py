"""FlowGRPO, `scripts/train_sd3_GRPO_Guard.py`: ratios normalised and losses scaled step by step."""

from __future__ import annotations

from typing import Any

from leangrpo_rehearsal.base import Config
from leangrpo_rehearsal.scripts.flowgrpo_sd3 import Sd3


class Sd3Guard(Sd3):
    """The network of `flowgrpo_sd3`."""

    name = "sd3_GRPO_Guard"
    path = "scripts/train_sd3_GRPO_Guard.py"

    def preset(self, config: Config) -> dict[str, Any]:
        """With its normalisation, which is what the script is for."""
        return super().preset(config) | {"rationorm": True, "run_project": "rehearsal"}


SCRIPT = Sd3Guard()
