"""What each wrapper around the network demands of kept graphs, and agreement between ranks.

A replay on one rank beside a recomputation on another is a hang wherever the wrapper communicates, so verdicts are
collective there. Each statement here is a test of the kit on two ranks or more (`tests/unit/test_wrappers.py` there).
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.nn.parallel import DistributedDataParallel

from . import fsdp1, layermajor, shells
from .agree import anyones, everyones, world_size
from .cutting import Cuts, cutting
from .errors import LeanError
from .guard import FSDPModule, checksum
from .values import map_tensors, rebuildable

DEEPSPEED = (
    "DeepSpeed reduces gradients inside its engine, where no kept graph ends (use DDP in its place, with accelerate "
    "its multi_gpu.yaml: LoRA needs no ZeRO)"
)


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
        kind: `none`, `ddp`, `fsdp1`, `fsdp2` or `deepspeed`.
        flush: `in order` (one backward per graph), `flat` (in order, then one all-reduce), `armed` (in order, with what
            FSDP1 left at each forward), `joint` (one backward for all graphs, with what it left if `known`),
            `layer-major` (the last unit of all graphs, then the one before it).
        collective: the wrapper communicates, so ranks must decide together.
        communicates: it does so in the backward of a kept graph.
        refusal: why nothing can be kept through this wrapper; empty if it can.
        shards: over how many ranks it spreads the weights.
        notice: why it is not treated as upstream's reductions would need it.
        known: what FSDP1 leaves at a forward can be kept with its graph.
    """

    kind: str
    flush: str
    collective: bool = False
    communicates: bool = False
    refusal: str = ""
    shards: int = 1
    notice: str = ""
    known: bool = False

    @property
    def alone(self) -> bool:
        """Whether all held graphs must be walked at once, and no native call may run beside them."""
        return self.flush == "joint" and not self.known

    @property
    def late(self) -> bool:
        """Whether it reduces once for many backward passes."""
        return self.flush in ("joint", "layer-major") and not self.refusal

    def told(self, setting: str) -> str:
        """What a user should know about this wrapper, or nothing, with LEANGRPO_SYNC as `setting`."""
        if setting == "group" and self.kind in ("none", "ddp") and not self.refusal and world_size() > 1:
            return "LEANGRPO_SYNC=group averages gradients once per update here, as late does"
        if setting == "group" and self.alone:
            return f"{self.kind}: {self.notice}; gradients are reduced once per update, as with LEANGRPO_SYNC=late"
        if self.notice:
            how = "one by one, as upstream" if self.flush == "in order" else "in one backward"
            return f"{self.kind}: {self.notice}; kept graphs are walked {how}"
        if self.kind == "none" and not self.refusal and setting == "upstream" and world_size() > 1:
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
    wrapper = _classify(net, late)
    return replace(wrapper, refusal=wrapper.refusal or shells.why_other(_inside_ddp(net)))


def _classify(net: nn.Module, late: bool) -> Wrapper:
    several = world_size() > 1
    if isinstance(net, DistributedDataParallel):
        refusal = ""
        if net.static_graph:
            refusal = "DDP with static_graph cannot hold graphs"
        elif dist.get_world_size(net.process_group) != world_size():
            refusal = "DDP over a part of the ranks is not supported yet"
        elif getattr(net, "mixed_precision", None) is not None:
            refusal = "DDP with mixed_precision of its own is not supported yet"
        elif getattr(net, "_comm_hooks", None):
            refusal = "DDP with a communication hook is not supported yet"
        return Wrapper("ddp", "flat" if several else "in order", refusal=refusal)
    if isinstance(net, FullyShardedDataParallel):
        if several or _copied(net):
            return _fsdp1(net, late)
        # On one rank FSDP1 neither shards nor reduces.
        return Wrapper("fsdp1", "in order", refusal=_offloaded(net))
    for name, module in net.named_modules():
        if isinstance(module, (DistributedDataParallel, FullyShardedDataParallel)):
            return Wrapper("none", "in order", several, refusal=f"only a part of the network ({name}) is wrapped")
        if isinstance(module, FSDPModule):
            return _fsdp2(net, several, late)
    if "deepspeed" in type(net).__module__:
        return Wrapper("deepspeed", "in order", several, refusal=DEEPSPEED)
    return Wrapper("none", "in order")


def apart(net: nn.Module) -> bool:
    """Whether ranks go through an update after a rollout each on its own, and average their gradients at its end."""
    wrapper = classify(net)
    return wrapper.flush == "flat" and not wrapper.refusal


def _fsdp1(net: FullyShardedDataParallel, late: bool) -> Wrapper:
    """One graph after the other as upstream; all in one backward if asked for or if this torch is not known."""
    unknown = fsdp1.supports(net)
    precision, stored = net.mixed_precision, {p.dtype for p in net.parameters()}
    low = {torch.bfloat16, torch.float16} & {precision.param_dtype, precision.reduce_dtype, *stored}
    low |= {precision.param_dtype} - {None, *stored}
    shards = 1 if net.sharding_strategy == ShardingStrategy.NO_SHARD else dist.get_world_size(net.process_group)
    if not unknown and (not late or low):
        return Wrapper("fsdp1", "armed", True, True, shards=shards, known=True)
    refusal = _offloaded(net)
    if low and not refusal:
        # Upstream rounds the sum after every backward, a joint one rounds once.
        refusal = f"{unknown}, and a joint backward would add up gradients in {low.pop()} otherwise than upstream"
    return Wrapper("fsdp1", "joint", True, True, refusal, shards, unknown, not unknown)


