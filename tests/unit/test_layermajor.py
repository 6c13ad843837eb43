"""The layer-major flush of FSDP2: exact against one process, each unit gathered and reduced once, refusals, Lean."""

import gc
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from support import batched, ranks
from support.check import assert_same
from support.fsdp2 import FSDPModule, MixedPrecisionPolicy, fully_shard
from support.grpo import Config, Hooks, Policy, Result, train
from support.units import (
    NETS,
    Modulated,
    Net,
    Transformer,
    UNet,
    distance,
    gradients,
    groups_of,
    make,
    rows,
    shard,
    watching,
)
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from leangrpo_core import Lean, agree, memory, replay, sync
from leangrpo_core.cutting import Cuts, cutting
from leangrpo_core.errors import LeanError
from leangrpo_core.guard import local
from leangrpo_core.layermajor import walk_layer_major
from leangrpo_core.segments import Call

EXACT = 1e-12
MATRIX = pytest.mark.matrix
PLAIN = ("transformer", "unet", "containers", "alone")  # each unit runs once in a forward and calls no other


def hold(net: nn.Module, data: list[Any], again: bool = True) -> list[Any]:
    """Forwards to be walked later; with `again` a forward as an evaluation makes it comes after each."""
    held = []
    for x, t, v in data:
        with cutting(net) as cuts:
            out = net(x, t)
        assert not cuts.refusal, cuts.refusal
        held.append((cuts, [out], [v]))
        if again:
            with torch.no_grad():
                net(x, t)
    return held


def one_process(name: str, world: int, count: int = 3, checkpointing: bool = False) -> dict[str, Tensor | None]:
    net = make(name, checkpointing)
    for rank in range(world):
        for x, t, v in rows(rank, count):
            net(x, t).backward(v / world)
    return gradients(net)


def walked(rank: int, world: int, names: list[str], checkpointing: bool, count: int = 3) -> dict[str, Any]:
    found = {}
    for name in names:
        net = shard(make(name, checkpointing))
        held = hold(net, rows(rank, count))
        with watching(net) as watch:
            walk_layer_major(net, held)
        found[name] = gradients(net), watch
    return found


@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointing"])
def test_exact(checkpointing: bool) -> None:
    found = ranks.run(walked, 2, list(NETS), checkpointing)
    for name in NETS:
        reference = one_process(name, 2, checkpointing=checkpointing)
        for rank in found:
            assert distance(rank[name][0], reference) < EXACT, name
        watch = found[0][name][1]
        if name in PLAIN:
            units = len(NETS[name](False).units())
            # The network itself is gathered from its forward on, as natively.
            assert (watch.gathers, watch.reductions) == (units, units + 1), name
            assert watch.gathered == min(units + 1, 3), name  # itself, a unit and the one gathered ahead


def uneven(rank: int, world: int) -> Any:
    net = shard(make("transformer"))
    held = hold(net, rows(rank, 3))[: rank + 1]
    with watching(net) as watch:
        walk_layer_major(net, held)
    return gradients(net), watch


def test_ranks_may_hold_other_numbers_of_graphs() -> None:
    found = ranks.run(uneven, 2)
    net = make("transformer")
    for rank in range(2):
        for x, t, v in rows(rank, 3)[: rank + 1]:
            net(x, t).backward(v / 2)
    for grads, watch in found:
        assert distance(grads, gradients(net)) < EXACT
        assert (watch.gathers, watch.reductions) == (4, 5)


def later(rank: int, world: int) -> Any:
    net = shard(make("unet"))
    for a, b in zip(net.units()[:-1], net.units()[1:], strict=True):
        a.set_modules_to_backward_prefetch([b])  # type: ignore[attr-defined]
    for _ in range(2):
        held = []
        for x, t, v in rows(rank, 3):
            with cutting(net) as cuts:
                out = net(x, t)
            held.append((cuts, [(out * 2).tanh(), out], [v, v]))
        walk_layer_major(net, held)
        with pytest.raises(ValueError, match="walked before"):
            walk_layer_major(net, held[:1])
    assert all(g.reduce_grads and g.reshard_after_backward and g.is_sharded for g in groups_of(net))
    ahead = [len(u._get_fsdp_state()._states_to_backward_prefetch) for u in net.units()]  # type: ignore[attr-defined]
    assert ahead == [1] * (len(ahead) - 1) + [0]
    return gradients(net)


def test_code_around_the_network_and_two_flushes() -> None:
    """What the caller computes from the result is walked, too; gradients add up; FSDP2's settings are put back."""
    found = ranks.run(later, 2)
    net = make("unet")
    for rank in range(2):
        for x, t, v in rows(rank, 3):
            out = net(x, t)
            torch.autograd.backward([(out * 2).tanh(), out], [v, v])
    for grads in found:
        assert distance(grads, gradients(net)) < EXACT


