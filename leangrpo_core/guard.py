"""Checks that a replay is what upstream would have computed: same weights, same mode, no CUDA graphs."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

try:
    from torch.distributed.fsdp import FSDPModule
except ImportError:  # torch before 2.6
    from torch.distributed._composable.fsdp import FSDPModule
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

# Products of one piece at a time: on a CPU as many as its cache holds, elsewhere enough to be worth a kernel.
_PIECES = {"cpu": 1 << 16}
_PIECE = 1 << 22
# 64-bit values as two halves: a sign in the highest bit of the sum would cancel in pairs.
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int32, 16: torch.int32}


def parameters_of(net: nn.Module) -> list[nn.Parameter]:
    """The weights as the optimizer knows them, always in one order.

    Between a forward and its backward a wrapper can have others in their place: FSDP2 gathered ones, which are given up
    first; FSDP1 with use_orig_params views of those, plain tensors.
    """
    for module in net.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    handles = [unit._handle for unit in FullyShardedDataParallel.fsdp_modules(net)]
    originals = [p for handle in handles if handle is not None for p in handle.flat_param._params or ()]
    return list(dict.fromkeys([*originals, *(p for p in net.parameters() if type(p) is not Tensor)]))


def local(tensor: Tensor) -> Tensor:
    """This rank's share of a tensor that FSDP2 shards; any other tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _multipliers(count: int, device: torch.device) -> Tensor:
    """One 64-bit number per place, mixed (splitmix64) so that no pattern of places cancels. Products wrap around."""
    mixed = torch.arange(1, count + 1, dtype=torch.int64, device=device) * -7046029254386353131
    mixed = (mixed ^ (mixed >> 30)) * -4658895280553007687
    mixed = (mixed ^ (mixed >> 27)) * -7723592293110705685
    return mixed ^ (mixed >> 31) | 1


@torch.no_grad()
def checksum(tensors: Iterable[Tensor]) -> tuple[int, ...]:
    """One number per tensor over its bits and their places, exact in integers.

    Unlike a norm it sees flipped signs, exchanged values and permutations. Works in pieces, so no copy of the weights
    is made.
    """
    sums: list[Tensor] = []
    multipliers: dict[torch.device, Tensor] = {}
    for tensor in tensors:
        flat = local(tensor.detach()).contiguous().reshape(-1)
        bits = flat.view(BITS[flat.element_size()])
        largest = _PIECES.get(bits.device.type, _PIECE)
        piece = min(max(bits.numel(), 1), largest)
        known = multipliers.get(bits.device)
        if known is None or len(known) < piece:
            known = multipliers[bits.device] = _multipliers(piece, bits.device)
        total = torch.zeros((), dtype=torch.int64, device=bits.device)
        for part in bits.split(largest):
            total = total * 31 + (part * known[: len(part)]).sum()
        sums.append(total.cpu())
    return tuple(torch.stack(sums).tolist()) if sums else ()


def generator_states(device: torch.device) -> list[Tensor]:
    """States of the generators a network on `device` could draw from."""
    states = [torch.get_rng_state()]
    return [*states, torch.cuda.get_rng_state(device)] if device.type == "cuda" else states


def why_unlike_training(net: nn.Module) -> str | None:
    """Why a forward in the rollout cannot equal one in the update, or None.

    Rollouts run in eval mode, updates in train mode. Both are one function as long as no layer behaves differently
    in them; activation checkpointing does not change values.
    """
    for name, module in net.named_modules():
        if isinstance(module, _DropoutNd) and module.p > 0:
            return f"dropout {module.p:g} is active in {name or 'the network'}"
        if isinstance(module, _BatchNorm):
            return f"{name or 'the network'} is a batch norm"
    return None


def uses_cuda_graphs(net: nn.Module) -> bool:
    """Whether `net`, or a part of it, was compiled in a mode that replays CUDA graphs.

    Such a graph writes every result into the same memory, so what an earlier call held would be overwritten.
    """
    for module in net.modules():
        compiled: Any = getattr(module, "_compiled_call_impl", None)
        config = getattr(compiled, "get_compiler_config", None)
        context = getattr(module, "dynamo_ctx", None)
        options = config() if callable(config) else getattr(context, "compiler_config", None)
        if isinstance(options, dict) and options.get("triton.cudagraphs"):
            return True
    return False
