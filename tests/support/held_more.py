"""Odd networks, meters of collectives and memory, and counts of objects for the tests of `leangrpo_core.fsdp1`."""

import gc
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

from leangrpo_core import fsdp1

from .held import F64, Block, Case, backward, build, distance, full, samples, wrap


class Meter:
    """Counts collectives, and at each of them the bytes of un-sharded units and un-sharded gradients."""

    def __init__(self, net: FSDP) -> None:
        self.counts: dict[str, int] = {}
        self.full = self.grads = self.both = 0
        self.units = 0
        self.handles = [m._handle for m in FSDP.fsdp_modules(net) if m._handle]
        self.undo: list[tuple[str, Any]] = []

    def look(self) -> None:
        full = grads = units = 0
        for handle in self.handles:
            flat = handle.flat_param
            if handle.uses_sharded_strategy and hasattr(flat, "_full_param_padded"):
                size = flat._full_param_padded.untyped_storage().size()
                full += size
                units += size > 0
            if flat.grad is not None and flat.grad.numel() != flat._sharded_size.numel():
                grads += flat.grad.nbytes
        self.full, self.grads, self.both = max(self.full, full), max(self.grads, grads), max(self.both, full + grads)
        self.units = max(self.units, units)

    def __enter__(self) -> "Meter":
        kinds = {
            "gather": ("all_gather", "all_gather_into_tensor", "all_gather_single"),
            "scatter": ("reduce_scatter_tensor", "reduce_scatter_single"),
            "reduce": ("all_reduce",),
        }
        for kind, names in kinds.items():
            for name in names:
                original = getattr(dist, name, None)
                if original is None:
                    continue
                self.undo.append((name, original))

                def call(*args: Any, kind: str = kind, original: Callable[..., Any] = original, **kwargs: Any) -> Any:
                    self.look()
                    self.counts[kind] = self.counts.get(kind, 0) + 1
                    return original(*args, **kwargs)

                setattr(dist, name, call)
        return self

    def __exit__(self, *_: Any) -> None:
        for name, original in self.undo:
            setattr(dist, name, original)

    def figures(self) -> dict[str, int]:
        return {**self.counts, "units": self.units, "full": self.full, "grads": self.grads, "both": self.both}


