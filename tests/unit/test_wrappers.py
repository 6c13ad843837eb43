"""Wrappers on two ranks, where the silent faults show: exact, replicas equal, collectives counted, never a hang.

Wide combinations are in test_matrix.py.
"""

from typing import Any

import pytest
import torch
from support import ranks
from support.check import assert_same
from support.grpo import Config, Hooks, Policy, Result, train
from support.wrapped import UNITS, both, job, replicas_equal, shares, wrap
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.parallel import DistributedDataParallel

from leangrpo_core import Lean, fsdp1, memory, sync

WRAPPERS = ["fsdp2", "fsdp", "fsdp-orig", "fsdp-grad-op", "fsdp-none", "ddp", "none"]
ONE = {"rollouts": 1}
LATE = {"LEANGRPO_SYNC": "late"}


def close_to(kind: str) -> float:
    """Under DDP gradients are reduced once instead of once per backward; else every bit must be native's."""
    return 1e-6 if kind == "ddp" else 0


@pytest.mark.parametrize("kind", WRAPPERS)
@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointing"])
def test_two_ranks(kind: str, checkpointing: bool) -> None:
    sides = both(kind, checkpointing=checkpointing, config={"accumulate": 2})
    for lean, native in sides:
        assert_same(lean.result, native.result, close_to(kind))
        assert lean.window["replayed"] == lean.window["kept"] == 6
        assert lean.collectives.get("reduce_scatter") == native.collectives.get("reduce_scatter")
    assert kind != "ddp" or replicas_equal([lean.result for lean, _ in sides])


@pytest.mark.parametrize("kind", ["fsdp-bf16", "fsdp-bf16-orig", "fsdp-stored-bf16"])
@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointing"])
def test_low_precision(kind: str, checkpointing: bool) -> None:
    """Upstream rounds the sum of gradients after every backward, and so does one walk after the other; late or not."""
    late = LATE if checkpointing else {}
    config = {"accumulate": 2, "bf16": "stored" in kind}  # what FSDP1 does not cast itself, autocast does
    for lean, native in both(kind, checkpointing=checkpointing, env=late, config=config):
        assert_same(lean.result, native.result)
        assert lean.window["replayed"] == 6 and lean.window["flush"] == "armed"


@pytest.mark.parametrize(("kind", "env"), [("fsdp-bf16", {}), ("fsdp-bf16-orig", LATE)])
def test_low_precision_on_one_rank(kind: str, env: dict[str, str]) -> None:
    """FSDP1 frees its bf16 weights after each forward there, too, though it neither shards nor reduces."""
    for lean, native in both(kind, 1, env=env, config=ONE):
        assert_same(lean.result, native.result)
        assert lean.window["replayed"] == 12


@pytest.mark.parametrize("kind", ["fsdp", "fsdp-orig", "fsdp-grad-op", "fsdp-none"])
def test_late_is_one_reduction_per_unit(kind: str) -> None:
    for lean, native in both(kind, env=LATE, config=ONE):
        assert_same(lean.result, native.result, 1e-6)
        assert lean.window["replayed"] == 12 and lean.window["flush"] == "joint"
        if kind != "fsdp-none":  # which has no shares to scatter
            assert native.collectives["reduce_scatter"] == UNITS * 12
            assert lean.collectives["reduce_scatter"] == UNITS


@pytest.mark.parametrize("kind", ["fsdp-hybrid", "fsdp-hybrid-orig", "fsdp2-hybrid"])
def test_sharded_in_pairs_and_replicated(kind: str) -> None:
    for lean, native in both(kind, 4, config={"accumulate": 2, "rollouts": 1}):
        assert_same(lean.result, native.result)
        assert lean.window["replayed"] == 6
        assert lean.collectives.get("reduce_scatter") == native.collectives.get("reduce_scatter")


@pytest.mark.parametrize("kind", ["fsdp-orig", "fsdp-none-orig", "fsdp2", "ddp"])
def test_some_weights_train(kind: str) -> None:
    """As with LoRA: every unit holds frozen weights, and the root nothing else."""
    for lean, native in both(kind, adapters=True):
        assert_same(lean.result, native.result, close_to(kind))
        assert lean.window["replayed"] == 12


