"""Peak bytes per rank of weights and gradients, and bytes of kept graphs, by wrapper and flush, beside formulas.

    bash tools/test -m matrix tests/matrix/test_peaks.py -n 0 -s

prints the table. 2 ranks, gloo, on the CPU; every storage that an operation creates is followed until it dies.
"""

import contextlib
import io
import os
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from support import ranks
from support.grpo import Block, Config, Hooks, Policy, train
from support.wrapped import wrap
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from leangrpo_core import Lean, offload

pytestmark = [pytest.mark.matrix, pytest.mark.filterwarnings("ignore")]
WIDE, BLOCKS, WORLD = 320, 10, 2
LEAST = 512  # bytes of storages that are followed


class WideBlock(Block):
    """Weights that are large beside what a graph saves."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.middle, self.down = nn.Linear(24, WIDE), nn.Linear(WIDE, WIDE), nn.Linear(WIDE, 24)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.middle(torch.tanh(self.up(self.norm(x))))))


class WidePolicy(Policy):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(WideBlock() for _ in range(BLOCKS))


class Following(TorchDispatchMode):
    """Bytes that are alive, looked at after each operation that creates something or communicates.

    Attributes:
        graphs: storages that the latest rollout made and left; counted apart.
        peak: of all others, since the rollout ended.
        paused: what is made now is no part of the training.
    """

    def __init__(self) -> None:
        super().__init__()
        self.known: dict[int, StorageWeakRef] = {}
        self.before: dict[int, StorageWeakRef] = {}
        self.graphs: dict[int, StorageWeakRef] = {}
        self.peak, self.paused = 0, False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if self.paused or (func.namespace == "aten" and any(item.alias_info for item in func._schema.returns)):
            return result
        for item in result if isinstance(result, (tuple, list)) else (result,):
            if type(item) is Tensor and item.untyped_storage().nbytes() >= LEAST:
                storage = item.untyped_storage()
                self.known.setdefault(storage._cdata, StorageWeakRef(storage))
        self.peak = max(self.peak, self.alive())
        return result

    def alive(self) -> int:
        """Bytes of all storages but those of graphs."""
        self.known = _living(self.known)
        return sum(_bytes(ref) for key, ref in self.known.items() if key not in self.graphs)

    def begin_rollout(self) -> None:
        self.graphs, self.before = {}, _living(self.known)

    def end_rollout(self) -> int:
        """Bytes that the rollout left."""
        self.graphs = {key: ref for key, ref in _living(self.known).items() if key not in self.before}
        self.peak = self.alive()
        return sum(map(_bytes, self.graphs.values()))


def _living(refs: dict[int, StorageWeakRef]) -> dict[int, StorageWeakRef]:
    return {key: ref for key, ref in refs.items() if not ref.expired()}


def _bytes(ref: StorageWeakRef) -> int:
    """FSDP keeps some storages and makes them empty."""
    return torch.UntypedStorage._new_with_weak_ptr(ref.cdata).nbytes()


@dataclass
class Peak:
    """Bytes on one rank: the most for weights and gradients in an update; kept graphs at its start."""

    most: int
    on_device: int
    on_host: int
    flush: str


def measure(rank: int, world: int, kind: str, lean: bool, env: dict[str, str]) -> Peak:
    """The second rollout and its update: in the first, wrappers make what they keep."""
    os.environ.update(env)
    offload.SMALL = 0
    torch.manual_seed(0)
    runtime, found = Lean() if lean else None, Peak(0, 0, 0, "native")

    def begin(net: nn.Module) -> None:
        following.paused = False
        following.begin_rollout()

    def end(net: nn.Module) -> None:
        left = following.end_rollout()
        found.on_host = runtime._run.host.used if runtime else 0
        found.on_device = left - found.on_host

    def flushed(net: nn.Module) -> None:
        found.most = following.peak
        following.paused = True  # the trainer's records

    with Following() as following, contextlib.redirect_stdout(io.StringIO()):
        net = wrap(kind, WidePolicy())
        hooks = Hooks(after_step=begin, before_update=end, after_flush=flushed)
        config = Config(rank=rank, rollouts=2, steps=3, trained=2, tokens=1, clip=0.0)
        train(runtime, net, torch.optim.SGD(net.parameters(), lr=1e-3), config, hooks)
    if runtime is not None and runtime._run.reductions.net is not None:
        found.flush = runtime._run.reductions.classify(runtime._run.reductions.net).flush
    return found


NET = WidePolicy()
W = 4 * sum(p.numel() for p in NET.parameters())  # bytes of the network,
U = 4 * sum(p.numel() for p in NET.blocks[0].parameters())  # of a unit,
M = 4 * WIDE * WIDE  # of the largest weight
SHARDS = 2 * W / WORLD  # a rank's weights and gradients
LATE, AWAY = {"LEANGRPO_SYNC": "late"}, {"LEANGRPO_BUDGET_GB": "0.00006", "LEANGRPO_OFFLOAD_GB": "unlimited"}
ROWS: list[tuple[str, bool, dict[str, str], str, float]] = [
    ("none", False, {}, "weights, gradients, a gradient being added", 2 * W + M),
    ("none", True, {}, "as natively", 2 * W + M),
    ("none", True, AWAY, "as natively", 2 * W + M),
    ("ddp", False, {}, "weights, gradients, buckets, a gradient being added", 3 * W + M),
    ("ddp", True, {}, "weights, gradients, buckets, what is reduced", 4 * W),
    ("fsdp", False, {}, "shards, two units gathered, a unit's gradient, the same as sent", SHARDS + 4 * U),
    ("fsdp", True, {}, "as natively", SHARDS + 4 * U),
    ("fsdp", True, AWAY, "as natively", SHARDS + 4 * U),
    ("fsdp", True, LATE, "shards of weights, all gathered, all gradients, two units", W / WORLD + 2 * W + 2 * U),
    ("fsdp2", False, {}, "shards, two units gathered, a unit's gradient, the same as sent", SHARDS + 4 * U),
    ("fsdp2", True, {}, "as natively, or a unit less, by when it is freed", SHARDS + 4 * U),
    ("fsdp2", True, LATE, "shards, two units gathered, a unit's gradient, two being added", SHARDS + 3 * U + 2 * M),
    ("fsdp2", True, LATE | AWAY, "the same", SHARDS + 3 * U + 2 * M),
]


def test_the_table() -> None:
    """Armed and layer-major hold at most 10 % more than native's weights and gradients; each is as its formula says."""
    print(f"\nbytes per rank; the network has {W}, a unit {U}, the largest weight {M}; {WORLD} ranks, 8 graphs")
    print(
        f"{'wrapper':8}{'flush':13}{'weights+gradients':>18}{'formula':>10}{'graphs':>8}{'on host':>8}  of the formula"
    )
    natively: dict[str, int] = {}
    for kind, lean, env, parts, formula in ROWS:
        found = ranks.run(measure, WORLD, kind, lean, env | {"LEANGRPO_AUDIT": "off"}, seconds=200)[0]
        print(f"{kind:8}{found.flush:13}{found.most:18}{formula:10.0f}{found.on_device:8}{found.on_host:8}  {parts}")
        natively.setdefault(kind, found.most)
        assert 0.9 * formula <= found.most <= 1.05 * formula
        if found.flush in ("in order", "armed", "layer-major"):
            assert found.most <= 1.1 * natively[kind]
        if "LEANGRPO_OFFLOAD_GB" in env:
            assert found.on_device <= 60_000 and found.on_device + found.on_host > 200_000
