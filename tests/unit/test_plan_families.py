"""The closed forms of `plan/families.py`, against what autograd saves of networks of that shape."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from diffusers import FluxTransformer2DModel, SD3Transformer2DModel
from peft import LoraConfig, get_peft_model
from torch import nn

from leangrpo_tools.plan import families
from leangrpo_tools.plan.memory import Memory

JOINT = ["attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0"]
JOINT += ["attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj", "attn.to_add_out"]


def saved(net: nn.Module, sixteen_bit: bool, **inputs: torch.Tensor | None) -> int:
    """Bytes that autograd holds after a forward, beside the network's own tensors and its arguments."""
    known = [*net.parameters(), *net.buffers(), *(item for item in inputs.values() if item is not None)]
    own = {item.untyped_storage()._cdata for item in known}
    held: dict[int, torch.UntypedStorage] = {}

    def hold(item: torch.Tensor) -> torch.Tensor:
        if item.untyped_storage()._cdata not in own:
            held[item.untyped_storage()._cdata] = item.untyped_storage()
        return item

    hooks = torch.autograd.graph.saved_tensors_hooks(hold, lambda item: item)
    with hooks, torch.autocast("cpu", torch.bfloat16, enabled=sixteen_bit):
        out = net(**inputs, return_dict=False)
    del out
    return sum(storage.nbytes() for storage in held.values())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("sixteen_bit", [False, True])
@pytest.mark.parametrize(
    ("width", "double", "single", "head", "guidance"), [(64, 1, 2, 32, False), (96, 2, 3, 16, True)]
)
def test_flux(width: int, double: int, single: int, head: int, guidance: bool, sixteen_bit: bool) -> None:
    net = FluxTransformer2DModel(
        in_channels=16, num_layers=double, num_single_layers=single, attention_head_dim=head,
        num_attention_heads=width // head, joint_attention_dim=width, pooled_projection_dim=width,
        axes_dims_rope=(8, 12, 12) if head == 32 else (4, 6, 6), guidance_embeds=guidance,
    )  # fmt: skip
    for image, text in ((256, 16), (64, 40)):
        counted = saved(
            net, sixteen_bit, hidden_states=torch.zeros(1, image, 16), timestep=torch.zeros(1),
            encoder_hidden_states=torch.zeros(1, text, width), pooled_projections=torch.zeros(1, width),
            img_ids=torch.zeros(image, 3), txt_ids=torch.zeros(text, 3),
            guidance=torch.zeros(1) if guidance else None,
        )  # fmt: skip
        model = families.flux(
            width, double, single, head=head, channels=16, text=width, text_tokens=text, sixteen_bit=sixteen_bit,
            guidance=guidance,
        )  # fmt: skip
        assert model.parameters == sum(p.numel() for p in net.parameters())
        blocks = [*net.transformer_blocks, *net.single_transformer_blocks]
        assert model.largest_unit == max(sum(p.numel() for p in block.parameters()) for block in blocks)
        formula = Memory(model, 1.0, 1, image, 1.0, sharded=False, checkpointed=0.0).graph
        assert formula == pytest.approx(counted, rel=0.03)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("sixteen_bit", [False, True])
@pytest.mark.parametrize(("width", "layers", "rank"), [(32, 2, 32), (64, 3, 8)])
def test_sd3(width: int, layers: int, rank: int, sixteen_bit: bool) -> None:
    net: nn.Module = SD3Transformer2DModel(
        sample_size=8, patch_size=1, in_channels=4, num_layers=layers, attention_head_dim=16,
        num_attention_heads=width // 16, joint_attention_dim=64, caption_projection_dim=width,
        pooled_projection_dim=64, out_channels=4, pos_embed_max_size=16,
    )  # fmt: skip
    net.requires_grad_(False)
    net = get_peft_model(net, LoraConfig(r=rank, target_modules=JOINT))  # type: ignore[arg-type]
    for rows, side, text in product((1, 3), (8, 12), (16,)):
        counted = saved(
            net, sixteen_bit, hidden_states=torch.zeros(rows, 4, side, side), timestep=torch.zeros(rows),
            encoder_hidden_states=torch.zeros(rows, text, 64), pooled_projections=torch.zeros(rows, 64),
        )  # fmt: skip
        model = families.sd3(width, layers, head=16, rank=rank, text_tokens=text, sixteen_bit=sixteen_bit)
        formula = Memory(model, 1.0, 1, side * side, 1.0, sharded=False, checkpointed=0.0, inputs=rows).graph
        assert formula == pytest.approx(counted, rel=0.03)