def test_rows_that_move_otherwise_on_each_rank() -> None:
    """Of the first update's two rows, one rank does not hold the first: both recompute it, and replay the second."""
    for lean, native in both("fsdp", config={"accumulate": 2, "moved": ((3, 1, 0, 2), (1, 0, 2, 3)), "rollouts": 1}):
        assert_same(lean.result, native.result)
        assert (lean.window["kept"], lean.window["replayed"]) == (6, 3)


@pytest.mark.parametrize("schedule", ["retain", "recompute"])
def test_ranks_without_a_wrapper_averaged_late(schedule: str) -> None:
    """As a native trainer that averages all gradients before it clips: in every update, replayed or not."""

    def hooks(rank: int, lean: bool) -> Hooks:
        return Hooks() if lean else Hooks(before_flush=lambda net: sync.flat_mean(list(net.parameters())))

    config, env = {"accumulate": 2}, LATE | {"LEANGRPO_SCHEDULE": schedule}
    ours, theirs = (
        ranks.run(
            job, 2, "none", lean, {"hooks": lambda rank, lean=lean: hooks(rank, lean), "config": config, "env": env}
        )
        for lean in (True, False)
    )
    for lean, native in zip(ours, theirs, strict=True):
        assert_same(lean.result, native.result, 1e-6)
    assert replicas_equal([lean.result for lean in ours])


@pytest.mark.parametrize("kind", ["fsdp", "fsdp-orig"])
def test_every_step_kept(kind: str) -> None:
    """From the first call of the process on, when FSDP1 has not gathered anything yet."""
    for lean, native in both(kind, config={"trained": 6, "rollouts": 1}):
        assert_same(lean.result, native.result)
        assert lean.window["replayed"] == 24


def test_forwards_are_gathered_once_less() -> None:
    """A step that is replayed needs no units gathered for a second forward."""
    lean, native = both("fsdp", config=ONE, env={"LEANGRPO_AUDIT": "off"})[0]
    assert lean.collectives["reduce_scatter"] == native.collectives["reduce_scatter"] == UNITS * 12
    # The root stays gathered between a forward and its backward.
    assert native.collectives["all_gather"] - lean.collectives["all_gather"] == (UNITS - 1) * 12


def room_for(counts: list[int]) -> Any:
    """Hooks under which each rank has room for its number of graphs."""

    def hooks(rank: int) -> Hooks:
        memory.Sizes.fits = lambda self, budget_bytes: counts[rank]  # in this forked process only
        return Hooks()

    return hooks


@pytest.mark.parametrize(
    ("kind", "budgets", "env"),
    [
        ("fsdp", [0, 0], {}),
        ("fsdp", [0, 6], {}),
        ("fsdp", [7, 3], {}),
        ("fsdp", [100, 1], {}),
        ("fsdp", [7, 3], LATE),
        ("fsdp-bf16", [7, 3], {}),
        ("fsdp2", [7, 3], {}),
        ("ddp", [0, 6], {}),
        ("ddp", [7, 3], {}),
    ],
)
def test_budgets_that_differ_between_ranks(kind: str, budgets: list[int], env: dict[str, str]) -> None:
    """The kept set is the prefix that every rank holds; under DDP each rank replays what it has."""
    for rank, (lean, native) in enumerate(both(kind, hooks=room_for(budgets), env=env, config=ONE)):
        assert_same(lean.result, native.result, 1e-6 if env else close_to(kind))
        replayed = min(budgets[rank] if kind == "ddp" else min(budgets), 12)
        assert (lean.window["replayed"], lean.window["recomputed"]) == (replayed, 12 - replayed)


def test_late_without_room_on_one_rank() -> None:
    """Then every rank reduces as upstream does, and the run says what was missing."""

    def hooks(rank: int) -> Hooks:
        memory.free_bytes = lambda device: 1000 * rank + 10000 * (1 - rank) * 1000  # in this forked process only
        return Hooks()

    sides = both("fsdp", hooks=hooks, env=LATE, config=ONE)
    for lean, native in sides:
        assert_same(lean.result, native.result)
        assert lean.window["replayed"] == 12 and lean.window["flush"] == "armed"
        assert lean.collectives["reduce_scatter"] == native.collectives["reduce_scatter"]
    assert "no room on another rank" in sides[0][0].said and not sides[1][0].said


