"""FlowGRPO, `scripts/train_flux_kontext.py`: pictures are edited, and their latents stand beside the sample's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from leangrpo_rehearsal.base import Config, Context
from leangrpo_rehearsal.scripts.flowgrpo import PROMPTS
from leangrpo_rehearsal.scripts.flowgrpo_flux import Flux


class FluxKontext(Flux):
    """The network of `flowgrpo_flux`; the picture makes another 16 tokens."""

    name = "flux_kontext"
    path = "scripts/train_flux_kontext.py"
    kind = "FluxKontextPipeline"
    preload = (*Flux.preload, "diffusers:FluxKontextPipeline")

    def prepare(self, workdir: Path, config: Config) -> None:
        """Prompts come with a picture each."""
        super().prepare(workdir, config)
        write_pictures(workdir / "prompts")

    def install(self, context: Context) -> None:
        """Lets the tokenizer decode the floating-point ids that the script hands it, as transformers 4 does."""
        import numpy
        import transformers

        super().install(context)
        tokenizer: Any = transformers.CLIPTokenizer
        decode = tokenizer.batch_decode

        def batch_decode(self: Any, ids: Any, *args: Any, **kwargs: Any) -> Any:
            return decode(self, numpy.asarray(ids).astype(int), *args, **kwargs)

        tokenizer.batch_decode = batch_decode


def write_pictures(folder: Path) -> None:
    """A picture for each prompt, and the lists that name both."""
    for split, prompts in (("train", PROMPTS), ("test", PROMPTS[:2])):
        items = []
        for prompt in prompts:
            picture = f"{prompt.replace(' ', '')}.png"
            _draw(folder / picture, seed=len(items))
            items.append({"prompt": prompt, "image": picture})
        (folder / f"{split}_metadata.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items))


def _draw(path: Path, seed: int) -> None:
    """A picture of random pixels, which the script resizes."""
    import torch
    from PIL import Image

    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randint(256, (48, 40, 3), generator=generator, dtype=torch.uint8)
    Image.fromarray(pixels.numpy()).save(path)


SCRIPT = FluxKontext()
