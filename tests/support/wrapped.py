"""Trainings of the GRPO trainer in `grpo.py` under a wrapper, natively and with the runtime, on forked ranks.

Both trainings of a pair run in the same processes, the native one first: a fork costs more than a training.
"""

import contextlib
import io
import json
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffload, FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from leangrpo_core import Lean
from leangrpo_core.guard import local

from . import ranks
from .fsdp2 import fully_shard
from .grpo import Block, Config, Policy, Result, train

UNITS = 4  # three blocks and the root
STRATEGIES = {
    "grad-op": ShardingStrategy.SHARD_GRAD_OP,
    "none": ShardingStrategy.NO_SHARD,
    "hybrid": ShardingStrategy.HYBRID_SHARD,
}
PRECISIONS = {
    "bf16": MixedPrecision(param_dtype=torch.bfloat16),
    "cast": MixedPrecision(param_dtype=torch.float32),
    "stored-bf16": MixedPrecision(reduce_dtype=torch.float32),
}
COUNTED = {  # names differ between torch versions
    "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_single": "reduce_scatter",
    "all_gather": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "all_gather_single": "all_gather",
    "all_to_all_single": "all_to_all",
}


class Engine(nn.Module):
    """What DeepSpeed's engine looks like from outside."""

    __module__ = "deepspeed.runtime.engine"

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


def wrap(kind: str, net: Policy) -> nn.Module:
    """`net` under a wrapper: `none`, `part`, `engine`, `ddp[-...]`, `fsdp[-...]` (FSDP1) or `fsdp2[-hybrid]`.

    After `fsdp` any of a key of STRATEGIES, a key of PRECISIONS, `orig` and `offload` may follow.
    """
    if kind.startswith("fsdp2"):
        grid = (2, dist.get_world_size() // 2)
        mesh = init_device_mesh("cpu", grid, mesh_dim_names=("replicate", "shard")) if "hybrid" in kind else None
        for module in (*net.blocks, net):
            fully_shard(module, mesh=mesh)
        return net
    if kind.startswith("fsdp"):
        return _fsdp1(kind.removeprefix("fsdp"), net)
    if kind.startswith("ddp"):
        group = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()] if kind == "ddp-alone" else None
        wrapped = DistributedDataParallel(net, static_graph=kind == "ddp-static", process_group=group)
        if kind == "ddp-hook":
            wrapped.register_comm_hook(None, allreduce_hook)
        return wrapped
    if kind == "part":
        net.blocks[0] = DistributedDataParallel(net.blocks[0])
    return Engine(net) if kind == "engine" else net