def hybrid(rank: int, world: int, mesh: tuple[int, ...] | None, name: str, checkpointing: bool = True) -> list[Any]:
    net = shard(make(name, checkpointing), mesh)
    return three_windows(net, [(rank, 1.0)], native={1})


def three_windows(net: Net, parts: list[tuple[int, float]], native: set[int]) -> list[Any]:
    optimizer, found = torch.optim.AdamW(net.parameters(), lr=1e-2), []
    for window in range(3):
        held = []
        for rank, weight in parts:
            data = [(x, t, v * weight) for x, t, v in rows(10 * window + rank, 2)]
            if window in native:
                for x, t, v in data:
                    net(x, t).backward(v)
            else:
                held += hold(net, data)
        if held:
            walk_layer_major(net, held)
        found.append(gradients(net))
        optimizer.step()
        optimizer.zero_grad()
    return found


def assert_three_windows(found: list[Any], name: str, world: int, checkpointing: bool = True) -> None:
    native = three_windows(make(name, checkpointing), [(rank, 1 / world) for rank in range(world)], {0, 1, 2})
    for rank in found:
        assert all(distance(a, b) < EXACT for a, b in zip(rank, native, strict=True))


def test_sharded_in_pairs_and_replicated() -> None:
    """Four ranks, three windows, the second one native."""
    assert_three_windows(ranks.run(hybrid, 4, (2, 2), "unet"), "unet", 4)


LOW = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def low(rank: int, world: int, names: list[str], layer_major: bool) -> dict[str, Any]:
    found = {}
    for name in names:
        net = shard(make(name, dtype=torch.float32), mp_policy=LOW)
        data = rows(rank, 8, torch.float32)
        if layer_major:
            walk_layer_major(net, hold(net, data))
        else:
            for x, t, v in data:
                net(x, t).backward(v)
        found[name] = gradients(net)
    return found


def test_low_precision_as_close_as_native() -> None:
    """Gradients in bf16, reduced in fp32: added up in fp32, not in bf16."""
    names = ["transformer", "unet"]
    native, ours = ranks.run(low, 2, names, False), ranks.run(low, 2, names, True)
    for name in names:
        truth = one_process(name, 2, 8)
        assert distance(ours[0][name], truth) < 1.05 * distance(native[0][name], truth)
        assert distance(ours[0][name], native[0][name]) < 2e-3


class Leaky(UNet):
    """Reaches round the cuts, in one way or another."""

    kind = ""

    def body(self, h: Tensor, c: Tensor) -> Tensor:
        mid, first = self.mid, self.down[0]
        if self.kind == "attribute":
            mid.c = c  # type: ignore[assignment]
            mid.forward = lambda x: torch.tanh(mid.w(x)) + mid.c  # type: ignore[operator]
        if self.kind == "closure":  # what the first unit was given, which is a cut in its own graph
            inner, given = first.forward, []
            first.forward = lambda x: given.append(x) or inner(x)
            mid.forward = lambda x: x + given.pop()
        if self.kind == "weight":
            mid.forward = lambda x: torch.nn.functional.linear(x, first.w.weight)  # type: ignore[union-attr]
        if self.kind == "writes":
            mid.forward = lambda x: x.mul_(2)
        if self.kind == "container":
            box = type("Box", (), {"x": h})()
            mid.forward = lambda x, box: torch.tanh(mid.w(x)) + box.x  # type: ignore[assignment]
            return mid(first(h), box)
        if self.kind == "reentrant":
            return checkpoint(lambda h: mid(first(h)), h, use_reentrant=True)  # type: ignore[return-value]
        return super().body(h, c)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("attribute", "uses a weight, or a tensor computed from it, of Leaky"),
        ("weight", "uses a weight, or a tensor computed from it, of Lin"),
        ("closure", "uses a tensor of another unit"),
        ("writes", "writes into its arguments"),
        ("container", "uses a weight, or a tensor computed from it, of Leaky"),
        ("reentrant", "reentrant activation checkpointing"),
        ("argument", "a gradient must flow into the network's arguments"),
        ("twice", "ran more than once"),
        ("never", "no forward under grad"),
    ],
)
def test_refused_graphs(kind: str, reason: str) -> None:
    torch.manual_seed(0)
    net = Leaky().double()
    net.kind = kind
    x, t, v = rows(0, 1)[0]
    x.requires_grad_(kind == "argument")
    hooks = hooks_of(net)
    with cutting(net, [net, *net.units()]) as cuts:
        out = x
        for _ in range({"twice": 2, "never": 0}.get(kind, 1)):
            out = net(x, t)
    assert reason in cuts.refusal
    assert hooks_of(net) == hooks
    if kind != "never":
        with pytest.raises(ValueError, match=cuts.refusal[:10]):
            walk_layer_major(net, [(cuts, [out], [v])])


