"""Networks that do to their units what real ones do, sharded by FSDP2, and counts of what FSDP2 does with them."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from .fsdp2 import FSDPModule, fully_shard, param_group

D = 8
Row = tuple[Tensor, Tensor, Tensor]  # latents, time, and the cotangent of the result


class Lin(nn.Module):
    def __init__(self, inner: int = D) -> None:
        super().__init__()
        self.w = nn.Linear(inner, D)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.w(x))


class Net(nn.Module):
    """Latents [B, tokens, 4] and a time [B] that conditions the units through weights of the network itself."""

    def __init__(self, checkpointing: bool = False) -> None:
        super().__init__()
        self.checkpointing = checkpointing
        self.build()
        self.enter, self.leave, self.time = nn.Linear(4, D), nn.Linear(D, 4), nn.Linear(1, D)

    def build(self) -> None:
        self.blocks = nn.ModuleList(Lin() for _ in range(3))

    def units(self) -> list[nn.Module]:
        return list(self.blocks)

    def call(self, unit: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if self.checkpointing and torch.is_grad_enabled():
            return checkpoint(unit, *args, use_reentrant=False, **kwargs)
        return unit(*args, **kwargs)

    def body(self, h: Tensor, c: Tensor) -> Tensor:
        for block in self.blocks:
            h = self.call(block, h)
        return h

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        c = torch.tanh(self.time(t[:, None]))[:, None]
        return self.leave(self.body(self.enter(x), c))


class Modulated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ada, self.up, self.down = nn.Linear(D, 2 * D), nn.Linear(D, 4 * D), nn.Linear(4 * D, D)

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        scale, gate = self.ada(torch.nn.functional.silu(c)).chunk(2, -1)
        return x + gate * self.down(torch.nn.functional.gelu(self.up(x * (1 + scale))))


class Transformer(Net):
    """Blocks that share one condition, as diffusion transformers do."""

    def build(self) -> None:
        self.blocks = nn.ModuleList(Modulated() for _ in range(4))

    def body(self, h: Tensor, c: Tensor) -> Tensor:
        for block in self.blocks:
            h = self.call(block, h, c)
        return h * (1 + c)


class UNet(Net):
    """Skips by concatenation; projections of the condition belong to the network itself."""

    def build(self) -> None:
        self.down, self.mid = nn.ModuleList(Lin() for _ in range(3)), Lin()
        self.up = nn.ModuleList(Lin(2 * D) for _ in range(3))
        self.projections = nn.ModuleList(nn.Linear(D, D) for _ in range(3))

    def units(self) -> list[nn.Module]:
        return [*self.up, self.mid, *self.down]

    def body(self, h: Tensor, c: Tensor) -> Tensor:
        skips = []
        for unit, projection in zip(self.down, self.projections, strict=True):
            h = self.call(unit, h + projection(c))
            skips.append(h)
        h = self.call(self.mid, h)
        for unit in self.up:
            h = self.call(unit, torch.cat([h, skips.pop()], -1)) + h
        return h


@dataclass
class Result:
    x: Tensor
    extra: dict[str, Any]


class Boxes(nn.Module):
    """Takes a dict of lists and a keyword, returns a dataclass with a dict with a tuple. One weight is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.unused = Lin(), Lin(), nn.Linear(3, 3)

    def forward(self, state: dict[str, list[Tensor]], *, c: Tensor, flag: bool = True) -> Result:
        x, y = state["pair"]
        return Result(x + self.a(y * c), {"t": (self.b(x), c), "n": 3})


class Containers(Net):
    def build(self) -> None:
        self.first, self.second = Boxes(), Boxes()

    def units(self) -> list[nn.Module]:
        return [self.first, self.second]

    def body(self, h: Tensor, c: Tensor) -> Tensor:
        r = self.call(self.first, {"pair": [h, h]}, c=c)
        return self.call(self.second, {"pair": [r.x, r.extra["t"][0]]}, c=r.extra["t"][1], flag=False).x


