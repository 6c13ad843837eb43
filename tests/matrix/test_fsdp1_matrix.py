"""Held graphs under FSDP1 in every combination that matters; tests/unit/test_fsdp1.py has a part of them."""

from dataclasses import replace
from typing import Any

import pytest
import torch.distributed as dist
from support import ranks
from support.held import (
    F64,
    Case,
    assert_bitwise,
    assert_exact,
    distance,
    quiet,
    reference,
    train,
)
from support.held_more import figures, held_while_pending, objects, odd

STRATEGIES = ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"]
CHECKPOINTS = ["", "inside", "inside-reentrant", "outside", "outside-reentrant"]

pytestmark = [pytest.mark.matrix, pytest.mark.filterwarnings("ignore")]
orig = pytest.mark.parametrize("orig", [True, False], ids=["orig", "flat"])
strategy = pytest.mark.parametrize("strategy", STRATEGIES)


@strategy
@orig
@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_float64(strategy: str, orig: bool, checkpoint: str) -> None:
    assert_exact(Case(strategy, orig, F64, checkpoint=checkpoint, order=[2, 0, 3, 1]))


@strategy
@orig
def test_float32(strategy: str, orig: bool) -> None:
    assert_exact(Case(strategy, orig), limit=1e-6)
    assert_bitwise(Case(strategy, orig))


@strategy
@orig
@pytest.mark.parametrize("precision", ["bf16", "bf16-fp32", "bf16-keep", "reduce-bf16"])
@pytest.mark.parametrize("checkpoint", ["", "inside", "inside-reentrant"])
def test_mixed_precision(strategy: str, orig: bool, precision: str, checkpoint: str) -> None:
    assert_bitwise(Case(strategy, orig, precision=precision, checkpoint=checkpoint, order=[3, 1, 0, 2]))


@strategy
@pytest.mark.parametrize(("orig", "frozen"), [(True, "lora"), (True, "block"), (False, "block"), (True, "first")])
@pytest.mark.parametrize("checkpoint", ["", "inside"])
def test_frozen(strategy: str, orig: bool, frozen: str, checkpoint: str) -> None:
    case = Case(strategy, orig, F64, frozen=frozen, checkpoint=checkpoint)
    assert_exact(case)
    assert_bitwise(case)


@pytest.mark.parametrize("strategy", STRATEGIES[:2])
@orig
@pytest.mark.parametrize(
    ("prefetch", "forward", "limit"), [("POST", False, True), ("", True, False), ("PRE", True, True)]
)
def test_prefetch(strategy: str, orig: bool, prefetch: str, forward: bool, limit: bool) -> None:
    assert_bitwise(Case(strategy, orig, prefetch=prefetch, forward_prefetch=forward, limit=limit))


@pytest.mark.parametrize("strategy", [*STRATEGIES, "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"])
@orig
def test_four_ranks(strategy: str, orig: bool) -> None:
    assert_exact(Case(strategy, orig, F64), 4)
    if "HYBRID" in strategy:
        assert_bitwise(Case(strategy, orig, precision="bf16"), 4)


@strategy
@orig
def test_a_rank_with_zero_cotangents(strategy: str, orig: bool) -> None:
    assert_exact(Case(strategy, orig, F64, zero=True))


@strategy
@orig
@pytest.mark.parametrize(
    ("checkpoint", "frozen"),
    [
        ("", ""),
        ("inside", ""),
        ("outside", ""),
        ("outside-reentrant", ""),
        ("", "block"),
        ("inside", "first"),
        ("", "lora"),
    ],
)
def test_two_in_one_backward(strategy: str, orig: bool, checkpoint: str, frozen: str) -> None:
    """While others stay held, and with native passes in between; unsynchronised ones before, too."""
    if frozen == "lora" and not orig:
        pytest.skip("frozen and trained weights in one unit need use_orig_params")
    case = Case(strategy, orig, F64, checkpoint=checkpoint, frozen=frozen, order=[2, 0, 3, 1], together=2)
    assert_exact(case)
    if not checkpoint:
        assert_exact(replace(case, mixed="native while held"))
        assert_exact(replace(case, mixed="pending", no_sync=True))


