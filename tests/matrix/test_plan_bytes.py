"""What autograd saves of public networks, and what they compute, as plan.yaml and networks.yaml have it: counted on
networks of that size without a byte of memory for them. Norms are in fp32, as CUDA's autocast has them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import diffusers
import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from leangrpo_tools.plan import facts, networks
from leangrpo_tools.plan.memory import Memory
from leangrpo_tools.plan.networks import Model, sized

pytestmark = pytest.mark.matrix
JOINT = ["attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0"]
JOINT += ["attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj", "attn.to_add_out"]
FEED = ["ff.net.0.proj", "ff.net.2", "ff_context.net.0.proj", "ff_context.net.2"]
SHORT = ["to_q", "to_k", "to_v", "to_out.0"]
MLP = ["img_mlp.net.0.proj", "img_mlp.net.2", "txt_mlp.net.0.proj", "txt_mlp.net.2"]
# Rank and layers of each script's LoRA.
LORA = {
    ("DanceGRPO", "flux_lora"): (128, SHORT), ("flowGRPO", "sd3"): (32, JOINT),
    ("flowGRPO", "flux"): (64, JOINT + FEED),
    ("flowGRPO", "flux_kontext"): (64, [*JOINT, *FEED, "proj_mlp"]), ("flowGRPO", "qwenimage"): (64, JOINT + MLP),
    ("flowGRPO", "wan2_1"): (32, SHORT),
}  # fmt: skip
CASES = [
    ("DanceGRPO", "flux", "flux.1-dev"), ("DanceGRPO", "flux_lora", "flux.1-dev"),
    ("DanceGRPO", "wan_2_1", "wan2.1-t2v-1.3b"), ("DanceGRPO", "wan_2_1", "wan2.1-t2v-14b"),
    ("DanceGRPO", "qwenimage", "qwen-image"), ("flowGRPO", "sd3", "sd3.5-medium"), ("flowGRPO", "sd3", "sd3-medium"),
    ("flowGRPO", "sd3", "sd3.5-large"), ("flowGRPO", "flux", "flux.1-dev"), ("flowGRPO", "flux", "flux.1-schnell"),
    ("flowGRPO", "flux_kontext", "flux.1-kontext-dev"),
]  # fmt: skip


def made(upstream: str, script: str, name: str) -> torch.nn.Module:
    """The network with the script's LoRA, on the meta device, in the precision that its weights have in a forward."""
    network, known = networks.load()[name], facts.load(upstream).scripts[script]
    low = known.stored_bytes == 2 or (known.low_precision and (upstream, script) not in LORA)
    torch.set_default_dtype(torch.bfloat16 if low else torch.float32)
    try:
        with torch.device("meta"):
            net = getattr(diffusers, network.kind)(**network.configuration)
    finally:
        torch.set_default_dtype(torch.float32)
    if (upstream, script) in LORA:
        rank, targets = LORA[upstream, script]
        net.requires_grad_(False)
        net = get_peft_model(net, LoraConfig(r=rank, target_modules=targets))
    return net