def unknown_torch(rank: int) -> Hooks:
    fsdp1.available = lambda: "FSDP has no _pre_backward_hook"  # in this forked process only
    return Hooks()


def test_a_torch_that_is_not_known() -> None:
    """One backward for all graphs, which needs no private names, and a notice."""
    sides = both("fsdp", hooks=unknown_torch, config=ONE)
    for lean, native in sides:
        assert_same(lean.result, native.result, 1e-6)
        assert lean.window["replayed"] == 12 and lean.window["flush"] == "joint"
        assert lean.collectives["reduce_scatter"] == UNITS
    notice = "FSDP has no _pre_backward_hook; kept graphs are walked in one backward"
    assert sides[0][0].said.count(notice) == 1 and not sides[1][0].said


def test_a_torch_that_is_not_known_without_room() -> None:
    def hooks(rank: int) -> Hooks:
        memory.free_bytes = lambda device: 1000 * rank + 10000 * (1 - rank) * 1000  # in this forked process only
        return unknown_torch(rank)

    sides = both("fsdp", hooks=hooks, config=ONE)
    for lean, native in sides:
        assert_same(lean.result, native.result)
        assert lean.window["replayed"] == 0
    assert any("a joint backward needs" in reason for reason in sides[1][0].window["reasons"])


def whole_and_share(rank: int, world: int) -> tuple[int, int]:
    """Full weights plus full gradients, less the share of the weights that is there anyway; and the estimate."""
    net = wrap("fsdp", Policy())
    full = sum(p.numel() * p.element_size() for p in Policy().parameters())
    mine = sum(p.numel() * p.element_size() for p in net.parameters())
    return 2 * full - mine, memory.joint_bytes(net, world)


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


@pytest.mark.parametrize("kind", [*WRAPPERS, "late"])
def test_other_inputs_on_one_rank(kind: str) -> None:
    """Its calls of row 1 are recomputed, under a sharded wrapper on every rank."""
    late, alone = kind == "late", kind in ("none", "ddp")
    sides = both("fsdp" if late else kind, hooks=change_inputs, config=ONE, env=LATE if late else {})
    for rank, (lean, native) in enumerate(sides):
        assert_same(lean.result, native.result, 1e-6 if late else close_to(kind))
        recomputed = 0 if alone and rank == 0 else 3
        assert (lean.window["replayed"], lean.window["recomputed"]) == (12 - recomputed, recomputed)
    assert any("inputs differ" in reason for reason in sides[1][0].window["reasons"])
    if not alone:
        assert sides[0][0].window["reasons"]["another rank recomputes"] == 3


@pytest.mark.parametrize("kind", [*WRAPPERS, "late"])
def test_a_rank_without_advantage(kind: str) -> None:
    late = kind == "late"
    sides = both("fsdp" if late else kind, hooks=no_advantage, config=ONE, env=LATE if late else {})
    for lean, native in sides:
        assert_same(lean.result, native.result, 1e-6 if late else close_to(kind))
    assert sides[1][0].window["replayed"] == 12


@pytest.mark.parametrize("kind", ["fsdp", "fsdp-bf16", "fsdp2", "ddp"])
def test_nan_on_one_rank_neither_hangs_nor_hides(kind: str) -> None:
    for lean, native in both(kind, hooks=poison, config=ONE):
        for name, grad in native.result.gradients[0].items():
            mine = lean.result.gradients[0][name]
            assert grad is not None and mine is not None and grad.isnan().any()
            assert torch.equal(mine.isnan(), grad.isnan()), name


@pytest.mark.parametrize("kind", ["fsdp", "fsdp2"])
def test_an_exception_on_one_rank_ends_every_rank(kind: str) -> None:
    def hooks(rank: int) -> Hooks:
        def loss(value: Tensor) -> Tensor:
            if rank:
                raise ArithmeticError("the reward model is gone")
            return value

        return Hooks(loss=loss)

    with pytest.raises(ranks.RankFailed) as caught:
        ranks.run(job, 2, kind, True, {"hooks": hooks}, seconds=30)
    assert "the reward model is gone" in caught.value.errors[1]
    assert "hung" not in str(caught.value)


