"""Wrappers on two ranks, where the silent faults show: exact, replicas equal, collectives counted, never a hang."""

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import ranks
from support.check import assert_same
from support.grpo import Block, Config, Hooks, Policy, Result, train
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel

from leangrpo_core import Lean, memory, sync

WRAPPERS = ["fsdp2", "fsdp", "fsdp-orig", "fsdp-grad-op", "fsdp-none", "ddp", "none"]
UNITS = 4  # three blocks and the root


def wrap(kind: str, net: Policy) -> nn.Module:
    if kind.startswith("fsdp2"):
        mesh = (
            init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")) if kind == "fsdp2-hybrid" else None
        )
        for block in net.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(net, mesh=mesh)
        return net
    if kind.startswith("fsdp"):
        strategies = {
            "fsdp-grad-op": ShardingStrategy.SHARD_GRAD_OP,
            "fsdp-none": ShardingStrategy.NO_SHARD,
            "fsdp-hybrid": ShardingStrategy.HYBRID_SHARD,
        }
        precisions = {
            "fsdp-bf16": MixedPrecision(param_dtype=torch.bfloat16),
            "fsdp-cast": MixedPrecision(param_dtype=torch.float32),
            "fsdp-stored-bf16": MixedPrecision(param_dtype=torch.float32, reduce_dtype=torch.float32),
        }
        return FullyShardedDataParallel(
            net.to(torch.bfloat16) if kind == "fsdp-stored-bf16" else net,
            device_mesh=init_device_mesh("cpu", (2, 2)) if kind == "fsdp-hybrid" else None,
            auto_wrap_policy=ModuleWrapPolicy({Block}),
            sharding_strategy=strategies.get(kind, ShardingStrategy.FULL_SHARD),
            mixed_precision=precisions.get(kind),
            use_orig_params=kind == "fsdp-orig",
            device_id=torch.device("cpu"),
        )
    if kind.startswith("ddp"):
        group = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()] if kind == "ddp-alone" else None
        wrapped = DistributedDataParallel(net, static_graph=kind == "ddp-static", process_group=group)
        if kind == "ddp-hook":
            wrapped.register_comm_hook(None, allreduce_hook)
        return wrapped
    return net


def job(
    rank: int, world: int, kind: str, lean: bool, options: dict[str, Any]
) -> tuple[Result, dict[str, Any], dict[str, int]]:
    """One rank of a training run; returns its updates, its first window and its collectives."""
    for name, value in options.get("env", {}).items():
        os.environ[name] = value[rank] if isinstance(value, list) else value
    counted: dict[str, int] = {}
    for name in ("reduce_scatter_tensor", "reduce_scatter_single"):  # the second since torch 2.13
        original = getattr(dist, name, None)

        def count(*args: Any, original: Any = original, **kwargs: Any) -> Any:
            counted["reduce_scatter"] = counted.get("reduce_scatter", 0) + 1
            return original(*args, **kwargs)

        if original is not None:
            setattr(dist, name, count)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["LEANGRPO_REPORT_DIR"] = folder
        torch.manual_seed(0)
        net = wrap(kind, Policy(checkpointing=options.get("checkpointing", False)))
        config = Config(rank=rank, **options.get("config", {}))
        hooks = options["hooks"](rank) if "hooks" in options else None
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
        result = train(Lean() if lean else None, net, optimizer, config, hooks)
        lines = Path(folder, f"rank{rank}.jsonl")
        window = json.loads(lines.read_text().splitlines()[0]) if lines.exists() else {}
    return result, window, counted


def both(kind: str, world: int = 2, **options: Any) -> tuple[list[Any], list[Any]]:
    return ranks.run(job, world, kind, True, options), ranks.run(job, world, kind, False, options)


@pytest.mark.parametrize("kind", WRAPPERS)
@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointing"])
def test_two_ranks(kind: str, checkpointing: bool) -> None:
    lean, native = both(kind, checkpointing=checkpointing, config={"accumulate": 2})
    for ours, theirs in zip(lean, native, strict=True):
        assert_same(ours[0], theirs[0], 1e-6 if kind == "ddp" else 0)
        assert ours[1]["replayed"] == ours[1]["kept"] == 6
    if kind == "ddp":
        for update in range(len(lean[0][0].weights)):
            for name, weight in lean[0][0].weights[update].items():
                assert torch.equal(weight, lean[1][0].weights[update][name]), f"replicas differ in {name}"


