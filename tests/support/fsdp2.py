"""FSDP2's names, which torch 2.5 has in another place, and whether it runs on CPUs, as it does from torch 2.7 on."""

import functools

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

try:
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group as param_group
except ImportError:
    from torch.distributed._composable.fsdp import (  # type: ignore[no-redef]
        FSDPModule,
        MixedPrecisionPolicy,
        fully_shard,
    )
    from torch.distributed._composable.fsdp import (
        _fsdp_param_group as param_group,  # pyright: ignore[reportAttributeAccessIssue]
    )

__all__ = ["FSDPModule", "MixedPrecisionPolicy", "fully_shard", "param_group", "refusal"]


def native(rank: int, world: int) -> str:
    """What torch itself says to the smallest training under FSDP2, without the runtime: nothing if it works."""
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    try:
        for module in (*net, net):
            fully_shard(module, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        net(torch.ones(1, 2)).sum().backward()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


@functools.cache
def refusal() -> str:
    """What `native` finds, asked once."""
    from . import ranks

    return ranks.run(native, 1)[0]