def test_a_graph_that_is_never_walked_is_freed() -> None:
    for name in NETS:
        net = make(name)
        x, t, _ = rows(0, 1)[0]
        with cutting(net, [net, *net.units()]) as cuts:
            out = net(x, t)
        del cuts, out
        gc.collect()
        assert not any(type(item) in (Cuts, Call) for item in gc.get_objects()), name


def hooks_of(net: nn.Module) -> list[list[Any]]:
    return [[*m._forward_pre_hooks, *m._forward_hooks, *m._forward_pre_hooks_with_kwargs] for m in net.modules()]


def classified(rank: int, world: int) -> dict[str, sync.Wrapper]:
    def sharded(**options: Any) -> Net:
        return shard(make("unet", dtype=options.pop("dtype", torch.float32)), **options)

    found = {"late": sync.classify(sharded(), late=True), "upstream": sync.classify(sharded())}
    found["computes low"] = sync.classify(sharded(mp_policy=LOW), late=True)
    for name, policy in {
        "reduces low": MixedPrecisionPolicy(reduce_dtype=torch.bfloat16),
        "computes and reduces low": MixedPrecisionPolicy(param_dtype=torch.bfloat16),
    }.items():
        found[name] = sync.classify(sharded(mp_policy=policy), late=True)
    found["stores low"] = sync.classify(sharded(dtype=torch.bfloat16), late=True)
    parts = make("unet")
    for unit in parts.units():
        fully_shard(unit)
    found["parts"] = sync.classify(parts, late=True)
    grouped = make("unet")
    fully_shard(grouped.units()[:2])
    fully_shard(grouped)
    found["grouped"] = sync.classify(grouped, late=True)
    compiled = sharded()
    compiled.units()[0].compile(backend="eager")
    found["compiled"] = sync.classify(compiled, late=True)
    network = sharded()
    for name in ("set_is_last_backward", "_get_fsdp_state"):
        method = getattr(FSDPModule, name)
        delattr(FSDPModule, name)  # in this forked process only
        found[name] = sync.classify(network, late=True)
        setattr(FSDPModule, name, method)
    return found


def test_what_is_not_known_to_be_exact_is_walked_in_order() -> None:
    for found in ranks.run(classified, 2):
        for name in ("late", "computes low"):
            assert (found[name].flush, found[name].notice) == ("layer-major", ""), name
        assert (found["upstream"].flush, found["upstream"].notice) == ("in order", "")
        for name, reason in {
            "reduces low": "bfloat16", "computes and reduces low": "bfloat16", "stores low": "bfloat16",
            "parts": "only parts", "grouped": "as one unit", "compiled": "compiled",
            "set_is_last_backward": "has no set_is_last_backward", "_get_fsdp_state": "does not say",
        }.items():  # fmt: skip
            assert found[name].flush == "in order" and reason in found[name].notice, (name, found[name])


# -- through the runtime --------------------------------------------------------------------------------------------


def job(rank: int, world: int, lean: bool, options: dict[str, Any]) -> tuple[Result, list[dict[str, Any]], Any]:
    """One rank of a training run in float64; returns its updates, its windows and what FSDP2 did."""
    os.environ["LEANGRPO_SYNC"] = "late"
    os.environ.update(options.get("env", {}))
    torch.set_default_dtype(torch.float64)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["LEANGRPO_REPORT_DIR"] = folder
        torch.manual_seed(0)
        runtime = Lean() if lean else None
        net: Any = batched.Network() if options.get("batched") else Policy(options.get("checkpointing", False))
        for block in net.blocks:
            fully_shard(block)
        fully_shard(net)
        if "prepare" in options:
            options["prepare"](net, rank)
        hooks = options["hooks"](rank) if "hooks" in options else None
        with watching(net) as watch:
            if options.get("batched"):
                result = batched.train(runtime, net, batched.Config(rank=rank, **options["batched"]))
            else:
                optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
                result = train(runtime, net, optimizer, Config(rank=rank, **options.get("config", {})), hooks)
        for update in result.gradients:
            update |= {name: None if grad is None else local(grad) for name, grad in update.items()}
        result.weights = [{name: local(weight) for name, weight in update.items()} for update in result.weights]
        assert not any(module._forward_pre_hooks_with_kwargs for module in net.blocks[0].children())
        gc.collect()
        assert not any(type(item) in (Cuts, Call) for item in gc.get_objects()), "a graph is held"
        lines = Path(folder, f"rank{rank}.jsonl")
        windows = [json.loads(line) for line in lines.read_text().splitlines()] if lines.exists() else []
    return result, windows, watch