@pytest.mark.parametrize("schedule", ["retain", "recompute"])
def test_ranks_without_a_wrapper_averaged_late(schedule: str) -> None:
    """As a native trainer that averages all gradients before it clips: in every update, replayed or not."""

    def hooks(rank: int, lean: bool) -> Hooks:
        return Hooks() if lean else Hooks(before_flush=lambda net: sync.flat_mean(list(net.parameters())))

    config, env = {"accumulate": 2}, {"LEANGRPO_SYNC": "late", "LEANGRPO_SCHEDULE": schedule}
    lean, native = (
        ranks.run(
            job, 2, "none", lean, {"hooks": lambda rank, lean=lean: hooks(rank, lean), "config": config, "env": env}
        )
        for lean in (True, False)
    )
    for ours, theirs in zip(lean, native, strict=True):
        assert_same(ours[0], theirs[0], 1e-6)
    for a, b in zip(lean[0][0].weights, lean[1][0].weights, strict=True):
        assert all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("kind", ["fsdp", "fsdp-orig"])
def test_every_step_kept(kind: str) -> None:
    """From the first call of the process on, when FSDP1 has not gathered anything yet."""
    lean, native = both(kind, config={"trained": 6, "rollouts": 1})
    for ours, theirs in zip(lean, native, strict=True):
        assert_same(ours[0], theirs[0], 1e-6)
        assert ours[1]["replayed"] == 24


def test_sharded_in_pairs_and_replicated() -> None:
    lean, native = both("fsdp-hybrid", 4, config={"accumulate": 2, "rollouts": 1})
    for ours, theirs in zip(lean, native, strict=True):
        assert_same(ours[0], theirs[0], 1e-6)
        assert ours[1]["replayed"] == 6


def test_one_reduction_per_unit_and_update() -> None:
    lean, native = both("fsdp", config={"rollouts": 1})
    assert native[0][2]["reduce_scatter"] == UNITS * 12
    assert lean[0][2]["reduce_scatter"] == UNITS


@pytest.mark.parametrize("kind", ["fsdp", "ddp"])
@pytest.mark.parametrize("budgets", [[0, 0], [1, 1], [6, 6], [0, 6], [7, 3], [100, 1]])
def test_budgets_that_differ_between_ranks(kind: str, budgets: list[int]) -> None:
    """The kept set is the prefix that every rank holds, here as if ranks had room for other numbers of graphs."""

    def hooks(rank: int) -> Hooks:
        memory.Sizes.fits = lambda self, budget_bytes: budgets[rank]  # in this forked process only
        return Hooks()

    lean, native = both(kind, hooks=hooks, config={"rollouts": 1})
    for ours, theirs in zip(lean, native, strict=True):
        assert_same(ours[0], theirs[0], 1e-6)
        assert ours[1]["replayed"] == min(*budgets, 12)
        assert ours[1]["recomputed"] == 12 - min(*budgets, 12)


def test_no_room_for_a_joint_backward_on_one_rank() -> None:
    """Then nothing is kept on any rank, and the window's line says what was missing."""

    def hooks(rank: int) -> Hooks:
        memory.free_bytes = lambda device: 1000 * rank + 10000 * (1 - rank) * 1000  # in this forked process only
        return Hooks()

    lean, native = both("fsdp", hooks=hooks, config={"rollouts": 1})
    for ours, theirs in zip(lean, native, strict=True):
        assert_same(ours[0], theirs[0])
        assert ours[1]["replayed"] == 0
    assert any("a joint backward needs" in reason for reason in lean[1][1]["reasons"])


def whole_and_share(rank: int, world: int) -> tuple[int, int]:
    """Full weights plus full gradients, less the share of the weights that is there anyway; and the estimate."""
    net = wrap("fsdp", Policy())
    whole = sum(p.numel() * p.element_size() for p in Policy().parameters())
    shares = sum(p.numel() * p.element_size() for p in net.parameters())
    return 2 * whole - shares, memory.joint_bytes(net, world)


def test_joint_bytes_are_those_of_full_weights_and_gradients() -> None:
    for expected, found in ranks.run(whole_and_share, 2):
        assert found == pytest.approx(expected, rel=0.01)


def change_inputs(rank: int) -> Hooks:
    if rank == 0:
        return Hooks()
    return Hooks(update_latents=lambda x, row, step: x + 0.01 if row == 1 else x)


