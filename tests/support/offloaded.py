"""A network whose blocks take keywords and containers, and trainings with graphs in host memory."""

import os
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)

from leangrpo_core import offload

from .grpo import WIDTH, Block, Policy
from .wrapped import Side, job

TOKENS = 32


class KeywordBlock(Block):
    """Called as diffusers calls its blocks: by keyword, with a pair of tensors and an option among the arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))

    def forward(self, x: Tensor, context: Tensor, pair: Any = None, *, scale: float = 1.0) -> Tensor:  # type: ignore[override]
        shift, stretch = pair
        x = (x * stretch + shift).to(self.gate.dtype)  # which FSDP may have cast
        return super().forward(x) * self.gate * scale + context


class KeywordPolicy(Policy):
    flows = True  # whether a gradient flows into the pair, which a reentrant checkpoint does not support

    def __init__(self, checkpointing: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(KeywordBlock() for _ in range(3))
        self.table: Tensor
        self.register_buffer("table", torch.linspace(-1, 1, TOKENS * WIDTH).view(TOKENS, WIDTH))

    def forward(self, latents: Tensor, timestep: Tensor, prompt: Tensor, scale: float = 1.0) -> Any:
        self.calls["grad" if torch.is_grad_enabled() else "no_grad"] += 1
        x, context = self.enter(latents), self.time(timestep[:, None, None]) + self.prompt(prompt)[:, None]
        pair = self.table.sin(), self.table.cos() * (context if self.flows else prompt.mean())
        for block in self.blocks:
            x = block(x=x, pair=pair, context=context, scale=0.5)
        return self.wrap(self.leave(x.to(self.leave.weight.dtype)) * scale)


class StillPolicy(KeywordPolicy):
    flows = False


def checkpointed(impl: CheckpointImpl = CheckpointImpl.NO_REENTRANT) -> Callable[[nn.Module], None]:
    """Puts torch's wrapper around each block, as DanceGRPO does once the network is sharded."""

    def wrapper(module: nn.Module) -> nn.Module:
        return cast(nn.Module, checkpoint_wrapper(module, checkpoint_impl=impl))

    def apply(net: nn.Module) -> None:
        apply_activation_checkpointing(
            net, checkpoint_wrapper_fn=wrapper, check_fn=lambda module: isinstance(module, Block)
        )

    return apply


def trio(rank: int, world: int, kind: str, options: dict[str, Any]) -> tuple[Side, Side, Side]:
    """Trainings on one rank: natively, with all graphs on the device, and with room for one and a half there."""
    offload.SMALL = 0
    options = {"config": {"tokens": TOKENS, "rollouts": 2, "accumulate": 2, **options.get("config", {})}} | {
        name: value for name, value in options.items() if name != "config"
    }
    env = options.pop("env", {})
    options["env"] = env
    native = job(rank, world, kind, False, options)
    device = job(rank, world, kind, True, options)
    budget = 1.5 * device.windows[-1]["graph_bytes"]
    options["env"] = env | {"LEANGRPO_BUDGET_GB": f"{budget / 1e9:.12f}", "LEANGRPO_OFFLOAD_GB": "unlimited"}
    host = job(rank, world, kind, True, options)
    for name in ("LEANGRPO_BUDGET_GB", "LEANGRPO_OFFLOAD_GB"):
        os.environ.pop(name)
    return native, device, host