def both(world: int = 2, rtol: float = EXACT, seconds: float = 60, **options: Any) -> list[Any]:
    """Trains with the runtime and natively, compares, returns each rank's (result, windows, watch) of both."""
    lean, native = (ranks.run(job, world, lean, options, seconds=seconds) for lean in (True, False))
    for ours, theirs in zip(lean, native, strict=True):
        assert_same(ours[0], theirs[0], rtol)
    return list(zip(lean, native, strict=True))


def middle_window_native(rank: int) -> Hooks:
    rollouts = []
    fits = memory.Sizes.fits
    memory.Sizes.fits = lambda self, budget_bytes: (
        0 if len(rollouts) == 1 else fits(self, budget_bytes)
    )  # in this process only
    return Hooks(after_rollout=rollouts.append)


@pytest.mark.parametrize("checkpointing", [False, pytest.param(True, marks=MATRIX)], ids=["plain", "checkpointing"])
def test_three_windows(checkpointing: bool) -> None:
    """The second one native; the second update of each rollout, too."""
    config = {"accumulate": 2, "rollouts": 3}
    for (_, windows, watch), (_, _, native) in both(
        checkpointing=checkpointing, config=config, hooks=middle_window_native, env={"LEANGRPO_AUDIT": "off"}
    ):
        assert [(w["kept"], w["replayed"], w["recomputed"]) for w in windows] == [(6, 6, 0), (0, 0, 6), (6, 6, 0)]
        assert windows[0]["flush"] == windows[2]["flush"] == "layer-major"
        assert native.reductions == 4 * 36  # three blocks and the network itself, six steps in each of six updates
        assert watch.reductions == 4 * 6  # once per update, replayed or not
        assert watch.gathered <= native.gathered


def few(budgets: list[int]) -> Any:
    def hooks(rank: int) -> Hooks:
        memory.Sizes.fits = lambda self, budget_bytes: budgets[rank]  # in this forked process only
        return Hooks()

    return hooks


@pytest.mark.parametrize("budgets", [pytest.param([0, 6], marks=MATRIX), [7, 3]])
def test_budgets_that_differ_between_ranks(budgets: list[int]) -> None:
    """What no rank holds is native, after the kept ones were walked; both are audited."""
    for (_, windows, _), _ in both(hooks=few(budgets), config={"rollouts": 1}, env={"LEANGRPO_AUDIT": "every:1"}):
        assert windows[0]["replayed"] == min(budgets) and windows[0]["recomputed"] == 12 - min(budgets)
        assert not min(budgets) or windows[0]["audit_rel_l2"] < EXACT


def other_inputs(ranks: set[int], rows: set[int]) -> Any:
    def change(x: Tensor, row: int, step: int) -> Tensor:
        return x + 0.01 if row in rows else x

    return lambda rank: Hooks(update_latents=change) if rank in ranks else Hooks()


def test_other_inputs_on_one_rank() -> None:
    """Native calls beside held graphs, which are walked before and after them."""
    (first, _), (second, _) = both(hooks=other_inputs({1}, {1}), config={"rollouts": 1})
    for window in (*first[1], *second[1]):
        assert (window["replayed"], window["recomputed"]) == (9, 3)
    assert first[1][0]["reasons"]["another rank recomputes"] == 3


@pytest.mark.matrix
def test_windows_dropped_without_a_walk() -> None:
    for (_, windows, _), _ in both(hooks=other_inputs({0, 1}, {0, 1, 2, 3}), config={"rollouts": 1}):
        assert (windows[0]["kept"], windows[0]["replayed"], windows[0]["recomputed"]) == (12, 0, 12)


def reaches_into_another_unit(net: Policy, rank: int) -> None:
    """The last block uses, for nothing, what the first one was given; on one rank only."""
    first, last = net.blocks[0].forward, net.blocks[2].forward
    given: list[Tensor] = []

    def keep(x: Tensor) -> Tensor:
        given[:] = [x]
        return first(x)

    if rank == 1:
        net.blocks[0].forward = keep
        net.blocks[2].forward = lambda x: last(x) + 0 * given.pop()