def poison(rank: int) -> Hooks:
    if rank == 0:
        return Hooks()
    return Hooks(rollout_output=lambda out, row, step: out * torch.nan if (row, step) == (2, 0) else out)


def no_advantage(rank: int) -> Hooks:
    return Hooks(advantages=torch.zeros_like) if rank else Hooks()


@pytest.mark.parametrize("kind", WRAPPERS)
def test_other_inputs_on_one_rank(kind: str) -> None:
    lean, native = both(kind, hooks=change_inputs, config={"rollouts": 1})
    for ours, theirs in zip(lean, native, strict=True):
        assert_same(ours[0], theirs[0], 0 if kind == "none" else 1e-6)
    assert lean[1][1]["recomputed"] >= 3 and any("inputs differ" in reason for reason in lean[1][1]["reasons"])
    if kind != "none":
        assert lean[0][1]["replayed"] == lean[1][1]["replayed"] == 3
        assert lean[0][1]["reasons"]["another rank recomputes"] == 1


@pytest.mark.parametrize("kind", WRAPPERS)
def test_a_rank_without_advantage(kind: str) -> None:
    lean, native = both(kind, hooks=no_advantage, config={"rollouts": 1})
    for ours, theirs in zip(lean, native, strict=True):
        assert_same(ours[0], theirs[0], 0 if kind == "none" else 1e-6)
    assert lean[1][1]["replayed"] == 12


@pytest.mark.parametrize("kind", ["fsdp", "ddp"])
def test_nan_on_one_rank_neither_hangs_nor_hides(kind: str) -> None:
    lean, native = both(kind, hooks=poison, config={"rollouts": 1})
    for ours, theirs in zip(lean, native, strict=True):
        for name, grad in theirs[0].gradients[0].items():
            mine = ours[0].gradients[0][name]
            assert grad is not None and mine is not None and grad.isnan().any()
            assert torch.equal(mine.isnan(), grad.isnan()), name


@pytest.mark.parametrize("kind", ["fsdp", "ddp"])
def test_weights_changed_on_one_rank_stop_every_rank(kind: str) -> None:
    def hooks(rank: int) -> Hooks:
        def change(net: nn.Module) -> None:
            if rank == 1:
                next(p for p in net.parameters() if p.numel()).data.view(-1)[0] += 1

        return Hooks(before_flush=change)

    with pytest.raises(ranks.RankFailed) as caught:
        ranks.run(job, 2, kind, True, {"hooks": hooks})
    assert set(caught.value.errors) == {0, 1} and all("LG604" in text for text in caught.value.errors.values())


def test_settings_that_differ_stop_every_rank() -> None:
    with pytest.raises(ranks.RankFailed) as caught:
        ranks.run(job, 2, "none", True, {"env": {"LEANGRPO_SCHEDULE": ["retain", "recompute"]}})
    for text in caught.value.errors.values():
        assert "LG602" in text and "rank 0: schedule=retain" in text and "rank 1: schedule=recompute" in text


@pytest.mark.parametrize("kind", ["fsdp", "ddp", "none"])
def test_recompute_is_upstream(kind: str) -> None:
    lean, native = both(kind, env={"LEANGRPO_SCHEDULE": "recompute"})
    for ours, theirs in zip(lean, native, strict=True):
        assert_same(ours[0], theirs[0])
        assert ours[0].calls == theirs[0].calls


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("ddp-static", "static_graph"),
        ("ddp-hook", "communication hook"),
        ("ddp-alone", "a part of the ranks"),
        ("fsdp-bf16", "add up gradients in torch.bfloat16"),
        ("fsdp-stored-bf16", "added up in torch.bfloat16"),
    ],
)
def test_refused_wrappers_recompute(kind: str, reason: str) -> None:
    lean, native = both(kind, config={"rollouts": 1})
    for ours, theirs in zip(lean, native, strict=True):
        assert_same(ours[0], theirs[0])
        assert ours[1]["kept"] == 0 and any(reason in text for text in ours[1]["reasons"])


def test_inputs_that_the_wrapper_casts_are_the_same() -> None:
    """DanceGRPO without autocast: its first latent is bf16 in the rollout, fp32 in the update, fp32 in the network."""

    def hooks(rank: int) -> Hooks:
        return Hooks(update_latents=lambda latents, row, step: latents.double())

    lean, native = both("fsdp-cast", hooks=hooks, config={"rollouts": 1})
    for ours, theirs in zip(lean, native, strict=True):
        assert_same(ours[0], theirs[0], 1e-6)
        assert ours[1]["replayed"] == 12


