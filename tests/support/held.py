"""Tiny trainings under FSDP1 with held graphs (`leangrpo_core.fsdp1`), and what they are compared with."""

import itertools
import warnings
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import BackwardPrefetch, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from leangrpo_core import fsdp1

from . import ranks

WIDTH = 9  # odd, so that shards are padded
F64 = torch.float64
Samples = list[tuple[Tensor, Tensor, Tensor, Tensor]]


class Lora(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.base, self.a, self.b = nn.Linear(width, width), nn.Linear(width, 2, False), nn.Linear(2, width, False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.b(self.a(x))


class Block(nn.Module):
    def __init__(self, lora: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = Lora(WIDTH) if lora else nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(WIDTH if lora else 2 * WIDTH, WIDTH)
        self.gate = nn.Parameter(torch.randn(WIDTH) * 0.5)

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        return x + self.gate * self.down(torch.tanh(self.up(self.norm(x) + c)))


class Net(nn.Module):
    """Root parameters before and after three blocks, two outputs, one of them from the middle."""

    def __init__(self, frozen: str = "") -> None:
        super().__init__()
        self.enter, self.time, self.leave = nn.Linear(4, WIDTH), nn.Parameter(torch.randn(WIDTH)), nn.Linear(WIDTH, 4)
        self.blocks = nn.ModuleList([Block(frozen == "lora") for _ in range(3)])
        if frozen == "lora":
            for name, p in self.named_parameters():
                p.requires_grad_(".a." in name or ".b." in name)
        elif frozen == "block":  # whole units frozen: allowed without use_orig_params too
            self.blocks[1].requires_grad_(False)
        elif frozen == "first":  # nothing before the second block needs a gradient
            for module in (self.enter, self.blocks[0]):
                module.requires_grad_(False)
            self.time.requires_grad_(False)
            self.leave.requires_grad_(False)

    def forward(self, x: Tensor, t: Tensor) -> dict[str, Tensor]:
        h = self.enter(x)
        c = t * self.time
        for block in self.blocks:
            h = block(h, c)
        return {"out": self.leave(h), "aux": h.mean(-1)}


@dataclass
class Case:
    """One training: how the network is wrapped, and what happens among its graphs.

    Attributes:
        checkpoint: where activations are checkpointed: `inside` or `outside` the unit, and `-reentrant`.
        frozen: what does not train: all but `lora`, the second `block`, or the `first` one and all before it.
        order: in which the graphs are walked.
        together: how many of them are walked in one backward.
        between: forwards without grad between the held ones and between the walks.
        native_window: which window is trained natively.
        zero: all ranks but the first have cotangents of zero.
        no_sync: the first window is walked within `no_sync`.
        mixed: what else happens while graphs are held: a whole native pass, or a forward that is left pending.
        extra: further arguments of FSDP.
    """

    strategy: str = "FULL_SHARD"
    orig: bool = True
    dtype: torch.dtype = torch.float32
    precision: str = ""
    checkpoint: str = ""
    frozen: str = ""
    prefetch: str = "PRE"
    forward_prefetch: bool = False
    limit: bool = True
    graphs: int = 4
    windows: int = 3
    order: list[int] | None = None
    together: int = 1
    between: bool = True
    native_window: int | None = 1
    zero: bool = False
    no_sync: bool = False
    mixed: str = ""
    extra: dict[str, Any] = field(default_factory=dict)


PRECISIONS = {
    "bf16": dict(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16),
    "bf16-fp32": dict(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    "bf16-keep": dict(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16, keep_low_precision_grads=True),
    "reduce-bf16": dict(reduce_dtype=torch.bfloat16),
}


def build(case: Case) -> Net:
    torch.manual_seed(0)
    return Net(case.frozen).to(case.dtype)


def wrap(case: Case, net: nn.Module) -> FSDP:
    where, _, kind = case.checkpoint.partition("-")
    impl = CheckpointImpl.REENTRANT if kind == "reentrant" else CheckpointImpl.NO_REENTRANT

    def wrapper(module: nn.Module) -> nn.Module:
        return checkpoint_wrapper(module, checkpoint_impl=impl)

    def check(module: nn.Module) -> bool:
        return isinstance(module, Block)

    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2)) if "HYBRID" in case.strategy else None
    prefetch = {"PRE": BackwardPrefetch.BACKWARD_PRE, "POST": BackwardPrefetch.BACKWARD_POST, "": None}
    wrapped = FSDP(
        net,
        device_mesh=mesh,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        sharding_strategy=ShardingStrategy[case.strategy],
        mixed_precision=MixedPrecision(**PRECISIONS[case.precision]) if case.precision else None,
        use_orig_params=case.orig,
        backward_prefetch=prefetch[case.prefetch],
        forward_prefetch=case.forward_prefetch,
        limit_all_gathers=case.limit,
        device_id=torch.device("cpu"),
        **case.extra,
    )
    if where == "inside":  # FSDP(checkpoint(block)), as DanceGRPO does
        apply_activation_checkpointing(wrapped, checkpoint_wrapper_fn=wrapper, check_fn=check)
    elif where == "outside":  # checkpoint(FSDP(block))
        blocks: Any = wrapped.module.blocks
        for i in range(len(blocks)):
            blocks[i] = wrapper(blocks[i])
    return wrapped


def samples(case: Case, rank: int, window: int) -> Samples:
    g = torch.Generator().manual_seed(1000 * window + rank)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64).to(case.dtype)

    made = [(draw(2, 5, 4), draw(2, 1, 1), draw(2, 5, 4), draw(2, 5)) for _ in range(case.graphs)]
    if case.zero and rank:
        made = [(x, t, a * 0, b * 0) for x, t, a, b in made]
    return made


class Descent(torch.optim.Optimizer):
    """Takes gradients in another dtype than the weights'; torch's own do not."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(group["lr"] * p.grad.to(p.dtype))


def shards(net: FSDP, what: str) -> dict[str, Tensor | None]:
    """This rank's part of what trains. By name: after a backward FSDP itself may not list frozen parameters."""
    found: dict[str, Tensor | None] = {}
    for name, p in net.named_parameters():
        value = p if what == "weight" else p.grad
        if p.requires_grad:
            found[name] = None if value is None else value.detach().clone()
    return found


def full(net: FSDP, what: str) -> dict[str, Tensor]:
    """Whole weights or gradients, through the public API: gradients stand in the parameters' place for a moment."""
    kept = [p.detach().clone() for p in net.parameters()]
    with torch.no_grad():
        if what == "grad":
            for p in net.parameters():
                p.copy_(torch.zeros_like(p) if p.grad is None else p.grad)
        with FSDP.summon_full_params(net, writeback=False):
            found = {
                n.replace("_fsdp_wrapped_module.", "").replace("_checkpoint_wrapped_module.", ""): p.detach().clone()
                for n, p in net.named_parameters()
            }
        for p, old in zip(net.parameters(), kept, strict=True):
            p.copy_(old)
    return found


def backward(result: dict[str, Tensor], a: Tensor, b: Tensor) -> None:
    backward_all([result], [(a, b)])


def backward_all(results: list[dict[str, Tensor]], cotangents: list[tuple[Tensor, Tensor]]) -> None:
    """One backward through all of them."""
    outs = [result[name] for result in results for name in ("out", "aux")]
    grads = [grad for pair in cotangents for grad in pair]
    torch.autograd.backward(outs, [grad.to(out.dtype) for out, grad in zip(outs, grads, strict=True)])


def train(rank: int, world: int, case: Case, schedule: str) -> dict[str, Any]:
    """Trains some windows with AdamW, `case.native_window` natively.

    Args:
        schedule: `native`; `armed`, held and walked; `naive`, held without `fsdp1`.

    Returns:
        Per window this rank's shares of gradients and weights, and whole gradients; all outputs.
    """
    net = wrap(case, build(case))
    optimizer = (Descent if case.precision == "bf16-keep" else torch.optim.AdamW)(net.parameters(), lr=1e-2)
    found: dict[str, Any] = {"grads": [], "weights": [], "grads_full": [], "values": []}
    if schedule == "armed":
        assert fsdp1.supports(net) == "", fsdp1.supports(net)
    for window in range(case.windows):
        local = case.no_sync and window == 0
        with net.no_sync() if local else nullcontext():
            if schedule == "native" or window == case.native_window:
                _train_natively(net, case, samples(case, rank, window), found["values"])
            else:
                more = samples(case, rank, 100 + window)
                _train_held(net, case, samples(case, rank, window), more, schedule == "armed", found["values"])
        if local:
            x, t, a, b = samples(case, rank, 200)[0]
            backward(net(x, t), a, b)
        found["grads"].append(shards(net, "grad"))
        if not case.precision:
            found["grads_full"].append(full(net, "grad"))
        optimizer.step()
        optimizer.zero_grad()
        found["weights"].append(shards(net, "weight"))
    return found


def _train_natively(net: FSDP, case: Case, made: Samples, values: list[Tensor]) -> None:
    for k in case.order or range(case.graphs):
        x, t, a, b = made[k]
        result = net(x, t)
        values.append(result["out"].detach().clone())
        backward(result, a, b)


def _train_held(net: FSDP, case: Case, made: Samples, more: Samples, armed: bool, values: list[Tensor]) -> None:
    """Holds all graphs, then walks them; with `case.mixed` there are native passes of `more` samples among them."""
    held: dict[int, Any] = {}
    for k, (x, t, _, _) in enumerate(made):
        with fsdp1.holding(net) if armed else nullcontext() as left:
            held[k] = (net(x, t), left)
        if case.between:
            with torch.no_grad():
                net(x + 1, t)
    pending = None
    if case.mixed == "native while held":
        for x, t, a, b in more:
            if armed:
                fsdp1.tidy(net)
            backward(net(x, t), a, b)
    elif case.mixed == "pending":
        pending = net(*more[0][:2])
    order = list(case.order or range(case.graphs))
    for place in range(0, len(order), case.together):
        now = order[place : place + case.together]
        results, lefts = zip(*(held.pop(k) for k in now), strict=True)
        values += [result["out"].detach().clone() for result in results]
        with fsdp1.walking(net, *lefts) if armed else nullcontext():
            backward_all(list(results), [made[k][2:] for k in now])
        del results, lefts
        if case.between and place == 0:
            with torch.no_grad():
                net(*made[now[0]][:2])
    if pending is not None:
        backward(pending, *more[0][2:])


def reference(case: Case, world: int) -> list[dict[str, Tensor]]:
    """Gradients of each window in one float64 process without FSDP that has the samples of all ranks."""
    net, grads = build(case).double(), []
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    for window in range(case.windows):
        for rank in range(world):
            made, more = samples(case, rank, window), samples(case, rank, 100 + window)
            if window != case.native_window:
                made += {"native while held": more, "pending": more[:1]}.get(case.mixed, [])
            if case.no_sync and window == 0:
                made += samples(case, rank, 200)[:1]
            for x, t, a, b in made:
                backward(net(x.double(), t.double()), a.double() / world, b.double() / world)
        grads.append({n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in net.named_parameters()})
        optimizer.step()
        optimizer.zero_grad()
    return grads


def distance(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    theirs = {n: t for n, t in theirs.items() if t.any()}  # FSDP may show stale copies of frozen ones, or none
    off = sum(float((ours[n].double() - theirs[n].double()).square().sum()) for n in theirs)
    size = sum(float(theirs[n].double().square().sum()) for n in theirs)
    return (off / size) ** 0.5


def shard_distance(ours: dict[str, Tensor | None], theirs: dict[str, Tensor | None]) -> float:
    """Relative L2 over one rank's shards; 0 only if they agree to the bit."""
    assert ours.keys() == theirs.keys() and ours
    off = size = 0.0
    for name, b in theirs.items():
        a = ours[name]
        assert (a is None) == (b is None), name
        if a is not None and b is not None:
            assert a.dtype == b.dtype and a.shape == b.shape and a.isfinite().all(), name
            off += float((a.double() - b.double()).square().sum())
            size += float(b.double().square().sum())
            assert torch.equal(a, b) or off > 0, name
    return (off / size) ** 0.5 if size else off


def quiet(rank: int, world: int, case: Case, schedules: tuple[str, ...]) -> list[dict[str, Any]]:
    warnings.simplefilter("ignore")
    found = []
    for schedule in schedules:
        with ranks.natively() if schedule == "native" else nullcontext():
            found.append(train(rank, world, case, schedule))
    return found


def both(case: Case, world: int = 2) -> list[list[dict[str, Any]]]:
    """Per rank: the native training and the one with held graphs."""
    return ranks.run(quiet, world, case, ("native", "armed"))


def assert_bitwise(case: Case, world: int = 2) -> None:
    """Every rank's shards of gradients and weights, after each window, are native's to the bit; and so are outputs."""
    for native, armed in both(case, world):
        for what, window in itertools.product(("grads", "weights"), range(case.windows)):
            assert shard_distance(armed[what][window], native[what][window]) == 0
        assert all(map(torch.equal, armed["values"], native["values"]))


def assert_exact(case: Case, world: int = 2, limit: float = 1e-12) -> None:
    """Whole gradients of each window are those of one float64 process without FSDP, on every rank alike."""
    expected = reference(case, world)
    found = ranks.run(quiet, world, case, ("armed",))
    for (result,) in found:
        for ours, theirs in zip(result["grads_full"], expected, strict=True):
            assert distance(ours, theirs) <= limit
    for (result,) in found[1:]:
        for ours, first in zip(result["grads_full"], found[0][0]["grads_full"], strict=True):
            assert all(torch.equal(ours[name], first[name]) for name in first)
