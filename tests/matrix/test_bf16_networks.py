"""Reweighted gradients under bf16 autocast are no further from fp64 than native ones, with networks of diffusers.

    bash tools/test -m matrix tests/matrix/test_bf16_networks.py -n 0 -s

Tiny networks of the kinds that DanceGRPO (FLUX, all weights, one sample a call), TRL (Stable Diffusion's UNet, LoRA)
and FlowGRPO (SD3, LoRA) train, in the small trainers of `tests/support`, since in upstream's own scripts an fp64 run
would take another trajectory. The reference repeats the native update's calls on the same inputs and with the same
derivatives at the outputs, with the network's weights in double and without autocast. Base weights under LoRA are bf16.
"""

import copy
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support import batched, grpo
from support.grpo import Result
from torch import Tensor, nn

from leangrpo_core import Lean
from leangrpo_rehearsal.scripts.tiny import randomise

pytestmark = [pytest.mark.matrix, pytest.mark.slow]
WIDTH, SIZE, MOST = 32, (4, 2), 1.1


class Recorded(nn.Module):
    """A network under bf16 autocast that remembers what goes into its calls with gradient and comes back to them."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net
        self.calls: Any = []
        self.inputs: list[tuple[Tensor, Tensor, Tensor]] = []
        self.cotangents: list[Tensor] = []
        self.recording = False

    def velocity(self, latents: Tensor, timestep: Tensor, prompts: Tensor) -> Tensor:
        raise NotImplementedError

    def under_autocast(self, latents: Tensor, timestep: Tensor, prompts: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            out = self.velocity(latents, timestep, prompts)
        # In bf16 the derivatives would be rounded as natively, and the reference would share that error.
        out = out.float()
        if self.recording and out.requires_grad:
            place = len(self.inputs)
            self.inputs.append((latents.detach(), timestep.detach(), prompts.detach()))
            self.cotangents.append(torch.empty(0))
            out.register_hook(lambda grad: self.cotangents.__setitem__(place, grad.detach().double()))
        return out


class Flux(Recorded):
    """For `grpo.train`."""

    def __init__(self) -> None:
        from diffusers import FluxTransformer2DModel

        net = FluxTransformer2DModel(
            patch_size=1, in_channels=8, num_layers=2, num_single_layers=3, attention_head_dim=16,
            num_attention_heads=2, joint_attention_dim=8, pooled_projection_dim=8, guidance_embeds=False,
            axes_dims_rope=(4, 6, 6),
        )  # fmt: skip
        randomise(net)
        super().__init__(net)
        self.calls = {"grad": 0, "no_grad": 0}

    def velocity(self, latents: Tensor, timestep: Tensor, prompts: Tensor) -> Tensor:
        places = torch.zeros(latents.shape[1], 3)
        places[:, 1] = torch.arange(latents.shape[1])
        return self.net(
            hidden_states=latents, encoder_hidden_states=prompts[:, None], pooled_projections=prompts,
            timestep=timestep, img_ids=places, txt_ids=torch.zeros(1, 3), return_dict=False,
        )[0]  # fmt: skip

    def forward(self, latents: Tensor, timestep: Tensor, prompt: Tensor) -> tuple[Tensor]:
        return (self.under_autocast(latents, timestep, prompt),)


class Batched(Recorded):
    """For `batched.train`, with LoRA: latents of three channels."""

    def __init__(self, net: Any) -> None:
        from peft import LoraConfig

        randomise(net)
        net.requires_grad_(False).to(torch.bfloat16)
        net.add_adapter(LoraConfig(r=4, lora_alpha=8, target_modules=["to_q", "to_k", "to_v", "to_out.0"]))
        for name, parameter in net.named_parameters():
            if "lora_" in name:
                parameter.data = torch.randn(parameter.shape) * 0.1
        super().__init__(net)

    def velocity(self, latents: Tensor, timestep: Tensor, prompts: Tensor) -> Tensor:
        x = latents.reshape(-1, 3, *SIZE)
        out = self.image(x, 1000 * timestep.expand(len(x)), prompts)
        return out.flatten(2)

    def image(self, x: Tensor, timestep: Tensor, prompts: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(
        self, latents: Tensor, timestep: Tensor, prompts: Tensor, return_dict: bool = True
    ) -> batched.Output | tuple[Tensor]:
        self.calls.append(("grad" if torch.is_grad_enabled() else "no_grad", len(latents)))
        out = self.under_autocast(latents, timestep, prompts)
        return batched.Output(out) if return_dict else (out,)


class Unet(Batched):
    def __init__(self) -> None:
        from diffusers import UNet2DConditionModel

        super().__init__(
            UNet2DConditionModel(
                sample_size=SIZE, in_channels=3, out_channels=3, down_block_types=("CrossAttnDownBlock2D",),
                up_block_types=("CrossAttnUpBlock2D",), block_out_channels=(WIDTH,), layers_per_block=1,
                cross_attention_dim=8, attention_head_dim=8, norm_num_groups=8,
            )
        )  # fmt: skip

    def image(self, x: Tensor, timestep: Tensor, prompts: Tensor) -> Tensor:
        return self.net(x, timestep, prompts[:, None], return_dict=False)[0]


class Sd3(Batched):
    def __init__(self) -> None:
        from diffusers import SD3Transformer2DModel

        super().__init__(
            SD3Transformer2DModel(
                sample_size=4, patch_size=1, in_channels=3, num_layers=2, attention_head_dim=16, num_attention_heads=2,
                joint_attention_dim=8, caption_projection_dim=WIDTH, pooled_projection_dim=8, out_channels=3,
                pos_embed_max_size=4,
            )
        )  # fmt: skip

    def image(self, x: Tensor, timestep: Tensor, prompts: Tensor) -> Tensor:
        return self.net(x, prompts[:, None], prompts, timestep, return_dict=False)[0]


def one_sample_a_call(lean: Lean | None, net: Any) -> Result:
    config = grpo.Config(rollouts=1, rows=12, accumulate=12, tokens=16, clip=0.0)
    return grpo.train(lean, net, torch.optim.SGD(net.parameters(), lr=0.0), config)


def in_batches(lean: Lean | None, net: Any) -> Result:
    """With guidance: two copies of each sample in a call."""
    return batched.train(lean, net, batched.Config(rollouts=1, batches=4, accumulate=4))


TRAININGS: dict[str, tuple[Callable[[], Recorded], Callable[[Lean | None, Any], Result]]] = {
    "FLUX": (Flux, one_sample_a_call), "UNet with LoRA": (Unet, in_batches), "SD3 with LoRA": (Sd3, in_batches),
}  # fmt: skip


@pytest.mark.parametrize("buffers", ["sample", "affine"])
@pytest.mark.parametrize("name", TRAININGS)
def test_no_further_from_fp64_than_native(
    name: str, buffers: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("LEANGRPO_SCHEDULE", "reweight")
    monkeypatch.setenv("LEANGRPO_BUFFERS", buffers)
    monkeypatch.setenv("LEANGRPO_AUDIT", "off")
    monkeypatch.setenv("LEANGRPO_REPORT_DIR", str(tmp_path))
    kind, train = TRAININGS[name]

    def made() -> Any:
        torch.manual_seed(0)
        return kind()

    exact = copy.deepcopy(made()).double()
    net = made()
    net.recording = True
    native, lean = train(None, net), train(Lean(), made())
    (window,) = (json.loads(line) for line in (tmp_path / "rank0.jsonl").read_text().splitlines())
    assert window["recomputed"] == 0 and window["kept"] and window["gradients"]
    for inputs, cotangent in zip(net.inputs, net.cotangents, strict=True):
        exact.velocity(*(value.double() for value in inputs)).backward(cotangent)
    truth = {key: p.grad for key, p in exact.named_parameters() if p.grad is not None}

    def distance(result: Result) -> float:
        off = sum(float((result.gradients[0][key].double() - grad).square().sum()) for key, grad in truth.items())  # type: ignore[union-attr]
        return math.sqrt(off / sum(float(grad.square().sum()) for grad in truth.values()))

    natively, reweighted = distance(native), distance(lean)
    print(f"\n{name}, {buffers}: native {natively:.3g} from fp64, reweighted {reweighted:.3g}", end=" ")
    assert 1e-4 < natively < 0.5
    assert reweighted <= MOST * natively