def _copied(net: FullyShardedDataParallel) -> bool:
    """Whether it computes with weights in another precision than it stores: it frees those copies after each forward,
    on one rank, too, and gathers them again only for a backward it knows of."""
    kind = net.mixed_precision.param_dtype
    return kind is not None and any(parameter.dtype != kind for parameter in net.parameters())


def _fsdp2(net: nn.Module, several: bool, late: bool) -> Wrapper:
    """One graph after the other as upstream, or, if asked for, each unit gathered and reduced once per flush."""
    if not several or not late:
        return Wrapper("fsdp2", "in order", several, several)
    unknown = layermajor.supports(net)
    return Wrapper("fsdp2", "in order" if unknown else "layer-major", True, True, notice=unknown)


def precisions(net: nn.Module) -> set[torch.dtype]:
    """In which FSDP1 stores, computes and reduces."""
    assert isinstance(net, FullyShardedDataParallel)
    kinds = {net.mixed_precision.param_dtype, net.mixed_precision.reduce_dtype}
    return {kind for kind in kinds if kind is not None} | {p.dtype for p in net.parameters()}


def _offloaded(net: FullyShardedDataParallel) -> str:
    offloads = net.cpu_offload is not None and net.cpu_offload.offload_params
    return "FSDP with parameters offloaded to the CPU is not supported yet" if offloads else ""


def bare(net: nn.Module) -> nn.Module:
    """The network inside DDP, so that a rollout around the wrapper and an update through it are the same one.

    And inside a module that hands its calls on to it (:func:`hands_on`).
    """
    return shells.called(_inside_ddp(net))


def hands_on(model: nn.Module, net: nn.Module) -> None:
    """`model`, perhaps inside DDP, does nothing but call `net`, some of whose weights it holds."""
    shells.hands_on(_inside_ddp(model), net)


def _inside_ddp(net: nn.Module) -> nn.Module:
    return net.module if isinstance(net, DistributedDataParallel) else net


def innermost(net: nn.Module) -> nn.Module:
    """The network inside DDP, FSDP1, `torch.compile` and peft: its `forward` has the signature that callers know."""
    while True:
        inner = getattr(net, "_orig_mod", None)
        if isinstance(net, (DistributedDataParallel, FullyShardedDataParallel)):
            inner = net.module
        elif shells.called(net) is not net:
            inner = shells.called(net)
        elif callable(getattr(net, "get_base_model", None)):  # peft hands arguments on as they are
            inner = net.get_base_model()  # type: ignore[operator]
        if not isinstance(inner, nn.Module) or inner is net:
            return net
        net = inner


def casts_inputs(net: nn.Module) -> bool:
    """Whether the wrapper brings floating-point arguments to one dtype, so that equal values in another are equal."""
    if not isinstance(net, FullyShardedDataParallel):
        return False
    precision = net.mixed_precision
    return precision.param_dtype is not None and (precision.cast_root_forward_inputs or precision.cast_forward_inputs)


Call = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]


def around_ddp(net: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    """The same call of the network inside DDP, so that neither it nor its backward communicates.

    A call through the wrapper does, even inside `no_sync`: one of them shares buffers, another agrees on the buckets.
    Between a rollout and its update ranks make unequal numbers of calls, so none goes through the wrapper.
    """
    if not isinstance(net, DistributedDataParallel):
        return net, args, kwargs
    if net.device_ids and rebuildable((args, kwargs)):  # DDP moves the arguments there
        device = next(net.parameters()).device
        args, kwargs = map_tensors((args, kwargs), lambda tensor: tensor.to(device))
    return net.module, args, kwargs


def tidy(net: nn.Module) -> None:
    """Before a native forward while graphs are held."""
    if isinstance(net, FullyShardedDataParallel):
        fsdp1.tidy(net)


@contextmanager
def keeping(net: nn.Module, wrapper: Wrapper) -> Iterator[fsdp1.Held | Cuts | None]:
    """Around a forward whose graph is held. Yields what its backward will need.

    FSDP1 remembers one forward only, so that is what it left for this one; for `layer-major` the cuts in the graph.
    """
    if wrapper.known:
        with fsdp1.holding(net) as held:
            yield held
    elif wrapper.flush == "layer-major":
        with cutting(net) as cuts:
            yield cuts
    else:
        yield None


@contextmanager
def walking(net: nn.Module, *held: fsdp1.Held | Cuts | None) -> Iterator[None]:
    """Around the one backward of a kept graph, or of several."""
    left = [forward for forward in held if isinstance(forward, fsdp1.Held)]
    if not left:
        yield
    else:
        with fsdp1.walking(net, *left):
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