@pytest.mark.parametrize("kind", ["fsdp", "ddp"])
def test_weights_changed_on_one_rank_stop_every_rank(kind: str) -> None:
    def hooks(rank: int) -> Hooks:
        def change(net: nn.Module) -> None:
            if rank == 1:
                next(p for p in net.parameters() if p.numel()).data.view(-1)[0] += 1

        return Hooks(before_flush=change)

    with pytest.raises(ranks.RankFailed) as caught:
        ranks.run(job, 2, kind, True, {"hooks": hooks})
    assert set(caught.value.errors) == {0, 1} and "LG604" in caught.value.errors[1]
    # Under DDP a rank goes through the update alone, and the others hear of it where they average.
    assert ("LG611" if kind == "ddp" else "LG604") in caught.value.errors[0]


def test_settings_that_differ_stop_every_rank() -> None:
    with pytest.raises(ranks.RankFailed) as caught:
        ranks.run(job, 2, "none", True, {"env": {"LEANGRPO_SCHEDULE": ["retain", "recompute"]}})
    for text in caught.value.errors.values():
        assert "LG602" in text and "rank 0: schedule=retain" in text and "rank 1: schedule=recompute" in text


@pytest.mark.parametrize("kind", ["fsdp", "fsdp2", "ddp", "none"])
def test_recompute_is_upstream(kind: str) -> None:
    for lean, native in both(kind, env={"LEANGRPO_SCHEDULE": "recompute"}):
        assert_same(lean.result, native.result)
        assert lean.result.calls == native.result.calls and lean.collectives == native.collectives


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("ddp-static", "static_graph"),
        ("ddp-hook", "communication hook"),
        ("ddp-alone", "a part of the ranks"),
        ("part", "only a part of the network (blocks.0) is wrapped"),
        ("engine", "DeepSpeed"),
    ],
)
def test_refused_wrappers_recompute(kind: str, reason: str) -> None:
    for lean, native in both(kind, config=ONE):
        assert_same(lean.result, native.result)
        assert lean.window["kept"] == 0 and any(reason in text for text in lean.window["reasons"])


def refusal(rank: int, world: int, kind: str) -> list[str]:
    net = wrap(kind, Policy())  # its forward needs an accelerator
    return [sync.classify(net, late).refusal for late in (False, True)]


def test_offloaded_weights_are_refused() -> None:
    for found in ranks.run(refusal, 2, "fsdp-offload"):
        assert all("offloaded to the CPU" in reason for reason in found)


def test_an_unknown_torch_in_low_precision_recomputes() -> None:
    for lean, native in both("fsdp-bf16", hooks=unknown_torch, config=ONE):
        assert_same(lean.result, native.result)
        reasons = " ".join(lean.window["reasons"])
        assert lean.window["kept"] == 0 and "FSDP has no _pre_backward_hook" in reasons
        assert "add up gradients in torch.bfloat16 otherwise" in reasons


def test_inputs_that_the_wrapper_casts_are_the_same() -> None:
    """DanceGRPO without autocast: its first latent is bf16 in the rollout, fp32 in the update, fp32 in the network."""

    def hooks(rank: int) -> Hooks:
        return Hooks(update_latents=lambda latents, row, step: latents.double())

    for lean, native in both("fsdp-cast", hooks=hooks, config=ONE):
        assert_same(lean.result, native.result)
        assert lean.window["replayed"] == 12


@pytest.mark.parametrize("kind", ["fsdp", "fsdp-bf16", "fsdp2"])
@pytest.mark.parametrize("how", ["without the runtime", "no budget"])
def test_lean_and_native_windows_in_turn(kind: str, how: str) -> None:
    """Ten rollouts on the same objects."""

    def hooks(rank: int) -> Hooks:
        windows = {"begun": 0}

        def count(net: nn.Module) -> None:
            windows["begun"] += 1

        if how == "no budget":
            memory.Sizes.fits = lambda self, budget_bytes: 0 if windows["begun"] % 2 else 100
        return Hooks(after_step=count, lean_in=lambda rollout: how == "no budget" or rollout % 2 == 0)

    sides = both(kind, hooks=hooks, config={"rollouts": 10, "rows": 2, "accumulate": 2, "trained": 2, "steps": 3})
    for lean, native in sides:
        assert_same(lean.result, native.result)
        replayed = [window["replayed"] for window in lean.windows]
        assert replayed == ([4, 0] * 5 if how == "no budget" else [4] * 5)