@strategy
@orig
@pytest.mark.parametrize("precision", ["", "bf16"])
def test_no_sync(strategy: str, orig: bool, precision: str) -> None:
    """Walks within no_sync keep local gradients, whole, as natively; the next backward outside reduces all."""
    assert_bitwise(Case(strategy, orig, no_sync=True, windows=2, precision=precision))


@strategy
@orig
@pytest.mark.parametrize("mixed", ["native while held", "pending"])
@pytest.mark.parametrize("checkpoint", ["", "inside"])
def test_native_passes_among_held_graphs(strategy: str, orig: bool, mixed: str, checkpoint: str) -> None:
    """A whole native pass while graphs are held; and a native forward, then walks, then its backward."""
    assert_exact(Case(strategy, orig, F64, mixed=mixed, checkpoint=checkpoint))


@strategy
def test_the_control(strategy: str) -> None:
    """Without this module the same training fails, or is wrong and says nothing."""
    case = Case(strategy, False, F64, native_window=None, windows=1)
    expected = reference(case, 2)
    try:
        (result,) = ranks.run(quiet, 2, case, ("naive",))[0]
    except ranks.RankFailed:
        assert strategy != "NO_SHARD"
    else:
        assert distance(result["grads_full"][0], expected[0]) > 0.1


@strategy
@orig
@pytest.mark.parametrize("kind", ["plain", "twice", "unused", "tied"])
def test_odd_networks(strategy: str, orig: bool, kind: str) -> None:
    if (strategy, orig, kind) == ("NO_SHARD", True, "tied"):
        pytest.skip("FSDP itself loses the gradient of tied weights here")
    assert max(ranks.run(odd, 2, Case(strategy, orig, F64), kind, "")) < 1e-12


@strategy
@orig
@pytest.mark.parametrize("between", ["evaluation", "checkpoint", "summon"])
def test_what_else_happens_between(strategy: str, orig: bool, between: str) -> None:
    assert max(ranks.run(odd, 2, Case(strategy, orig, F64), "plain", between)) < 1e-12


@orig
@pytest.mark.parametrize("prefetch", ["PRE", "POST", ""])
def test_collectives_and_units(orig: bool, prefetch: str) -> None:
    case = Case("FULL_SHARD", orig, prefetch=prefetch)
    native, armed = (ranks.run(figures, 2, case, schedule)[0] for schedule in ("native", "armed"))
    units, graphs, kept_root = 4, case.graphs, 1
    assert armed[0] == native[0]
    assert armed[1]["scatter"] == native[1]["scatter"] == units * graphs
    # Natively a forward and a backward each; the root stays gathered in between. Ours: the backward.
    assert native[1]["gather"] == (2 * units - 1) * graphs - kept_root
    assert armed[1]["gather"] == units * graphs - kept_root
    assert (armed[1]["units"], armed[1]["full"]) == (native[1]["units"], native[1]["full"])


@strategy
@orig
def test_held_while_a_native_forward_is_pending(strategy: str, orig: bool) -> None:
    assert max(ranks.run(held_while_pending, 2, Case(strategy, orig, F64))) < 1e-12


@strategy
@orig
@pytest.mark.parametrize("precision", ["", "bf16"])
def test_nothing_piles_up(strategy: str, orig: bool, precision: str) -> None:
    counts = ranks.run(objects, 2, Case(strategy, orig, precision=precision))[0]
    assert len({*counts[1:3], *counts[4:]}) == 1, counts  # natively (the fourth) NO_SHARD keeps views of the last graph


def detailed(rank: int, world: int, case: Case) -> dict[str, Any]:
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    return train(rank, world, case, "armed")


def test_with_fsdp_checking_the_order_of_forwards() -> None:
    case = Case(dtype=F64)
    for result in ranks.run(detailed, 2, case):
        for ours, theirs in zip(result["grads_full"], reference(case, 2), strict=True):
            assert distance(ours, theirs) < 1e-12
