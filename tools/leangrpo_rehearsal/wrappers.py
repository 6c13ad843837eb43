"""What the trained network is wrapped in, as the run itself has wrapped it."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

NONE, DDP, FSDP2 = "none", "DDP", "FSDP2"

_made: list[nn.Module] = []
_used: set[int] = set()  # wrappers whose forward was called: DDP averages in no other backward


def install() -> None:
    """From here on each DDP and FSDP1 that is made is known, and which of them are called."""
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.nn.parallel import DistributedDataParallel

    for kind in (DistributedDataParallel, FullyShardedDataParallel):
        _watch(kind)


def _watch(kind: Any) -> None:
    init, forward = kind.__init__, kind.forward

    @functools.wraps(init)
    def made(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        _made.append(self)

    @functools.wraps(forward)
    def called(self: Any, *args: Any, **kwargs: Any) -> Any:
        _used.add(id(self))
        return forward(self, *args, **kwargs)

    kind.__init__, kind.forward = made, called


def without_reductions() -> None:
    """DDP reduces no gradient from here on: whoever asks for that averages them before they are used."""
    from torch.nn.parallel import DistributedDataParallel

    init: Any = DistributedDataParallel.__init__

    @functools.wraps(init)
    def made(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        self.require_backward_grad_sync = False

    DistributedDataParallel.__init__ = made  # type: ignore[method-assign]


def around(network: nn.Module) -> str:
    """`none`, `DDP`, `FSDP2`, or for FSDP1 its sharding strategy, such as `FULL_SHARD`.

    A wrapper that is never called does nothing, so it is left out. `DDP of a part` wraps some of the network's modules
    only. Several are joined by ` in `.
    """
    used = [item for item in _made if id(item) in _used]
    found = [item for item in used if isinstance(item, nn.parallel.DistributedDataParallel)]
    names = [DDP for item in found if _holds(item, network)]
    inside = {id(module) for module in network.modules()}
    names = names or [f"{DDP} of a part" for item in found if id(item) in inside]
    known = {id(item) for item in found}
    sharded = [item for item in used if id(item) not in known and (id(item) in inside or _holds(item, network))]
    names = [str(sharded[-1].sharding_strategy.name), *names] if sharded else names  # type: ignore[union-attr]
    if any(
        hasattr(module, "set_requires_gradient_sync") for module in network.modules()
    ):  # weights may be gathered now
        names = [FSDP2, *names]
    return " in ".join(dict.fromkeys(names)) or NONE


def _holds(wrapper: nn.Module, network: nn.Module) -> bool:
    return any(module is network for module in wrapper.modules())


def local(tensor: Any) -> torch.Tensor:
    """This rank's shard of what FSDP2 or another user of DTensor has sharded; else the tensor."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def write(out: Path, networks: list[nn.Module]) -> None:
    """`wrapper.json` under `out`: what the networks that were called are wrapped in."""
    names = dict.fromkeys(around(network) for network in networks)
    (out / "wrapper.json").write_text(json.dumps(list(names)))
