"""Networks that scripts train: the public ones of `patches/networks.yaml`, and what a script makes of them."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from leangrpo_tools import data, yamlfile


class Strict(BaseModel):
    """Data that is read from a file: unknown names and values of another kind are errors."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Sizes(Strict):
    """What a network's configuration tells. Counts; `width` and tokens as in its blocks."""

    parameters: float
    patch: int
    """Pixels along each side of what becomes one token."""
    largest_unit: float = 0.0
    """Parameters of the largest block."""
    root_parameters: float = 0.0
    """Parameters outside all blocks."""
    blocks: int = 0
    width: int = 0
    frames_per_latent: int = 1
    image_token_flops: float = 0.0
    """Floating-point operations of a forward per image token, attention's products of tokens left out."""
    text_token_flops: float = 0.0


class Network(Sizes):
    """A public network."""

    repositories: list[str]
    """`organisation/name`, as model hubs have it."""
    kind: str
    """The class in diffusers."""
    configuration: dict[str, Any]
    """What it has other than the class's defaults."""


class Graph(Strict):
    """What a script trains of a network, and what autograd saves for it under 16-bit autocast."""

    trained_parameters: float | None = None
    """Where not all are trained."""
    image_token_bytes: float = 0.0
    """Without checkpointing: what autograd saves per image token and input; 0 where it was not traced."""
    text_token_bytes: float = 0.0
    call_bytes: float = 0.0
    """The same per call, whatever its size: 16-bit copies of frozen weights."""
    row_bytes: float = 0.0
    """The same per input, whatever its size: text that is no token of the blocks."""


class Model(Sizes):
    """Sizes of a network as a script trains it, for bytes by formula."""

    text_tokens: int
    """Text tokens that go through the blocks beside the image's."""
    image_token_bytes: float = 0.0
    text_token_bytes: float = 0.0
    call_bytes: float = 0.0
    row_bytes: float = 0.0
    end_image_bytes: float = 0.0
    """With checkpointing: what is saved per image token outside all blocks, where that is known; per text token and per
    call the next two."""
    end_text_bytes: float = 0.0
    end_call_bytes: float = 0.0
    stored_bytes: int = 4
    """Of a weight, its gradient and each of its moments, on the rank that owns it."""


class Made(Strict):
    """A network of FLUX's kind that a launch file sizes, `layers` double blocks and twice as many single ones."""

    width: str
    """The flag of its width; the next is that of its layers, the one after a switch for 16-bit autocast."""
    layers: str
    sixteen_bit: str
    head: int
    channels: int
    image_tokens: int
    text_tokens: int


class Networks(Strict):
    """`patches/networks.yaml`."""

    networks: dict[str, Network]


@cache
def _load(path: Path) -> dict[str, Network]:
    return yamlfile.load(path, Networks, "LG507", "reinstall the kit, or correct the file").networks


def load() -> dict[str, Network]:
    """The public networks by the kit's names. Raises LG507."""
    return _load(data.data_root() / "patches" / "networks.yaml")


def sized(network: Network, graph: Graph, text_tokens: int, stored_bytes: int) -> Model:
    """The network as a script trains it."""
    sizes = {name: getattr(network, name) for name in Sizes.model_fields}
    saved = graph.model_dump(exclude={"trained_parameters"})
    return Model(**sizes, **saved, text_tokens=text_tokens, stored_bytes=stored_bytes)
