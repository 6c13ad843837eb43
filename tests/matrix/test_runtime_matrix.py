"""The runtime under every wrapper: {retain, recompute} x {upstream, late} x checkpointing, full weights and some.

Two updates per rollout, of which the first is replayed. Whole gradients are compared with those of one plain network
per rank that is trained natively, averaged by one all-reduce.
"""

import itertools
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from support import ranks
from support.grpo import Hooks
from support.wrapped import UNITS, Side, job, whole
from torch import Tensor, nn

from leangrpo_core import sync

pytestmark = [pytest.mark.matrix, pytest.mark.filterwarnings("ignore")]
KINDS = ["none", "ddp", "fsdp", "fsdp-grad-op", "fsdp-none", "fsdp-hybrid", "fsdp2", "fsdp2-hybrid"]
BOUNDS = {torch.float64: 1e-12, torch.float32: 1e-6}
SETTINGS = list(itertools.product(("retain", "recompute"), ("upstream", "late")))


@dataclass
class Found:
    """One training on one rank: how far its whole gradients are from the reference's, and whether its shares are
    those of the native training under the same wrapper, to the bit."""

    name: tuple[Any, ...]
    distances: list[float]
    bitwise: bool
    whole: list[dict[str, Tensor]]
    lean: Side
    native: Side


def distance(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    assert {name for name, grad in ours.items() if grad.any()} <= theirs.keys()
    off = sum(float((ours[name].double() - grad.double()).square().sum()) for name, grad in theirs.items())
    return (off / sum(float(grad.double().square().sum()) for grad in theirs.values())) ** 0.5


def combinations(rank: int, world: int, kind: str, adapters: bool, dtype: torch.dtype) -> list[Found]:
    """All settings of one wrapper, in one process: a fork costs more than a training."""
    torch.set_default_dtype(dtype)
    found = []

    def run(kind: str, lean: bool, mean: bool = False, **env: str) -> tuple[Side, list[dict[str, Tensor]]]:
        grads: list[dict[str, Tensor]] = []

        def average(net: nn.Module) -> None:
            if mean:
                sync.flat_mean([p for p in net.parameters() if p.requires_grad])

        hooks = Hooks(before_flush=average, after_flush=lambda net: grads.append(whole(net)))
        options = {
            "hooks": lambda rank: hooks, "config": {"accumulate": 2, "rollouts": 1, "clip": 0.0}, "env": env,
            "adapters": adapters, "checkpointing": checkpointing, "optimizer": torch.optim.SGD,
        }  # fmt: skip
        return job(rank, world, kind, lean, options), grads

    for checkpointing in (False, True):
        native, _ = run(kind, False)
        references = {mean: run("none", False, mean=mean)[1] for mean in (True, False)}
        for schedule, late in SETTINGS:
            side, grads = run(kind, True, LEANGRPO_SCHEDULE=schedule, LEANGRPO_SYNC=late)
            reference = references[kind != "none" or late == "late"]
            distances = [distance(ours, theirs) for ours, theirs in zip(grads, reference, strict=True)]
            pairs = [
                (ours[name], theirs[name])
                for ours, theirs in zip(side.result.gradients, native.result.gradients, strict=True)
                for name in theirs
            ]
            bitwise = all((a is None) == (b is None) and (a is None or torch.equal(a, b)) for a, b in pairs)  # type: ignore[arg-type]
            found.append(Found((schedule, late, checkpointing), distances, bitwise, grads, side, native))
    return found


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("adapters", [False, True], ids=["full", "adapters"])
@pytest.mark.parametrize("dtype", BOUNDS, ids=["float64", "float32"])
def test_gradients_replicas_and_collectives(kind: str, world: int, adapters: bool, dtype: torch.dtype) -> None:
    if "hybrid" in kind and world == 2:
        pytest.skip("hybrid sharding replicates groups of two ranks, which takes four")
    if adapters and kind.startswith("fsdp") and not kind.startswith("fsdp2"):
        kind += "-orig"  # frozen and trained weights in one unit
    per_rank = ranks.run(combinations, world, kind, adapters, dtype, seconds=600)
    widest = 0.0
    for rank, cases in enumerate(per_rank):
        for found, first in zip(cases, per_rank[0], strict=True):
            schedule, late, checkpointing = found.name
            where = f"rank {rank}, {schedule}, {late}, checkpointing {checkpointing}"
            widest = max(widest, *found.distances)
            assert max(found.distances) <= BOUNDS[dtype], f"{where}: {found.distances}"
            if kind != "none" or late == "late":
                for ours, theirs in zip(found.whole, first.whole, strict=True):
                    assert all(torch.equal(ours[name], theirs[name]) for name in theirs), f"{where}: replicas differ"
            joint = late == "late" and schedule == "retain" and "fsdp" in kind
            averaged = (late == "late" and kind in ("none", "ddp")) or (kind == "ddp" and schedule == "retain")
            assert found.bitwise or joint or averaged, f"{where}: not native's bits"
            if schedule == "retain":
                assert found.lean.window["replayed"] == 6, f"{where}: {found.lean.window}"
            expected = found.native.collectives.get("reduce_scatter", 0)
            if joint and expected:  # natively one per unit and step: the root has nothing to reduce for adapters
                expected -= (UNITS - adapters) * 5
            assert found.lean.collectives.get("reduce_scatter", 0) == expected, where
    print(f"{kind}, {world} ranks, {'adapters' if adapters else 'full'}, {dtype}: relative L2 at most {widest:.1e}")
