"""The runtime under every wrapper: {retain, recompute} x {upstream, group, late} x checkpointing, all weights and some.

Two updates per rollout, of which the first is replayed, of two groups each. Whole gradients are compared with those of
one process that trains one plain network natively on the samples of all ranks.
"""

import itertools
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from support import ranks
from support.grpo import Config, Hooks, Policy, train
from support.wrapped import Side, adapters_only, job, whole
from torch import Tensor, nn

pytestmark = [pytest.mark.matrix, pytest.mark.filterwarnings("ignore")]
KINDS = ["none", "ddp", "fsdp", "fsdp-grad-op", "fsdp-none", "fsdp-hybrid", "fsdp2", "fsdp2-hybrid"]
BOUNDS = {torch.float64: 1e-12, torch.float32: 1e-6}
SETTINGS = list(itertools.product(("retain", "recompute"), ("upstream", "group", "late")))
CONFIG: dict[str, Any] = {"accumulate": 4, "rows": 8, "group": 2, "trained": 2, "steps": 3, "rollouts": 1, "clip": 0.0}


Whole = list[dict[str, Tensor]]  # per update: whole gradients


@dataclass
class Found:
    """One training on one rank: its whole gradients, and whether its shares are those of the native training under the
    same wrapper, to the bit."""

    name: tuple[Any, ...]
    bitwise: bool
    whole: Whole
    lean: Side
    native: Side


def distance(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    assert {name for name, grad in ours.items() if grad.any()} <= theirs.keys()
    off = sum(float((ours[name].double() - grad.double()).square().sum()) for name, grad in theirs.items())
    return (off / sum(float(grad.double().square().sum()) for grad in theirs.values())) ** 0.5


def one_process(world: int, adapters: bool, dtype: torch.dtype) -> tuple[Whole, list[Whole]]:
    """Per update the mean over all ranks' samples, rank after rank with the means of the updates before; and what each
    rank would do alone."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    means: Whole = []
    try:
        alone = [one_rank(rank, adapters, []) for rank in range(world)]
        for update in range(2):
            per_rank = [one_rank(rank, adapters, means)[update] for rank in range(world)]
            means.append({name: torch.stack([grads[name] for grads in per_rank]).mean(0) for name in per_rank[0]})
    finally:
        torch.set_default_dtype(before)
    return means, alone


def one_rank(rank: int, adapters: bool, means: Whole) -> Whole:
    """A native training with one rank's samples. Gradients of its own after those updates that are given."""
    torch.manual_seed(0)
    net = adapters_only(Policy()) if adapters else Policy()
    left, grads = iter(means), []

    def put(net: nn.Module) -> None:
        grads.append(whole(net))
        for name, mean in next(left, {}).items():
            net.get_parameter(name).grad = mean.clone()

    train(None, net, torch.optim.SGD(net.parameters(), lr=1e-3), Config(rank=rank, **CONFIG), Hooks(before_flush=put))
    return grads


def combinations(rank: int, world: int, kind: str, adapters: bool, dtype: torch.dtype) -> list[Found]:
    """All settings of one wrapper, in one process: a fork costs more than a training."""
    torch.set_default_dtype(dtype)
    found = []

    def run(kind: str, lean: bool, **env: str) -> tuple[Side, Whole]:
        grads: Whole = []
        hooks = Hooks(after_flush=lambda net: grads.append(whole(net)))
        options = {
            "hooks": lambda rank: hooks, "config": CONFIG, "env": env, "adapters": adapters,
            "checkpointing": checkpointing, "optimizer": torch.optim.SGD,
        }  # fmt: skip
        return job(rank, world, kind, lean, options), grads

    for checkpointing in (False, True):
        native, _ = run(kind, False)
        for schedule, late in SETTINGS:
            side, grads = run(kind, True, LEANGRPO_SCHEDULE=schedule, LEANGRPO_SYNC=late)
            pairs = [
                (ours[name], theirs[name])
                for ours, theirs in zip(side.result.gradients, native.result.gradients, strict=True)
                for name in theirs
            ]
            bitwise = all((a is None) == (b is None) and (a is None or torch.equal(a, b)) for a, b in pairs)  # type: ignore[arg-type]
            found.append(Found((schedule, late, checkpointing), bitwise, grads, side, native))
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
    per_rank = ranks.run(combinations, world, kind, adapters, dtype, seconds=900)
    (mean, alone), widest = one_process(world, adapters, dtype), 0.0
    for rank, cases in enumerate(per_rank):
        for found, first in zip(cases, per_rank[0], strict=True):
            schedule, late, checkpointing = found.name
            where = f"rank {rank}, {schedule}, {late}, checkpointing {checkpointing}"
            shared = kind != "none" or late != "upstream"
            for ours, theirs in zip(found.whole, mean if shared else alone[rank], strict=True):
                off = distance(ours, theirs)
                assert off <= BOUNDS[dtype], f"{where}: {off}"
                widest = max(widest, off)
            if shared:
                for ours, theirs in zip(found.whole, first.whole, strict=True):
                    assert all(torch.equal(ours[name], theirs[name]) for name in theirs), f"{where}: replicas differ"
            averaged = (late != "upstream" and kind in ("none", "ddp")) or (kind == "ddp" and schedule == "retain")
            sharded = late != "upstream" and "fsdp" in kind
            assert found.bitwise or sharded or averaged, f"{where}: not native's bits"
            if schedule == "retain":
                assert found.lean.window["replayed"] == 8, f"{where}: {found.lean.window}"
                assert found.lean.window["walks"] == (2 if late == "group" else 1), where
            expected = found.native.collectives.get("reduce_scatter", 0)
            assert expected % 16 == 0  # two updates of eight calls each
            if sharded:
                expected = expected // 16 * {"group": 4, "late": 2}[late]
            assert found.lean.collectives.get("reduce_scatter", 0) == expected, where
    print(f"{kind}, {world} ranks, {'adapters' if adapters else 'full'}, {dtype}: relative L2 at most {widest:.1e}")
