"""FlowGRPO, `scripts/train_qwenimage_edit.py`: pictures are edited, their latents stand behind the sample's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from leangrpo_rehearsal.base import Config, Context
from leangrpo_rehearsal.scripts.flowgrpo_flux_kontext import write_pictures
from leangrpo_rehearsal.scripts.flowgrpo_qwenimage import QwenImage

SIDE = 32
"""Of the square that each picture becomes, in pixels, where upstream takes 1024."""


class QwenImageEdit(QwenImage):
    """The network of `flowgrpo_qwenimage`; the picture makes another 4 tokens."""

    name = "qwenimage_edit"
    path = "scripts/train_qwenimage_edit.py"
    kind = "QwenImageEditPipeline"
    preload = (*QwenImage.preload, "diffusers:QwenImageEditPipeline")
    parts = {"processor": None}  # noqa: RUF012 (never changed)

    def misfit(self, config: Config) -> str | None:
        """What upstream's script cannot do, besides the sizes."""
        if config.option("offload", "0") == "1":
            return "upstream's script loses its optimizer with fsdp_optimizer_offload"
        return super().misfit(config)

    def prepare(self, workdir: Path, config: Config) -> None:
        """Prompts come with a picture each."""
        super().prepare(workdir, config)
        write_pictures(workdir / "prompts")

    def install(self, context: Context) -> None:
        """Pictures stay small, and the prompt's embedding does not see them: the processor needs torchvision."""
        super().install(context)
        from diffusers import QwenImageEditPipeline, QwenImagePipeline
        from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit as module

        pipeline: Any = QwenImageEditPipeline
        pipeline._optional_components = [*pipeline._optional_components, "processor"]

        def embed(self: Any, prompt: Any, image: Any, device: Any = None, dtype: Any = None) -> Any:
            return QwenImagePipeline._get_qwen_prompt_embeds(self, prompt, device, dtype)

        pipeline._get_qwen_prompt_embeds = embed
        dimensions: Any = module.calculate_dimensions
        module.calculate_dimensions = lambda area, ratio: dimensions(SIDE * SIDE, ratio)  # type: ignore[assignment]

    def not_tested(self, config: Config) -> list[str]:
        """Nor is what the text encoder makes of the picture."""
        return [*super().not_tested(config), "pictures in the prompt's embedding"]


SCRIPT = QwenImageEdit()
