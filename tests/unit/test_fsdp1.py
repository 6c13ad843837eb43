"""Held graphs under FSDP1, walked one by one: exact, as many collectives as natively, no leak. More in tests/matrix."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import ranks
from support.held import F64, Case, assert_bitwise, assert_exact, backward, build, samples, wrap
from support.held_more import figures, held_while_pending, objects, odd
from torch import nn
from torch.distributed.fsdp import CPUOffload

from leangrpo_core import fsdp1
from leangrpo_core.seen import Seen, see

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize(("strategy", "orig"), [("FULL_SHARD", True), ("FULL_SHARD", False), ("NO_SHARD", True)])
def test_float64(strategy: str, orig: bool) -> None:
    assert_exact(Case(strategy, orig, F64, order=[2, 0, 3, 1]))


@pytest.mark.parametrize(("strategy", "orig"), [("FULL_SHARD", True), ("SHARD_GRAD_OP", True), ("NO_SHARD", False)])
def test_float32(strategy: str, orig: bool) -> None:
    assert_bitwise(Case(strategy, orig, windows=2))


@pytest.mark.parametrize(("orig", "checkpoint"), [(True, ""), (True, "inside"), (False, "inside-reentrant")])
def test_mixed_precision(orig: bool, checkpoint: str) -> None:
    assert_bitwise(Case("FULL_SHARD", orig, precision="bf16", checkpoint=checkpoint, order=[3, 1, 0, 2], windows=2))


@pytest.mark.parametrize(
    ("strategy", "orig", "frozen"),
    [("NO_SHARD", True, "lora"), ("FULL_SHARD", False, "block"), ("FULL_SHARD", True, "first")],
)
def test_frozen(strategy: str, orig: bool, frozen: str) -> None:
    assert_bitwise(Case(strategy, orig, F64, frozen=frozen))


@pytest.mark.parametrize(
    ("mixed", "strategy", "orig", "checkpoint"),
    [
        ("native while held", "FULL_SHARD", True, ""),
        ("pending", "FULL_SHARD", True, ""),
        ("pending", "SHARD_GRAD_OP", False, "inside"),
    ],
)
def test_native_passes_among_held_graphs(mixed: str, strategy: str, orig: bool, checkpoint: str) -> None:
    """A whole native pass while graphs are held; and a native forward, then walks, then its backward."""
    assert_exact(Case(strategy, orig, F64, mixed=mixed, checkpoint=checkpoint))


def test_two_in_one_backward() -> None:
    """While others are held, and with native passes in between."""
    assert_exact(Case("FULL_SHARD", False, F64, frozen="block", together=2, mixed="native while held"))


@pytest.mark.parametrize(("kind", "between", "orig"), [("unused", "", True), ("plain", "evaluation", False)])
def test_odd(kind: str, between: str, orig: bool) -> None:
    assert max(ranks.run(odd, 2, Case("FULL_SHARD", orig, F64), kind, between)) < 1e-12


def test_collectives_and_units() -> None:
    case = Case("FULL_SHARD")
    native, armed = (ranks.run(figures, 2, case, schedule)[0] for schedule in ("native", "armed"))
    units, graphs, kept_root = 4, case.graphs, 1
    assert armed[0] == native[0]
    assert armed[1]["scatter"] == native[1]["scatter"] == units * graphs
    # Natively a forward and a backward each; the root stays gathered in between. Ours: the backward.
    assert native[1]["gather"] == (2 * units - 1) * graphs - kept_root
    assert armed[1]["gather"] == units * graphs - kept_root
    assert (armed[1]["units"], armed[1]["full"]) == (native[1]["units"], native[1]["full"])


def test_what_needs_no_gradient_is_not_gathered() -> None:
    """The first block and all before it are frozen: each walk gathers the root and two blocks."""
    case = Case("FULL_SHARD", frozen="first")
    armed = ranks.run(figures, 2, case, "armed")[0][1]
    assert (armed["gather"], armed["scatter"]) == (3 * case.graphs - 1, 2 * case.graphs)


def orders(rank: int, world: int, case: Case) -> list[tuple[int, list[Any]]]:
    warnings.simplefilter("ignore")
    net, found = wrap(case, build(case)), []
    for x, t, _, _ in samples(case, rank, 0):
        with torch.no_grad():
            net(x, t)
        with fsdp1.holding(net) as held:
            net(x, t)
        found.append((len(held.order), sorted(unit.index for unit in held.units if unit.index is not None)))
    return found


def test_each_graph_has_its_own_order() -> None:
    assert ranks.run(orders, 2, Case())[0] == [(4, [0, 1, 2, 3])] * 4


def test_held_while_a_native_forward_is_pending() -> None:
    assert max(ranks.run(held_while_pending, 2, Case(dtype=F64))) < 1e-12


@pytest.mark.parametrize(("orig", "precision"), [(True, ""), (False, "bf16")])
def test_nothing_piles_up(orig: bool, precision: str) -> None:
    counts = ranks.run(objects, 2, Case("FULL_SHARD", orig, precision=precision))[0]
    assert len({*counts[1:3], *counts[4:]}) == 1, counts


def seen_as(rank: int, world: int, cases: list[Case]) -> list[list[bool]]:
    """Before, within, and after a native pass, and after a step: whether the weights are seen as they were before."""
    warnings.simplefilter("ignore")
    found = []
    for case in cases:
        net = wrap(case, build(case))
        x, t, a, b = samples(case, rank, 0)[0]
        optimizer, first = torch.optim.SGD(net.parameters(), lr=0.1), see(net)
        same = []

        def look(net: nn.Module = net, first: Seen = first, same: list[bool] = same) -> None:
            same.append(see(net) == first)

        look()
        result = net(x, t)
        look()
        backward(result, a, b)
        look()
        optimizer.step()
        look()
        found.append(same)
    return found


@pytest.mark.parametrize("world", [1, 2])
def test_weights_are_the_same_ones_within_a_native_pass(world: int) -> None:
    """A graph is compared with the weights when it is used, which may be between a native forward and its backward."""
    cases = [
        Case(strategy, orig, precision=precision)
        for strategy in ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD")
        for orig in (True, False)
        for precision in ("", "bf16")
    ]
    for found in ranks.run(seen_as, world, cases):
        assert found == [[True, True, True, False]] * len(cases)


def misuse(rank: int, world: int, case: Case) -> list[str]:
    warnings.simplefilter("ignore")
    net, texts = wrap(case, build(case)), []
    x, t, a, b = samples(case, rank, 0)[0]

    def walk(act: Callable[[], None], held: fsdp1.Held) -> None:
        try:
            with fsdp1.walking(net, held):
                act()
        except RuntimeError as error:
            texts.append(str(error))

    with fsdp1.holding(net) as held:
        walk(lambda: None, held)
        result = net(x, t)
    walk(lambda: None, held)
    walk(lambda: backward(result, a, b), held)

    def hold(*_: Any) -> None:
        with fsdp1.holding(net):
            pass

    net.module.get_submodule("blocks.0").register_forward_pre_hook(hold)
    try:
        net(x, t)
    except RuntimeError as error:
        texts.append(str(error).split("FORWARD, ")[-1])
    return texts


def test_misuse_is_named() -> None:
    for texts in ranks.run(misuse, 2, Case()):
        assert [text.split(",")[0] for text in texts] == [
            "a held forward can be walked once",
            "FSDP did not end the backward of a held forward",
            "a held forward can be walked once",
            "not between a forward and a backward",
        ]


def reasons(rank: int, world: int) -> dict[str, str]:
    warnings.simplefilter("ignore")
    net = wrap(Case(), build(Case()))
    found = {"before": fsdp1.supports(net), "bare": fsdp1.supports(nn.Linear(2, 2))}
    net(*samples(Case(), rank, 0)[0][:2])
    found["after"] = fsdp1.supports(net)
    found["part"] = fsdp1.supports(net.module.get_submodule("blocks.0"))
    offloaded = Case(extra={"cpu_offload": CPUOffload(offload_params=True)})
    found["offload"] = fsdp1.supports(wrap(offloaded, build(offloaded)))
    extended = wrap(Case(), build(Case()))
    extended._fsdp_extension = object()  # type: ignore[assignment]
    found["tensor parallel"] = fsdp1.supports(extended)
    inside = wrap(Case(), build(Case()))
    next(inside.parameters())._in_backward_optimizers = []  # type: ignore[attr-defined]
    found["optimizer inside"] = fsdp1.supports(inside)
    lacking = wrap(Case(), build(Case()))
    delattr(lacking._handle, "_needs_pre_backward_unshard")
    found["lacking"] = fsdp1.supports(lacking)
    return found


def test_reasons() -> None:
    for found in ranks.run(reasons, 2):
        assert found.pop("before") == found.pop("after") == ""
        assert found.pop("bare") == "not wrapped in FSDP"
        assert found.pop("part") == "a part of a larger FSDP network"
        assert "offloaded" in found.pop("offload")
        assert "tensor parallelism" in found.pop("tensor parallel")
        assert "optimizer steps" in found.pop("optimizer inside")
        assert "_needs_pre_backward_unshard" in found.pop("lacking")
        assert not found


def test_another_torch_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert fsdp1.available() == ""
    with monkeypatch.context() as patch:
        patch.setattr(fsdp1._runtime_utils, "_finalize_params", lambda state: None)
        assert "_finalize_params does not know _post_backward_hook_state" in fsdp1.available()
    with monkeypatch.context() as patch:
        patch.delattr(fsdp1._runtime_utils, "_post_backward_hook")
        assert "no _post_backward_hook" in fsdp1.available()
    with monkeypatch.context() as patch:
        patch.delitem(fsdp1._flat_param.FlatParameter.__annotations__, "_tensors")
        assert "_tensors" in fsdp1.available()
    with monkeypatch.context() as patch:
        patch.setattr(fsdp1, "_flat_param", None)
        assert fsdp1.supports(nn.Linear(2, 2)) == fsdp1.available() != ""