def test_a_refused_call_on_one_rank() -> None:
    (first, _), (second, _) = both(prepare=reaches_into_another_unit, config={"rollouts": 1})
    (reason,) = second[1][0]["reasons"]
    assert reason.startswith("Block uses a tensor of another unit")
    for _, windows, _ in (first, second):
        assert (windows[0]["replayed"], windows[0]["recomputed"]) == (0, 12)


class Deep(Transformer):
    def build(self) -> None:
        self.blocks = nn.ModuleList(Modulated() for _ in range(12))


def peaks(rank: int, world: int, low: bool) -> dict[str, Any]:
    """What FSDP2 holds at its most in a native run, graph by graph and layer by layer; and the formula's figure."""
    found: dict[str, Any] = {}
    data = rows(rank, 8, torch.float32)
    for mode in ("native", "in order", "layer-major"):
        net = shard(Deep().float(), mp_policy=LOW if low else MixedPrecisionPolicy())
        held = hold(net, data) if mode == "layer-major" else [net(x, t) for x, t, _ in data if mode != "native"]
        with watching(net) as watch:
            if mode == "layer-major":
                walk_layer_major(net, held)
            for place, (x, t, v) in enumerate(data if mode != "layer-major" else []):
                (net(x, t) if mode == "native" else held[place]).backward(v)
        found[mode] = watch
    plain = Deep()
    unit = sum(p.numel() for p in plain.blocks[0].parameters())
    root = sum(p.numel() for p in plain.parameters()) - 12 * unit
    computed = 2 if low else 4
    # The network itself and two units gathered; its gradient and a unit's until they are reduced, and, where those have
    # another precision, the one of the graph that is being walked.
    found["formula"] = computed * (root + 2 * unit) + 4 * root + 4 * unit + (computed * unit if low else 0)
    return found


@pytest.mark.matrix
@pytest.mark.parametrize("low", [False, True], ids=["fp32", "bf16"])
def test_peak_of_gathered_weights_and_gradients(low: bool, capsys: pytest.CaptureFixture[str]) -> None:
    found = ranks.run(peaks, 2, low)[0]
    with capsys.disabled():
        for mode in ("native", "in order", "layer-major"):
            w = found[mode]
            print(f"\n{mode}: peak {w.peak} B, {w.gathers} gathers, {w.reductions} reductions", end="")
        print(f"; formula for layer-major {found['formula']} B")
    watch = found["layer-major"]
    assert (watch.gathers, watch.reductions, watch.gathered) == (12, 13, 3)
    assert watch.peak <= 1.02 * found["formula"]


@pytest.mark.matrix
@pytest.mark.parametrize("mesh", [None, (2, 2)], ids=["flat", "hybrid"])
@pytest.mark.parametrize("name", sorted(NETS.keys() - {"skipping"}))  # which counts the forwards of its process
def test_four_ranks(name: str, mesh: Any) -> None:
    assert_three_windows(ranks.run(hybrid, 4, mesh, name, seconds=120), name, 4)


@pytest.mark.matrix
def test_batches_in_random_order() -> None:
    """Rows of one update come from other numbers of kept calls on each rank."""
    for (_, windows, _), _ in both(batched={"accumulate": 1}, env={"LEANGRPO_AUDIT": "every:1"}):
        for window in windows:
            assert window["replayed"] == window["selected"] and window["flush"] == "layer-major"
            assert window["audit_rel_l2"] < EXACT


@pytest.mark.parametrize("late", [False, True])
def test_several_rows_in_one_call_need_the_late_flush(late: bool) -> None:
    """Graph by graph, ranks would make other numbers of backward passes."""
    for (_, windows, _), _ in both(
        seconds=20 + 40 * late,
        batched={"train_batch": 2, "accumulate": 2, "trained": 2, "rollouts": 1 + late},
        env={"LEANGRPO_SYNC": "late" if late else "upstream", "LEANGRPO_AUDIT": "every:1"},
    ):
        assert windows[0]["replayed"] == (windows[0]["selected"] if late else 0)
        for window in windows if late else []:
            assert window["flush"] == "layer-major" and window["audit_rel_l2"] < EXACT


@pytest.mark.parametrize(("counts", "raises"), [([0, 0], False), ([2, 1], False), ([0, 1], True), ([1, 0], True)])
def test_a_rank_without_a_graph_stops_every_rank(
    counts: list[int], raises: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = counts[1]
    sign = iter([1, -1])
    monkeypatch.setattr(agree, "minimum", lambda value: min(value, next(sign) * other))
    calls: list[Any] = [None] * counts[0]
    if raises:
        with pytest.raises(LeanError, match="LG610"):
            replay._some_everywhere(calls)
    else:
        replay._some_everywhere(calls)
