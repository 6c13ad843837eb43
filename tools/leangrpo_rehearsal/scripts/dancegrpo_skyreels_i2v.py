"""DanceGRPO, `fastvideo/train_grpo_skyreels_i2v.py`: a first frame from FLUX goes in beside the noise, guidance."""

from __future__ import annotations

import importlib
import types
from pathlib import Path
from typing import Any

from leangrpo_rehearsal.base import Config, Context, Launch
from leangrpo_rehearsal.scripts.dancegrpo import TEXT_DIM, TEXT_TOKENS
from leangrpo_rehearsal.scripts.hunyuan import PADDED, Hunyuan


class SkyReels(Hunyuan):
    """The tiny HunyuanVideo with twice as many channels; a stand-in for FLUX draws the first frame."""

    name = "skyreels_i2v"
    path = "fastvideo/train_grpo_skyreels_i2v.py"
    channels = 32
    options = ("learning_rate", "same_noise", "prompts", "generations", "guidance")
    folders = (*Hunyuan.folders, "data/empty")

    def prepare(self, workdir: Path, config: Config) -> None:
        """The same, and the embedding of the empty prompt."""
        import torch

        super().prepare(workdir, config)
        tokens = TEXT_TOKENS + PADDED
        empty = {"prompt_embed": torch.randn(1 + tokens, TEXT_DIM), "prompt_attention_mask": torch.ones(tokens).long()}
        for name, value in empty.items():
            (workdir / f"data/empty/{name}").mkdir()
            torch.save(value, workdir / f"data/empty/{name}/0.pt")

    def launch(self, workdir: Path, config: Config) -> Launch:
        """As `scripts/finetune/finetune_skyreels_i2v.sh`."""
        argv = [*self.video_arguments(workdir, config), "--cfg_infer", config.option("guidance", "5.0")]
        return Launch(argv)

    def install(self, context: Context) -> None:
        """Also FLUX and what torchvision does to its picture."""
        super().install(context)
        _flux()
        _transforms()
        _device_by_number()

    def not_tested(self, config: Config) -> list[str]:
        """FLUX is not there."""
        return [*super().not_tested(config), "FLUX, which draws the first frame (a random picture took its place)"]


def _flux() -> None:
    import diffusers

    class FluxPipeline:
        """Draws a picture of noise from the device's generator, as FLUX starts with noise from there."""

        @classmethod
        def from_pretrained(cls, *args: Any, **kwargs: Any) -> FluxPipeline:
            return cls()

        def to(self, device: Any) -> FluxPipeline:
            return self

        def __call__(self, prompt: str, height: int, width: int, **kwargs: Any) -> Any:
            import torch
            from PIL import Image

            pixels = torch.rand(height, width, 3, device=torch.device("cpu"))
            return types.SimpleNamespace(images=[Image.fromarray((pixels * 255).byte().numpy())])

    diffusers.FluxPipeline = FluxPipeline  # type: ignore[misc, assignment]


def _transforms() -> None:
    import numpy
    import torch

    def compose(steps: Any) -> Any:
        def run(value: Any) -> Any:
            for step in steps:
                value = step(value)
            return value

        return run

    def to_tensor() -> Any:
        return lambda image: torch.from_numpy(numpy.array(image)).permute(2, 0, 1).float() / 255

    def normalize(mean: list[float], std: list[float]) -> Any:
        def scaled(image: torch.Tensor) -> torch.Tensor:
            return (image - torch.tensor(mean)[:, None, None]) / torch.tensor(std)[:, None, None]

        return scaled

    transforms: Any = importlib.import_module("torchvision.transforms")  # the stub, where it is not installed
    transforms.Compose, transforms.ToTensor, transforms.Normalize = compose, to_tensor, normalize


def _device_by_number() -> None:
    """Upstream writes the name of its device, "cuda:" and the number of the current one, which here is the CPU."""
    import torch

    device: Any = torch.device

    class Named(type):
        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            return device("cpu") if args == ("cuda:cpu",) else device(*args, **kwargs)

        def __instancecheck__(cls, value: object) -> bool:
            return isinstance(value, device)

    torch.device = Named("device", (), {})  # type: ignore[assignment, misc]


SCRIPT = SkyReels()
