"""DanceGRPO, `fastvideo/train_grpo_qwenimage_edit.py`: an image's latents go in behind the noise."""

from __future__ import annotations

from leangrpo_rehearsal.base import Config
from leangrpo_rehearsal.scripts.dancegrpo_qwenimage import QwenImage


class QwenImageEdit(QwenImage):
    """The tiny Qwen-Image with the latents of an image of 32 x 16 pixels."""

    name = "qwenimage_edit"
    path = "fastvideo/train_grpo_qwenimage_edit.py"
    images = {"image_latents": ("image_latents", (16, 1, 4, 2))}  # noqa: RUF012 (never changed)
    sizes = {"calculated_height": 32, "calculated_width": 16}  # noqa: RUF012 (never changed)

    def supports(self, config: Config) -> str | None:
        """The runtime refuses parts for this script, so there is nothing to compare."""
        if config.option("layout", "native") != "native" or config.option("updates", "faithful") != "faithful":
            return "layout and updates need a script whose training step takes its prompts as arguments"
        return super().supports(config)


SCRIPT = QwenImageEdit()