def resumed(rank: int, world: int, kind: str) -> dict[str, tuple[list[str], Result]]:
    """The second of two rollouts, after a checkpoint: saved and loaded by `n`(ative) or `l`(ean) trainers."""
    found, config = {}, Config(rank=rank, rollouts=1)
    for case in ("nn", "ln", "nl", "ll"):
        torch.manual_seed(0)
        net = wrap(kind, Policy())
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
        train(Lean() if case[0] == "l" else None, net, optimizer, config)
        weights, state = get_state_dict(net, optimizer)
        again = wrap(kind, Policy())
        other = torch.optim.AdamW(again.parameters(), lr=1e-3)
        set_state_dict(again, other, model_state_dict=weights, optim_state_dict=state)
        result = train(Lean() if case[1] == "l" else None, again, other, config)
        found[case] = (sorted(weights) + sorted(map(str, state["state"])), result)
    return found


@pytest.mark.parametrize("kind", ["fsdp-orig", "fsdp2"])
def test_checkpoints_are_upstreams(kind: str) -> None:
    """Those of a patched trainer have the same keys, and whoever goes on makes the same update."""
    for found in ranks.run(resumed, 2, kind):
        keys, expected = found["nn"]
        for names, result in found.values():
            assert names == keys
            assert_same(result, expected)


@pytest.mark.parametrize("kind", ["fsdp", "fsdp-grad-op", "fsdp2"])
def test_averaged_weights_and_clipping(kind: str) -> None:
    """Gradients far above the clip; an average of the weights after each step decides on the next rollout's steps."""

    def hooks(rank: int) -> Hooks:
        averages: list[Tensor] = []

        def average(net: nn.Module) -> None:
            weights = shares(net)
            averages[:] = averages or [weight.clone() for weight in weights]
            for mean, weight in zip(averages, weights, strict=True):
                mean.lerp_(weight, 0.1)
            bits = torch.cat([mean.flatten() for mean in averages]).view(torch.int32)
            torch.manual_seed(int(bits.long().sum()) % 2**31)

        return Hooks(after_step=average)

    for lean, native in both(kind, hooks=hooks, config={"clip": 1e-3, "rollouts": 3}):
        assert_same(lean.result, native.result)
        norms = [grad.norm() for grad in native.result.gradients[0].values() if grad is not None]
        assert torch.stack(norms).norm() > 1e-2
        assert [window["replayed"] for window in lean.windows] == [12] * 3


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


@pytest.mark.parametrize("kind", ["fsdp", "fsdp2", "ddp"])
def test_audit_on_two_ranks_with_a_budget(kind: str) -> None:
    """What every rank replayed is audited before the native calls, and with the audit's own forwards in step."""
    for lean, native in both(kind, hooks=room_for([5, 5]), env={"LEANGRPO_AUDIT": "first"}, config=ONE):
        assert_same(lean.result, native.result, close_to(kind))
        assert lean.window["replayed"] == 5 and lean.window["audit_rel_l2"] < 1e-6


@pytest.mark.parametrize("kind", ["fsdp", "fsdp-bf16", "late", "ddp"])
def test_audit_on_two_ranks(kind: str) -> None:
    late = kind == "late"
    env = {"LEANGRPO_AUDIT": "every:1"} | (LATE if late else {})
    for lean, native in both("fsdp" if late else kind, env=env):
        assert_same(lean.result, native.result, 1e-6 if late else close_to(kind))
        assert lean.window["audit_rel_l2"] < 1e-6


def audited_within_autocast(rank: int, world: int) -> Any:
    """A window that the budget ends: the audit runs at the first native call, within upstream's autocast region."""
    config = {"bf16": True, "tokens": 32, "rollouts": 1}
    env = {"LEANGRPO_AUDIT": "first", "LEANGRPO_BUDGET_GB": "0.0002"}
    return job(rank, world, "fsdp2", True, {"config": config, "env": env}).window


def test_the_audit_shares_no_cached_casts_between_calls() -> None:
    """Else gradients of several calls are added up in bf16, and the audit of a sound run fails."""
    (window,) = ranks.run(audited_within_autocast, 1)
    assert window["recomputed"] > 0 and window["audit_rel_l2"] == 0.0