def unwrapped_rollout(rank: int, world: int, lean: bool) -> list[dict[str, Tensor | None]]:
    """The rollout goes through the bare module, the update through DDP, as under accelerate."""
    runtime, updates = Lean() if lean else None, []
    torch.manual_seed(0)
    net = Policy()
    wrapped = DistributedDataParallel(net)
    noise = torch.Generator().manual_seed(rank)
    for _ in range(2):
        x, t, p = torch.randn(2, 1, 4, 8, generator=noise), torch.zeros(1), torch.randn(1, 8, generator=noise)
        if runtime is None:
            for row in range(2):
                (wrapped(x[row], t, p)[0].square().sum() * (1 + rank)).backward()
        else:
            with runtime.rollout(rows=2, steps=1, trained=1, window=2), torch.no_grad():
                for row in range(2):
                    runtime.rollout_call(net, [row], 0, x[row], t, p)
            runtime.step_order(2, 1)
            ids = runtime.identity()
            for row in range(2):
                out = runtime.policy_call(wrapped, ids["lean_row"][row : row + 1], [0], x[row], t, p)[0]
                (out.square().sum() * (1 + rank)).backward()
            runtime.flush(wrapped, None)
        updates.append({name: None if q.grad is None else q.grad.clone() for name, q in net.named_parameters()})
        net.zero_grad()
    if runtime is not None:
        assert net.calls["grad"] == 4
    return updates


def test_ddp_around_an_unwrapped_rollout() -> None:
    lean, native = ranks.run(unwrapped_rollout, 2, True), ranks.run(unwrapped_rollout, 2, False)
    for ours, theirs in zip(lean, native, strict=True):
        assert_same(Result(ours), Result(theirs), 1e-6)


def partly_used(rank: int, world: int) -> list[Any]:
    used, other, never = (nn.Parameter(torch.zeros(3)) for _ in range(3))
    used.grad = torch.full((3,), float(rank + 1))
    if rank == 0:
        other.grad = torch.full((3,), 4.0)
    sync.flat_mean([used, other, never])
    return [used.grad, other.grad, never.grad]


def test_flat_mean_takes_every_rank_along() -> None:
    for used, other, never in ranks.run(partly_used, 2):
        torch.testing.assert_close(used, torch.full((3,), 1.5))
        torch.testing.assert_close(other, torch.full((3,), 2.0))
        assert never is None


@pytest.mark.parametrize("forget", ["flat_mean", "reduce on one rank"])
def test_replicas_that_differ_stop_every_rank(forget: str) -> None:
    def hooks(rank: int) -> Hooks:
        mean = sync.flat_mean

        def wrong(parameters: list[nn.Parameter]) -> None:
            if forget != "flat_mean":
                mean(parameters)
                if rank == 1:
                    parameters[0].grad.view(-1)[0] += 1e-3  # type: ignore[union-attr]

        sync.flat_mean = wrong  # type: ignore[assignment]  # in this forked process only
        return Hooks()

    with pytest.raises(ranks.RankFailed) as caught:
        ranks.run(job, 2, "ddp", True, {"hooks": hooks})
    assert set(caught.value.errors) == {0, 1} and all("LG609" in text for text in caught.value.errors.values())


def test_audit_on_two_ranks_with_a_budget() -> None:
    """What every rank replayed is audited before the native calls, and with the audit's own forwards in step."""

    def hooks(rank: int) -> Hooks:
        memory.Sizes.fits = lambda self, budget_bytes: 5  # in this forked process only
        return Hooks()

    for kind in ("fsdp", "ddp"):
        lean, native = both(kind, hooks=hooks, env={"LEANGRPO_AUDIT": "first"}, config={"rollouts": 1})
        for ours, theirs in zip(lean, native, strict=True):
            assert_same(ours[0], theirs[0], 1e-6)
            assert ours[1]["replayed"] == 5 and ours[1]["audit_rel_l2"] < 1e-6


def test_audit_on_two_ranks() -> None:
    for kind in ("fsdp", "ddp"):
        env = {"LEANGRPO_AUDIT": "every:1"}
        lean, native = both(kind, env=env)
        for ours, theirs in zip(lean, native, strict=True):
            assert_same(ours[0], theirs[0], 1e-6)
            assert ours[1]["audit_rel_l2"] < 1e-6
