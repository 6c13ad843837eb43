"""`patches/networks.yaml` against diffusers' own classes, made on the meta device: every parameter is counted."""

from __future__ import annotations

import functools
import json

import pytest
import torch
from torch import nn

from leangrpo_tools.plan import networks

diffusers = pytest.importorskip("diffusers")
KNOWN = networks.load()


@functools.cache
def counted(kind: str, configuration: str) -> tuple[int, int, int, int]:
    """Parameters, those of the largest block and outside of all, and blocks."""
    with torch.device("meta"):
        net: nn.Module = getattr(diffusers, kind)(**json.loads(configuration))
    blocks = [
        sum(p.numel() for p in block.parameters())
        for name, layers in net.named_children()
        if isinstance(layers, nn.ModuleList) and name.endswith("blocks")
        for block in layers
    ] or [sum(p.numel() for p in block.parameters()) for block in net.blocks]  # type: ignore[union-attr]
    everything = sum(p.numel() for p in net.parameters())
    return everything, max(blocks), everything - sum(blocks), len(blocks)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", KNOWN)
def test_parameters_are_exact(name: str) -> None:
    network = KNOWN[name]
    found = counted(network.kind, json.dumps(network.configuration, sort_keys=True))
    assert found == (network.parameters, network.largest_unit, network.root_parameters, network.blocks)


# As model cards and papers give them, in billions.
PUBLISHED = {
    "flux.1-dev": 12, "sd3-medium": 2, "sd3.5-medium": 2.5, "sd3.5-large": 8.1, "wan2.1-t2v-1.3b": 1.3,
    "wan2.1-t2v-14b": 14, "qwen-image": 20, "hunyuanvideo": 13,
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_sizes(name: str) -> None:
    assert KNOWN[name].parameters / 1e9 == pytest.approx(PUBLISHED[name], rel=0.11)