def inputs(name: str, rows: int, tokens: int, text: int) -> dict[str, object]:
    side = 2 * math.isqrt(tokens)
    if name.startswith("flux"):
        guidance: dict[str, object] = {} if name == "flux.1-schnell" else {"guidance": torch.empty(rows)}
        return guidance | {
            "hidden_states": torch.empty(rows, tokens, 64), "timestep": torch.empty(rows),
            "encoder_hidden_states": torch.empty(rows, text, 4096),
            "pooled_projections": torch.empty(rows, 768), "txt_ids": torch.empty(text, 3),
            "img_ids": torch.empty(tokens, 3),
        }  # fmt: skip
    if name.startswith("sd3"):
        return {
            "hidden_states": torch.empty(rows, 16, side, side), "timestep": torch.empty(rows),
            "encoder_hidden_states": torch.empty(rows, text, 4096), "pooled_projections": torch.empty(rows, 2048),
        }  # fmt: skip
    if name.startswith("qwen"):
        kind = torch.bfloat16
        return {
            "hidden_states": torch.empty(rows, tokens, 64, dtype=kind), "timestep": torch.empty(rows, dtype=kind),
            "encoder_hidden_states": torch.empty(rows, text, 3584, dtype=kind),
            "img_shapes": [[(1, 32, tokens // 32)]] * rows,
            "encoder_hidden_states_mask": torch.ones(rows, text, dtype=torch.bool),
        }  # fmt: skip
    found: dict[str, object] = {
        "hidden_states": torch.empty(rows, 16, 1, side, side), "timestep": torch.empty(rows),
        "encoder_hidden_states": torch.empty(rows, text or 512, 4096),  # read by cross-attention only in Wan
    }  # fmt: skip
    if name.startswith("hunyuan"):
        found |= {
            "encoder_attention_mask": torch.ones(rows, text), "pooled_projections": torch.empty(rows, 768),
            "guidance": torch.empty(rows),
        }  # fmt: skip
    return found


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("upstream", "script", "name"), CASES)
def test_saved_tensors(upstream: str, script: str, name: str) -> None:
    """Without checkpointing, within 2 % for one and three inputs, at 512 and 768 squared."""
    model = as_trained(upstream, script, name)
    for rows, tokens in ((1, 1024), (3, 1024), (1, 2304)):
        if rows > 1 and name.startswith("qwen"):
            continue  # traced for one prompt's own length
        net = made(upstream, script, name)
        with FakeTensorMode(allow_non_fake_inputs=True), torch.autocast("cpu", torch.bfloat16):
            counted = saved(net, inputs(name, rows, tokens, model.text_tokens))
        memory = Memory(model, 1.0, 1, tokens * 256, 80e9, sharded=False, checkpointed=0.0, inputs=rows)
        assert memory.graph == pytest.approx(counted, rel=2e-2), (rows, tokens)


def as_trained(upstream: str, script: str, name: str) -> Model:
    known = facts.load(upstream).scripts[script]
    return sized(networks.load()[name], known.graphs[name], known.text_tokens, known.stored_bytes)


@pytest.mark.parametrize(("upstream", "script"), LORA)
def test_trained_parameters(upstream: str, script: str) -> None:
    """Exactly, for every network that the script's LoRA was counted for."""
    for name, graph in facts.load(upstream).scripts[script].graphs.items():
        trained = sum(p.numel() for p in made(upstream, script, name).parameters() if p.requires_grad)
        assert graph.trained_parameters == trained, name


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("flux.1-dev", 512), ("wan2.1-t2v-1.3b", 0), ("wan2.1-t2v-14b", 0), ("hunyuanvideo", 256), ("qwen-image", 128),
        ("sd3.5-medium", 205), ("sd3-medium", 205), ("sd3.5-large", 205),
    ],
)  # fmt: skip
def test_operations(name: str, text: int) -> None:
    """Per image token within 2 %, per text token within 10 %. Attention is not counted on a CPU."""
    network, found = networks.load()[name], []
    torch.set_default_dtype(torch.bfloat16 if name.startswith("qwen") else torch.float32)
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
            net = getattr(diffusers, network.kind)(**network.configuration)
            torch.set_default_dtype(torch.float32)
            for tokens in (1024, 4096):
                with FlopCounterMode(display=False) as counter:
                    net(**inputs(name, 1, tokens, text))
                found.append(counter.get_total_flops())
    finally:
        torch.set_default_dtype(torch.float32)
    assert network.image_token_flops == pytest.approx((found[1] - found[0]) / 3072, rel=0.02)
    if text:
        words = (found[0] - 1024 * network.image_token_flops) / text
        assert network.text_token_flops == pytest.approx(words, rel=0.1)


@contextmanager
def norms_in_fp32() -> Iterator[None]:
    """As CUDA's autocast has them; a CPU's has them in 16 bits."""

    def norm(x, shape, weight=None, bias=None, eps=1e-5):  # type: ignore[no-untyped-def]
        weight, bias = (item if item is None else item.float() for item in (weight, bias))
        return torch.layer_norm(x.float(), shape, weight, bias, eps, False)

    old, F.layer_norm = F.layer_norm, norm
    try:
        yield
    finally:
        F.layer_norm = old


def saved(net: torch.nn.Module, arguments: dict) -> int:
    """Bytes that autograd holds after a forward, beside the network's own tensors."""
    for module in net.modules():
        for name, old in list(module._parameters.items()):
            if old is not None:
                fake = torch.empty(old.shape, dtype=old.dtype)
                module._parameters[name] = torch.nn.Parameter(fake, requires_grad=old.requires_grad)
        for name, old in list(module._buffers.items()):
            if old is not None:
                module._buffers[name] = torch.empty(old.shape, dtype=old.dtype)
    own = {item.untyped_storage()._cdata for item in [*net.parameters(), *net.buffers()]}
    held: dict[int, torch.UntypedStorage] = {}

    def hold(item: torch.Tensor) -> torch.Tensor:
        if item.untyped_storage()._cdata not in own:
            held[item.untyped_storage()._cdata] = item.untyped_storage()
        return item

    hooks = torch.autograd.graph.saved_tensors_hooks(hold, lambda item: item)
    with norms_in_fp32(), sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]), hooks:
        net(**arguments)
    return sum(storage.nbytes() for storage in held.values())