class Twice(Net):
    """Units out of order, some of them twice, operations in place on their results."""

    def build(self) -> None:
        self.a, self.b, self.c = Lin(), Lin(), nn.Linear(D, D)

    def units(self) -> list[nn.Module]:
        return [self.c, self.a, self.b]

    def body(self, h: Tensor, c: Tensor) -> Tensor:
        h = self.call(self.b, h)
        h = self.call(self.a, h) + h
        h = self.call(self.c, self.call(self.b, h))
        h += c
        h *= 2
        return self.call(self.c, self.call(self.a, h)).mul_(h)


class Outer(nn.Module):
    """A unit with units inside."""

    def __init__(self) -> None:
        super().__init__()
        self.p, self.q, self.r, self.x = Lin(), nn.Linear(D, D), Lin(), nn.Linear(D, D)

    def forward(self, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        y = self.p(self.q(h) + c)
        y = y + self.x(h) * c
        return self.r(y), self.x(y) + h


class Nested(Net):
    def build(self) -> None:
        self.first, self.last, self.between = Outer(), Outer(), Lin()

    def units(self) -> list[nn.Module]:
        return [*(unit for outer in (self.first, self.last) for unit in (outer.p, outer.r, outer)), self.between]

    def body(self, h: Tensor, c: Tensor) -> Tensor:
        a, b = self.call(self.first, h, c)
        a, b = self.call(self.last, self.call(self.between, a) + b, c)
        return a * b


class Adapted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w, self.lora = nn.Linear(D, D), nn.Sequential(nn.Linear(D, 2, bias=False), nn.Linear(2, D, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.w(x)) + self.lora(x)


class Lora(Net):
    """Only low-rank parts of the later units are trained."""

    def build(self) -> None:
        self.blocks = nn.ModuleList([Lin(), Adapted(), Adapted()])

    def __init__(self, checkpointing: bool = False) -> None:
        super().__init__(checkpointing)
        for name, parameter in self.named_parameters():
            parameter.requires_grad_("lora" in name)


class Region(Net):
    """One checkpoint around two units and code of the network itself."""

    def build(self) -> None:
        self.a, self.b, self.mix = Lin(), Lin(), nn.Linear(D, D)

    def units(self) -> list[nn.Module]:
        return [self.a, self.b]

    def body(self, h: Tensor, c: Tensor) -> Tensor:
        def region(h: Tensor, c: Tensor) -> Tensor:
            return self.b(torch.tanh(self.mix(self.a(h) + c)) * 2)

        return (checkpoint(region, h, c, use_reentrant=False) if torch.is_grad_enabled() else region(h, c)) * 2  # type: ignore[operator]


class Skipping(Net):
    """Every third forward leaves units out; a weight of the network itself goes into the units as it is."""

    def build(self) -> None:
        self.blocks, self.p, self.forwards = nn.ModuleList(Outer() for _ in range(4)), nn.Parameter(torch.ones(D)), 0

    def body(self, h: Tensor, c: Tensor) -> Tensor:
        self.forwards += torch.is_grad_enabled()
        g = h
        for place, block in enumerate(self.blocks):
            if self.forwards % 3 or place in (0, 3):
                h, g = self.call(block, h, self.p)
        return h + g * c


class Alone(Net):
    """Only the network as a whole is a unit."""

    def units(self) -> list[nn.Module]:
        return []


NETS: dict[str, Callable[[bool], Net]] = {
    "transformer": Transformer, "unet": UNet, "containers": Containers, "twice": Twice, "nested": Nested, "lora": Lora,
    "region": Region, "skipping": Skipping, "alone": Alone,
}  # fmt: skip


def make(name: str, checkpointing: bool = False, dtype: torch.dtype = torch.float64) -> Net:
    torch.manual_seed(0)
    return NETS[name](checkpointing).to(dtype)


def shard(net: Net, mesh: tuple[int, ...] | None = None, **options: Any) -> Net:
    names = ("replicate", "shard") if mesh else None
    over: DeviceMesh = init_device_mesh("cpu", mesh or (dist.get_world_size(),), mesh_dim_names=names)
    for unit in (*net.units(), net):
        fully_shard(unit, mesh=over, **options)
    return net


def rows(rank: int, count: int, dtype: torch.dtype = torch.float64) -> list[Row]:
    noise = torch.Generator().manual_seed(100 + rank)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=noise, dtype=torch.float64).to(dtype)

    return [(draw(2, 5, 4), draw(2), draw(2, 5, 4)) for _ in range(count)]


def gradients(net: nn.Module) -> dict[str, Tensor | None]:
    """Whole gradients, in float64."""
    found: dict[str, Tensor | None] = {}
    for name, parameter in net.named_parameters():
        grad = parameter.grad
        whole = grad.full_tensor() if isinstance(grad, DTensor) else grad
        found[name] = None if whole is None else whole.double().clone()
    return found


def distance(ours: dict[str, Tensor | None], theirs: dict[str, Tensor | None]) -> float:
    """Relative L2; a gradient that is None on one side only is infinitely far."""
    off = size = 0.0
    for name, b in theirs.items():
        a = ours[name]
        if (a is None) != (b is None):
            return float("inf")
        if a is not None and b is not None:
            off += float((a - b).square().sum())
            size += float(b.square().sum())
    return (off / size) ** 0.5


@dataclass
class Watch:
    """What FSDP2 did: collectives, the most units gathered at a time, and peak bytes.

    Attributes:
        peak: of gathered weights and unreduced gradients, looked at wherever FSDP2 changes them.
    """

    gathers: int = 0
    reductions: int = 0
    gathered: int = 0
    peak: int = 0
    groups: list[Any] = field(default_factory=list)

    def look(self) -> None:
        total = units = 0
        for group in self.groups:
            mine = 0
            for p in group.fsdp_params:
                mine += sum(out.untyped_storage().size() for out in getattr(p, "all_gather_outputs", []))
                weight = getattr(p, "_unsharded_param", None)
                for grad in (None if weight is None else weight.grad, p.unsharded_accumulated_grad):
                    total += 0 if grad is None else grad.untyped_storage().nbytes()
            if group._all_gather_result is not None and not mine:
                mine = sum(p._orig_size.numel() * (p.param_dtype or p.orig_dtype).itemsize for p in group.fsdp_params)
            total, units = total + mine, units + (mine > 0)
        self.peak, self.gathered = max(self.peak, total), max(self.gathered, units)


def groups_of(net: nn.Module) -> list[Any]:
    states: Sequence[Any] = [m._get_fsdp_state() for m in net.modules() if isinstance(m, FSDPModule)]  # type: ignore[attr-defined]
    return [group for state in states for group in getattr(state, "_fsdp_param_groups", [state._fsdp_param_group])]


@contextmanager
def watching(net: nn.Module) -> Iterator[Watch]:
    watch, before = Watch(groups=groups_of(net)), []
    places = [
        (param_group, "foreach_all_gather", "gathers"),
        (param_group, "foreach_reduce", "reductions"),
        (param_group.FSDPParamGroup, "wait_for_unshard", ""),
        (param_group.FSDPParamGroup, "post_backward", ""),
    ]
    for owner, name, counter in places:
        original = getattr(owner, name)
        before.append((owner, name, original))

        def counted(*args: Any, original: Any = original, counter: str = counter, **kwargs: Any) -> Any:
            watch.look()
            if counter:
                setattr(watch, counter, getattr(watch, counter) + 1)
            result = original(*args, **kwargs)
            watch.look()
            return result

        setattr(owner, name, counted)
    try:
        yield watch
    finally:
        for owner, name, original in before:
            setattr(owner, name, original)
        watch.groups = []