class Odd(nn.Module):
    """No parameters in the root; a block that is used twice, or not at all, or that ties two weights."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.blocks = nn.ModuleList([Block(False) for _ in range(3)])
        if kind == "tied":
            block: Any
            for block in self.blocks:
                block.down.weight = nn.Parameter(block.down.weight.detach().T.clone())
                block.down.forward = lambda x, d=block.down: nn.functional.linear(x, d.weight.T, d.bias)  # type: ignore
                block.up.weight = block.down.weight

    def forward(self, x: Tensor, c: Tensor) -> dict[str, Tensor]:
        for i, block in enumerate(self.blocks):
            if self.kind != "unused" or i != 1:
                x = block(x, c)
            if self.kind == "twice" and i == 0:
                x = block(x, c)
        return {"out": x, "aux": x.mean(-1)}


def odd_samples(rank: int) -> list[tuple[Tensor, ...]]:
    g = torch.Generator().manual_seed(rank)
    shapes = ((2, 5, 9), (2, 1, 9), (2, 5, 9), (2, 5))
    return [tuple(torch.randn(*s, generator=g, dtype=F64) for s in shapes) for _ in range(4)]


def odd(rank: int, world: int, case: Case, kind: str, between: str) -> float:
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    plain, made = Odd(kind).to(F64), odd_samples(rank)
    torch.manual_seed(0)
    net = wrap(case, Odd(kind).to(F64))

    def meanwhile() -> None:
        if between == "evaluation":
            net.eval()
            with torch.no_grad():
                net(*made[0][:2])
            net.train()
        elif between == "checkpoint":
            net.state_dict()
        elif between == "summon":
            with FSDP.summon_full_params(net, writeback=False):
                pass

    held: list[Any] = []
    for x, c, _, _ in made[:3]:
        with fsdp1.holding(net) as h:
            held.append((net(x, c), h))
        meanwhile()
    with fsdp1.walking(net, held[1][1]):
        backward(held[1][0], *made[1][2:])
    meanwhile()
    with fsdp1.holding(net) as h:  # one more, after a walk
        held.append((net(*made[3][:2]), h))
    for k in (2, 3, 0):
        # Not after the last: SHARD_GRAD_OP keeps what a forward without grad gathered, and `full` would see that.
        meanwhile()
        with fsdp1.walking(net, held[k][1]):
            backward(held[k][0], *made[k][2:])
    for r in range(world):
        for x, c, a, b in odd_samples(r):
            backward(plain(x, c), a / world, b / world)
    expected = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in plain.named_parameters()}
    return distance(full(net, "grad"), expected)


def figures(rank: int, world: int, case: Case, schedule: str) -> list[dict[str, int]]:
    """Collectives of the rollout and of the update, in the second window of a process."""
    warnings.simplefilter("ignore")
    net, made = wrap(case, build(case)), samples(case, rank, 0)
    for _ in range(2):
        held: list[Any] = []
        with Meter(net) as rollout:
            for x, t, _, _ in made:
                if schedule == "native":
                    with torch.no_grad():
                        net(x, t)
                else:
                    with fsdp1.holding(net) as h:
                        held.append((net(x, t), h))
        with Meter(net) as update:
            for x, t, a, b in made:
                if schedule == "native":
                    backward(net(x, t), a, b)
                else:
                    result, h = held.pop(0)
                    with fsdp1.walking(net, h):
                        backward(result, a, b)
        for p in net.parameters():
            p.grad = None
    return [rollout.figures(), update.figures()]


def held_while_pending(rank: int, world: int, case: Case) -> float:
    """A native forward, then one held; the native backward comes first."""
    warnings.simplefilter("ignore")
    net, plain = wrap(case, build(case)), build(case)
    first, second = samples(case, rank, 0)[:2]
    native = net(*first[:2])
    with fsdp1.holding(net) as held:
        result = net(*second[:2])
    backward(native, *first[2:])
    with fsdp1.walking(net, held):
        backward(result, *second[2:])
    for r in range(world):
        for x, t, a, b in samples(case, r, 0)[:2]:
            backward(plain(x, t), a / world, b / world)
    return distance(full(net, "grad"), {n: p.grad for n, p in plain.named_parameters() if p.grad is not None})


def objects(rank: int, world: int, case: Case) -> list[tuple[int, ...]]:
    """After each window: tensors, nodes, hooks and order entries that are alive; the fourth window is dropped."""
    warnings.simplefilter("ignore")
    net = wrap(case, build(case))
    optimizer = torch.optim.AdamW(net.parameters())
    counts: list[tuple[int, ...]] = []

    def count() -> tuple[int, ...]:
        gc.collect()
        kinds = [type(o) for o in gc.get_objects()]
        names = [kind.__name__ for kind in kinds]
        order = FSDP.fsdp_modules(net)[0]._exec_order_data.handles_post_forward_order
        wanted = ("AccumulateGrad", "RemovableHandle", "partial", "_Unit")
        return sum(issubclass(k, Tensor) for k in kinds), *map(names.count, wanted), len(order)

    for window in range(6):
        made, held = samples(case, rank, 0), []
        for x, t, _, _ in made:
            with fsdp1.holding(net) as h:
                held.append((net(x, t), h))
            with torch.no_grad():
                net(x, t)
        for x, t, a, b in made:
            if window == 3:
                backward(net(x, t), a, b)
            else:
                result, h = held.pop(0)
                with fsdp1.walking(net, h):
                    backward(result, a, b)
        optimizer.step()
        optimizer.zero_grad()
        made = held = result = h = x = t = a = b = None  # type: ignore[assignment]
        counts.append(settled(count, counts[1:2]))
    return counts


def settled(count: Callable[[], tuple[int, ...]], expected: list[tuple[int, ...]]) -> tuple[int, ...]:
    """The least of several looks: gloo's threads let go what they sent only some time after it has arrived.

    What a window leaves behind for good is there at every look. Ends early once `expected` is seen.
    """
    least = count()
    for _ in range(100 if expected else 5):
        if [least] == expected:
            break
        time.sleep(0.02)
        least = min(least, count())
    return least