def _fsdp1(options: str, net: Policy) -> FullyShardedDataParallel:
    def chosen(known: dict[str, Any], default: Any = None) -> Any:
        return next((known[name] for name in known if options.replace("-orig", "") == f"-{name}"), default)

    return FullyShardedDataParallel(
        net.to(torch.bfloat16) if "stored-bf16" in options else net,
        device_mesh=init_device_mesh("cpu", (2, dist.get_world_size() // 2)) if "hybrid" in options else None,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        sharding_strategy=chosen(STRATEGIES, ShardingStrategy.FULL_SHARD),
        mixed_precision=chosen(PRECISIONS),
        use_orig_params="-orig" in options,
        cpu_offload=CPUOffload(offload_params=True) if "offload" in options else None,
        device_id=torch.device("cpu"),
    )


def adapters_only(net: Policy) -> Policy:
    """As LoRA leaves a network: some weights inside the blocks train, nothing else does."""
    for name, parameter in net.named_parameters():
        parameter.requires_grad_("up.weight" in name)
    return net


def _checkpoint_reentrant(block: nn.Module) -> None:
    inside = block.forward

    def forward(x: Tensor) -> Tensor:
        return checkpoint(inside, x, use_reentrant=True) if torch.is_grad_enabled() else inside(x)  # type: ignore[return-value]

    block.forward = forward


@dataclass
class Side:
    """One training on one rank.

    Attributes:
        windows: what the runtime reported of each window, empty natively.
        collectives: how often ranks reduced and gathered.
        said: what the run printed.
    """

    result: Result
    windows: list[dict[str, Any]]
    collectives: dict[str, int]
    said: str

    @property
    def window(self) -> dict[str, Any]:
        """The first one."""
        return self.windows[0]


@contextlib.contextmanager
def counting() -> Iterator[Counter[str]]:
    """Collectives that are called within."""
    counted: Counter[str] = Counter()
    with contextlib.ExitStack() as undo:
        for name, kind in COUNTED.items():
            original = getattr(dist, name, None)
            if original is None:
                continue

            def count(*args: Any, kind: str = kind, original: Callable[..., Any] = original, **kwargs: Any) -> Any:
                counted[kind] += 1
                return original(*args, **kwargs)

            setattr(dist, name, count)
            undo.callback(setattr, dist, name, original)
        yield counted


def job(rank: int, world: int, kind: str, lean: bool, options: dict[str, Any]) -> Side:
    """One rank of a training run.

    `options`: `config` and `hooks(rank)` for the trainer, `env` for the runtime (a list holds a value per rank),
    `checkpointing`, `reentrant` to checkpoint each block's inside that way, `adapters` to train only some weights,
    `optimizer`, `policy` in place of the network's class, and `wrapped(net)` to change the network once it is wrapped.
    """
    for name, value in options.get("env", {}).items():
        os.environ[name] = value[rank] if isinstance(value, list) else value
    with tempfile.TemporaryDirectory() as folder:
        os.environ["LEANGRPO_REPORT_DIR"] = folder
        torch.manual_seed(0)
        policy = options.get("policy", Policy)(checkpointing=options.get("checkpointing", False))
        if options.get("reentrant"):
            for block in policy.blocks:
                _checkpoint_reentrant(block)
        net = wrap(kind, adapters_only(policy) if options.get("adapters") else policy)
        options.get("wrapped", lambda net: None)(net)
        config = Config(rank=rank, **options.get("config", {}))
        hooks = options["hooks"](rank) if "hooks" in options else None
        optimizer = options.get("optimizer", torch.optim.AdamW)(net.parameters(), lr=1e-3)
        with contextlib.redirect_stdout(io.StringIO()) as said, counting() as counted:
            result = train(Lean() if lean else None, net, optimizer, config, hooks)
        lines = Path(folder, f"rank{rank}.jsonl")
        windows = [json.loads(line) for line in lines.read_text().splitlines()] if lines.exists() else []
    return Side(result, windows, dict(counted), said.getvalue())


def pair(rank: int, world: int, kind: str, options: dict[str, Any]) -> tuple[Side, Side]:
    """The training with the runtime, and the native one, which runs first."""
    with ranks.natively():
        native = job(rank, world, kind, False, options)
    return job(rank, world, kind, True, options), native


def both(kind: str, world: int = 2, **options: Any) -> list[tuple[Side, Side]]:
    """Per rank the training with the runtime and the native one."""
    return ranks.run(pair, world, kind, options)


def replicas_equal(results: list[Result]) -> bool:
    """Whether all ranks hold the same weights after each update, to the bit."""
    first, *others = results
    return all(
        torch.equal(weight, other.weights[update][name])
        for other in others
        for update, weights in enumerate(first.weights)
        for name, weight in weights.items()
    )


def whole(net: nn.Module) -> dict[str, Tensor]:
    """The whole gradients of all trainable weights, whatever shards them, by the names of the bare network."""
    if isinstance(net, FullyShardedDataParallel):
        return _whole_fsdp1(net)
    named = {name.removeprefix("module."): p for name, p in net.named_parameters() if p.requires_grad}
    grads = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in named.items()}
    return {name: getattr(grad, "full_tensor", grad.clone)().detach() for name, grad in grads.items()}


@torch.no_grad()
def _whole_fsdp1(net: FullyShardedDataParallel) -> dict[str, Tensor]:
    """Through the public API: gradients stand in the parameters' place for a moment."""
    kept = [p.detach().clone() for p in net.parameters()]
    trains = {name.replace("_fsdp_wrapped_module.", "") for name, p in net.named_parameters() if p.requires_grad}
    for p in net.parameters():
        p.copy_(torch.zeros_like(p) if p.grad is None else p.grad)
    with FullyShardedDataParallel.summon_full_params(net, writeback=False):
        found = {name.replace("_fsdp_wrapped_module.", ""): p.detach().clone() for name, p in net.named_parameters()}
    for p, old in zip(net.parameters(), kept, strict=True):
        p.copy_(old)
    flat = any("_flat_param" in name for name in trains)
    return {name: grad for name, grad in found.items() if flat or name in trains}


def shares(net: nn.Module) -> list[Tensor]:
    """This rank's part of the weights."""
    return [local(p.detach()) for p in net.parameters()]
