"""Sizes of public networks in plan.yaml, counted on networks of that size without a byte of memory for them."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from diffusers import (
    FluxTransformer2DModel,
    HunyuanVideoTransformer3DModel,
    QwenImageTransformer2DModel,
    SD3Transformer2DModel,
    WanTransformer3DModel,
)
from peft import LoraConfig, get_peft_model
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

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
        memory = Memory(known.model, trained, 1, side * side, 80e9, sharded=False, checkpointed=0.0, inputs=rows)
        assert memory.graph == pytest.approx(counted, rel=2e-2), (rows, side)


def wan() -> torch.nn.Module:
    return WanTransformer3DModel(
        num_attention_heads=12, attention_head_dim=128, text_dim=4096, freq_dim=256, ffn_dim=8960, num_layers=30,
        cross_attn_norm=True, qk_norm="rms_norm_across_heads",
    )  # fmt: skip


def wan_inputs(tokens: int) -> dict[str, torch.Tensor]:
    """Text is no token here: 512 of it are read by cross-attention."""
    return {
        "hidden_states": torch.empty(1, 16, tokens // 1024, 64, 64), "timestep": torch.empty(1),
        "encoder_hidden_states": torch.empty(1, 512, 4096),
    }  # fmt: skip


def video_inputs(tokens: int) -> dict[str, torch.Tensor]:
    return wan_inputs(tokens) | {
        "encoder_hidden_states": torch.empty(1, 256, 4096), "encoder_attention_mask": torch.ones(1, 256),
        "pooled_projections": torch.empty(1, 768), "guidance": torch.empty(1),
    }  # fmt: skip


def qwen_inputs(tokens: int) -> dict[str, object]:
    kind = torch.bfloat16
    return {
        "hidden_states": torch.empty(1, tokens, 64, dtype=kind), "timestep": torch.empty(1, dtype=kind),
        "encoder_hidden_states": torch.empty(1, 128, 3584, dtype=kind), "img_shapes": [[(1, 32, tokens // 32)]],
        "encoder_hidden_states_mask": torch.ones(1, 128, dtype=torch.bool),
    }  # fmt: skip


def in_sixteen_bits() -> torch.nn.Module:
    torch.set_default_dtype(torch.bfloat16)
    try:
        return QwenImageTransformer2DModel()
    finally:
        torch.set_default_dtype(torch.float32)


def flux_tokens(tokens: int) -> dict[str, torch.Tensor]:
    words = {"encoder_hidden_states": torch.empty(1, 512, 4096), "txt_ids": torch.empty(512, 3)}
    return flux_inputs(1, 16 * math.isqrt(tokens)) | words


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("upstream", "script", "build", "inputs"),
    [
        ("DanceGRPO", "flux", lambda: flux()[0], flux_tokens),
        ("DanceGRPO", "wan_2_1", wan, wan_inputs),
        ("DanceGRPO", "skyreels_i2v", HunyuanVideoTransformer3DModel, video_inputs),
        ("DanceGRPO", "qwenimage", in_sixteen_bits, qwen_inputs),
        ("flowGRPO", "sd3", lambda: sd3()[0], lambda tokens: sd3_inputs(1, 16 * math.isqrt(tokens))),
    ],
)
def test_parameters_and_operations(upstream: str, script: str, build: Callable, inputs: Callable) -> None:
    """Parameters within 1 %, operations per image token within 2 %. Attention is not counted on a CPU."""
    model = facts.load(upstream).scripts[script].model
    assert model is not None
    found = []
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        net = build()
        for tokens in (1024, 4096):
            with FlopCounterMode(display=False) as counter:
                net(**inputs(tokens))
            found.append(counter.get_total_flops())
        count = sum(p.numel() for p in net.parameters())
    assert model.parameters == pytest.approx(count, rel=0.01)
    assert model.image_token_flops == pytest.approx((found[1] - found[0]) / 3072, rel=0.02)
    if model.text_tokens:
        words = (found[0] - 1024 * model.image_token_flops) / model.text_tokens
        assert model.text_token_flops == pytest.approx(words, rel=0.1)


def test_qwens_saved_tensors() -> None:
    """Without checkpointing, weights in bf16: within 2 %."""
    model = facts.load("DanceGRPO").scripts["qwenimage"].model
    assert model is not None
    with FakeTensorMode(allow_non_fake_inputs=True), torch.autocast("cpu", torch.bfloat16):
        counted = saved(in_sixteen_bits(), qwen_inputs(1024), made=True)
    memory = Memory(model, 1.0, 1, 1024 * 256, 80e9, sharded=False, checkpointed=0.0)
    assert memory.graph == pytest.approx(counted, rel=2e-2)


def saved(net: torch.nn.Module, inputs: dict, made: bool = False) -> int:
    """Bytes that autograd holds after a forward, beside the network's own tensors; `made`: those are fake already."""
    for module in [] if made else net.modules():
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
