"""What each wrapper around the network demands of kept graphs, and agreement between ranks.

A replay on one rank beside a recomputation on another is a hang wherever the wrapper communicates, so verdicts are
collective there. Each statement here is a test of the kit on two ranks or more (`tests/unit/test_wrappers.py` there).
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.nn.parallel import DistributedDataParallel

from . import fsdp1, layermajor
from .agree import anyones, everyones, world_size
from .cutting import Cuts, cutting
from .errors import LeanError
from .guard import FSDPModule, checksum


def same_settings(text: str) -> None:
    """Compares the settings of all ranks. Raises LG602 on every rank if one differs."""
    texts = everyones(text) if world_size() > 1 else [text]
    if len(set(texts)) > 1:
        listed = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(texts))
        raise LeanError("LG602", listed, "export the same LEANGRPO_* variables on every node")


@dataclass(frozen=True)
class Wrapper:
    """How to treat graphs kept through one kind of wrapper.

    Attributes:
        kind: `none`, `ddp`, `fsdp1` or `fsdp2`.
        flush: `in order` (one backward per graph), `flat` (in order, then one all-reduce), `armed` (in order, with what
            FSDP1 left at each forward), `joint` (one backward for all graphs), `layer-major` (the last unit of all
            graphs, then the one before it).
        collective: the wrapper communicates, so ranks must decide together.
        communicates: it does so in the backward of a kept graph.
        refusal: why nothing can be kept through this wrapper; empty if it can.
        shards: over how many ranks it spreads the weights.
        notice: why it is not treated as upstream's reductions would need it.
    """

    kind: str
    flush: str
    collective: bool = False
    communicates: bool = False
    refusal: str = ""
    shards: int = 1
    notice: str = ""

    def told(self, late: bool) -> str:
        """What a user should know about this wrapper, or nothing; `late` as for :func:`classify`."""
        if self.notice:
            how = "one by one, as upstream" if self.flush == "in order" else "in one backward"
            return f"{self.kind}: {self.notice}; kept graphs are walked {how}"
        if self.kind == "none" and not self.refusal and not late and world_size() > 1:
            return (
                "the network has no wrapper: as upstream, no gradient is shared between ranks "
                "(LEANGRPO_SYNC=late averages them)"
            )
        return ""


def classify(net: nn.Module, late: bool = False) -> Wrapper:
    """The wrapper around `net`. What is not known to be exact is refused, with the reason.

    Args:
        late: gradients are to be reduced once per update where that is possible.
    """
    several = world_size() > 1
    if isinstance(net, DistributedDataParallel):
        refusal = ""
        if net.static_graph:
            refusal = "DDP with static_graph cannot hold graphs"
        elif dist.get_world_size(net.process_group) != world_size():
            refusal = "DDP over a part of the ranks is not supported yet"
        elif getattr(net, "_comm_hooks", None):
            refusal = "DDP with a communication hook is not supported yet"
        return Wrapper("ddp", "flat" if several else "in order", refusal=refusal)
    if isinstance(net, FullyShardedDataParallel):
        # On one rank FSDP1 neither shards nor reduces.
        return _fsdp1(net, late) if several else Wrapper("fsdp1", "in order", refusal=_offloaded(net))
    for name, module in net.named_modules():
        if isinstance(module, (DistributedDataParallel, FullyShardedDataParallel)):
            return Wrapper("none", "in order", several, refusal=f"only a part of the network ({name}) is wrapped")
        if isinstance(module, FSDPModule):
            return _fsdp2(net, several, late)
    if "deepspeed" in type(net).__module__:
        return Wrapper("none", "in order", several, refusal="DeepSpeed engines are not supported yet")
    return Wrapper("none", "in order")


def _fsdp1(net: FullyShardedDataParallel, late: bool) -> Wrapper:
    """One graph after the other as upstream; all in one backward if asked for or if this torch is not known."""
    unknown = fsdp1.supports(net)
    low = {torch.bfloat16, torch.float16} & {net.mixed_precision.param_dtype, *(p.dtype for p in net.parameters())}
    if not unknown and (not late or low):
        return Wrapper("fsdp1", "armed", True, True)
    refusal = _offloaded(net)
    if low and not refusal:
        # Upstream rounds the sum after every backward, a joint one rounds once.
        refusal = f"{unknown}, and a joint backward would add up gradients in {low.pop()} otherwise than upstream"
    shards = 1 if net.sharding_strategy == ShardingStrategy.NO_SHARD else dist.get_world_size(net.process_group)
    return Wrapper("fsdp1", "joint", True, True, refusal, shards, unknown)


def _fsdp2(net: nn.Module, several: bool, late: bool) -> Wrapper:
    """One graph after the other as upstream, or, if asked for, each unit gathered and reduced once per flush."""
    if not several or not late:
        return Wrapper("fsdp2", "in order", several, several)
    unknown = layermajor.supports(net)
    return Wrapper("fsdp2", "in order" if unknown else "layer-major", True, True, notice=unknown)


def _offloaded(net: FullyShardedDataParallel) -> str:
    offloads = net.cpu_offload is not None and net.cpu_offload.offload_params
    return "FSDP with parameters offloaded to the CPU is not supported yet" if offloads else ""


def bare(net: nn.Module) -> nn.Module:
    """The network inside DDP, so that a rollout around the wrapper and an update through it are the same one."""
    return net.module if isinstance(net, DistributedDataParallel) else net


def innermost(net: nn.Module) -> nn.Module:
    """The network inside DDP, FSDP1 and `torch.compile`: its `forward` has the signature that callers know."""
    while True:
        inner = getattr(net, "_orig_mod", None)
        if isinstance(net, (DistributedDataParallel, FullyShardedDataParallel)):
            inner = net.module
        if not isinstance(inner, nn.Module):
            return net
        net = inner


def casts_inputs(net: nn.Module) -> bool:
    """Whether the wrapper brings floating-point arguments to one dtype, so that equal values in another are equal."""
    if not isinstance(net, FullyShardedDataParallel):
        return False
    precision = net.mixed_precision
    return precision.param_dtype is not None and (precision.cast_root_forward_inputs or precision.cast_forward_inputs)


@contextmanager
def unsynchronised(net: nn.Module) -> Iterator[None]:
    """DDP reads at the forward whether its backward will communicate: that of a kept graph must not.

    Its flag for buffers is left as a forward under no_grad leaves it, so that ranks which keep this call and ranks
    which do not go on alike.
    """
    if isinstance(net, DistributedDataParallel):
        with net.no_sync():
            yield
    else:
        yield


@contextmanager
def alone(net: nn.Module) -> Iterator[None]:
    """A forward through DDP that communicates nothing, nor its backward, and leaves no trace in the wrapper.

    Other ranks may replay in place of this call, so even the flag for buffers must be as if it had not been made.
    """
    if isinstance(net, DistributedDataParallel):
        flag, net.require_forward_param_sync = net.require_forward_param_sync, False
        try:
            with net.no_sync():
                yield
        finally:
            net.require_forward_param_sync = flag
    else:
        yield


@contextmanager
def keeping(net: nn.Module, wrapper: Wrapper) -> Iterator[fsdp1.Held | Cuts | None]:
    """Around a forward whose graph is held. Yields what its backward will need.

    FSDP1 remembers one forward only, so that is what it left for this one; for `layer-major` the cuts in the graph.
    """
    with unsynchronised(net):
        if wrapper.flush == "armed":
            with fsdp1.holding(net) as held:
                yield held
        elif wrapper.flush == "layer-major":
            with cutting(net) as cuts:
                yield cuts
        else:
            yield None


@contextmanager
def walking(net: nn.Module, held: fsdp1.Held | Cuts | None) -> Iterator[None]:
    """Around the backward of a kept graph."""
    if not isinstance(held, fsdp1.Held):
        yield
    else:
        with fsdp1.walking(net, held):
            yield


@torch.no_grad()
def flat_mean(parameters: Sequence[nn.Parameter]) -> None:
    """Averages the gradients of all `parameters` over the ranks, one all-reduce per dtype and device.

    A rank without a gradient for a parameter takes part with zeros. A parameter without a gradient on every rank keeps
    None, since AdamW treats None and zeros differently.
    """
    has = anyones([p.grad is not None for p in parameters])
    used = [p for p, some in zip(parameters, has, strict=True) if some]
    for kind in sorted({(str(p.dtype), str(p.device)) for p in used}):
        group = [p for p in used if (str(p.dtype), str(p.device)) == kind]
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in group]
        flat = torch.cat([grad.reshape(-1) for grad in grads])
        dist.all_reduce(flat)
        flat /= world_size()
        for parameter, grad, mean in zip(group, grads, flat.split([g.numel() for g in grads]), strict=True):
            grad.copy_(mean.view_as(grad))
            parameter.grad = grad


def same_gradients(parameters: Sequence[nn.Parameter]) -> None:
    """Compares the gradients of all ranks, to the bit. Raises LG609 on every rank if a replica differs."""
    sums = everyones(checksum(p.grad for p in parameters if p.grad is not None))
    if len(set(sums)) > 1:
        others = [str(rank) for rank, found in enumerate(sums) if found != sums[0]]
        raise LeanError(
            "LG609",
            f"rank {', '.join(others)} differs from rank 0 after the flush",
            "train with LEANGRPO_SCHEDULE=recompute and report the start line",
        )
