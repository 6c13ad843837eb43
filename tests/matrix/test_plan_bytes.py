"""The bytes of a graph in FlowGRPO's plan.yaml, counted on networks of that size without a byte of memory for them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from diffusers import FluxTransformer2DModel, SD3Transformer2DModel
from peft import LoraConfig, get_peft_model
from torch._subclasses.fake_tensor import FakeTensorMode

from leangrpo_tools.plan import facts
from leangrpo_tools.plan.memory import Memory

pytestmark = pytest.mark.matrix
JOINT = ["attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0"]
JOINT += ["attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj", "attn.to_add_out"]


def sd3() -> tuple[torch.nn.Module, int, list[str]]:
    net = SD3Transformer2DModel(
        num_layers=24, num_attention_heads=24, attention_head_dim=64, joint_attention_dim=4096,
        pooled_projection_dim=2048, caption_projection_dim=1536, pos_embed_max_size=384, 
        dual_attention_layers=tuple(range(13)), qk_norm="rms_norm",
    )  # fmt: skip
    return net, 32, JOINT


def sd3_inputs(rows: int, side: int) -> dict[str, torch.Tensor]:
    return {
        "hidden_states": torch.empty(rows, 16, side // 8, side // 8), "timestep": torch.empty(rows),
        "encoder_hidden_states": torch.empty(rows, 205, 4096), "pooled_projections": torch.empty(rows, 2048),
    }  # fmt: skip


def flux() -> tuple[torch.nn.Module, int, list[str]]:
    net = FluxTransformer2DModel(guidance_embeds=True)
    return net, 64, [*JOINT, "ff.net.0.proj", "ff.net.2", "ff_context.net.0.proj", "ff_context.net.2"]


def flux_inputs(rows: int, side: int) -> dict[str, torch.Tensor]:
    tokens = (side // 16) ** 2
    return {
        "hidden_states": torch.empty(rows, tokens, 64), "timestep": torch.empty(rows), "guidance": torch.empty(rows),
        "encoder_hidden_states": torch.empty(rows, 128, 4096), "pooled_projections": torch.empty(rows, 768),
        "txt_ids": torch.empty(128, 3), "img_ids": torch.empty(tokens, 3),
    }  # fmt: skip


@pytest.mark.parametrize(("script", "build", "inputs"), [("sd3", sd3, sd3_inputs), ("flux", flux, flux_inputs)])
def test_saved_tensors(script: str, build: Callable, inputs: Callable) -> None:
    """Within 2 % for one and three inputs, at 512 and 768 squared."""
    with torch.device("meta"):
        net, rank, targets = build()
        count = sum(p.numel() for p in net.parameters())
        net.requires_grad_(False)
        net = get_peft_model(net, LoraConfig(r=rank, target_modules=targets))  # type: ignore[arg-type]
    known = facts.load("flowGRPO").scripts[script]
    assert known.model and known.trained_parameters
    trained = sum(p.numel() for p in net.parameters() if p.requires_grad)
    assert known.model.parameters == pytest.approx(count, rel=2e-3)
    assert known.trained_parameters == pytest.approx(trained, rel=2e-3)
    for rows, side in ((1, 512), (3, 512), (1, 768)):
        with FakeTensorMode(), torch.autocast("cpu", torch.bfloat16):
            counted = saved(net, inputs(rows, side))
        memory = Memory(known.model, trained, 1, side * side, 80e9, sharded=False, checkpointed=False, inputs=rows)
        assert memory.graph == pytest.approx(counted, rel=2e-2), (rows, side)


def saved(net: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> int:
    """Bytes that autograd holds after a forward, beside the network's own tensors."""
    for module in net.modules():
        for name, old in list(module._parameters.items()):
            if old is not None:
                module._parameters[name] = torch.nn.Parameter(torch.empty(old.shape), requires_grad=old.requires_grad)
        for name, old in list(module._buffers.items()):
            if old is not None:
                module._buffers[name] = torch.empty(old.shape, dtype=old.dtype)
    own = {item.untyped_storage()._cdata for item in [*net.parameters(), *net.buffers()]}
    held: dict[int, torch.UntypedStorage] = {}

    def hold(item: torch.Tensor) -> torch.Tensor:
        if item.untyped_storage()._cdata not in own:
            held[item.untyped_storage()._cdata] = item.untyped_storage()
        return item

    with torch.autograd.graph.saved_tensors_hooks(hold, lambda item: item):
        net(**inputs)
    return sum(storage.nbytes() for storage in held.values())
