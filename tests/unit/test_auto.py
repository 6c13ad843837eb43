"""`LEANGRPO_SCHEDULE=auto` in training: native first, then as chosen, on all ranks alike, never beyond the budget."""

import os
import weakref
from typing import Any

import pytest
import torch
from support import epoch, steered
from support.batched import Network
from support.check import assert_same
from support.epoch import first_batches_first
from support.grpo import Config, Hooks, Policy, Result, train
from support.wrapped import both

from leangrpo_core import Lean, LeanError
from leangrpo_core.auto import Auto, probing
from leangrpo_core.auto.watch import ENOUGH
from leangrpo_core.window import Window

AUTO = {"LEANGRPO_SCHEDULE": "auto"}
ROWS = 12  # steps of a window that can be kept


def wide(kind: str) -> Any:
    """A wrapper that is left to `-m matrix`: others stand for it."""
    return pytest.param(kind, marks=pytest.mark.matrix)


@pytest.fixture(autouse=True)
def _auto(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LEANGRPO_SCHEDULE", "auto")


def run(lean: Lean | None, rollouts: int = 4, hooks: Hooks | None = None, **config: Any) -> Result:
    torch.manual_seed(0)
    net = Policy()
    return train(lean, net, torch.optim.AdamW(net.parameters(), lr=1e-3), Config(rollouts=rollouts, **config), hooks)


def spy(calls: list[dict[str, int]]) -> Hooks:
    """Notes how many forwards were made when each update is over."""
    return Hooks(after_step=lambda net: calls.append(dict(net.calls)))  # type: ignore[arg-type]


@pytest.mark.parametrize("bf16", [False, True])
def test_native_then_kept(bf16: bool, monkeypatch: pytest.MonkeyPatch, windows: Any, capsys: Any) -> None:
    """The first window makes upstream's calls, one more each for the probe the second, no second forward the later."""
    steered.times(monkeypatch.setattr)
    native: list[dict[str, int]] = []
    lean: list[dict[str, int]] = []
    assert_same(run(Lean(), hooks=spy(lean), bf16=bf16), run(None, hooks=spy(native), bf16=bf16))
    assert lean[0] == native[0] == {"no_grad": 24, "grad": 12}
    assert lean[3]["no_grad"] - lean[2]["no_grad"] == 12 and lean[3]["grad"] - lean[2]["grad"] == 12
    assert [(found["kept"], found["replayed"], found["recomputed"]) for found in windows()] == [(12, 12, 0)] * 3
    said = [line for line in capsys.readouterr().out.splitlines() if "auto:" in line]
    assert len(said) == 1 and "auto: retain: graphs of 12 of 12 selected steps fit; saves about 120.0%" in said[0]


def test_a_call_that_costs_more_than_it_saves(monkeypatch: pytest.MonkeyPatch, windows: Any, capsys: Any) -> None:
    steered.times(monkeypatch.setattr, update=0.02, extra=0.03)
    lean: list[dict[str, int]] = []
    assert_same(run(Lean(), hooks=spy(lean)), run(None))
    assert "auto: recompute: to retain would cost 60.0% of a window" in capsys.readouterr().out
    assert len(windows()) == 1 and windows()[0]["kept"] == 0  # the one with the probe
    assert lean[3]["no_grad"] - lean[2]["no_grad"] == 24


@pytest.mark.parametrize("graphs", [0.0, 3.5, 20.0])
def test_never_beyond_the_budget(graphs: float, monkeypatch: pytest.MonkeyPatch, windows: Any, capsys: Any) -> None:
    """The probe's graphs included: bytes of all that is alive at the end of each rollout are followed."""
    steered.times(monkeypatch.setattr)
    run(Lean(), rollouts=2)
    one = windows()[-1]["graph_bytes"]
    monkeypatch.setenv("LEANGRPO_BUDGET_GB", str(graphs * one / 1e9))
    assert_same(run(Lean()), run(None))
    later = windows()[1:]
    assert [found["kept"] for found in later] == [min(int(graphs), ROWS)] * (3 if graphs else 0)
    assert all(found["peak_held_bytes"] <= graphs * one for found in later)
    assert graphs or "auto: recompute: no room for kept graphs" in capsys.readouterr().out


@pytest.mark.parametrize(("budget", "most"), [("unlimited", 4), ("0.00002", 2), ("0.000001", 1)])
def test_the_probe_holds_no_more_than_the_budget(budget: str, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of its five graphs (7.5 kB each) the first is let go in any case; one must be made to know what it weighs."""
    steered.times(monkeypatch.setattr)
    monkeypatch.setenv("LEANGRPO_BUDGET_GB", budget)
    made: list[weakref.ref[Window]] = []
    alive: list[int] = []
    window, replay = probing.Window, probing._replay

    def noted(*args: Any, **kwargs: Any) -> Window:
        made.append(weakref.ref(found := window(*args, **kwargs)))
        return found

    def replayed(*args: Any) -> None:
        alive.append(sum(item() is not None for item in made))
        replay(*args)

    monkeypatch.setattr(probing, "Window", noted)
    monkeypatch.setattr(probing, "_replay", replayed)
    run(Lean(), rollouts=2)
    assert len(made) == 5 and max(alive) == most


def test_out_of_memory_keeps_less(monkeypatch: pytest.MonkeyPatch, windows: Any, capsys: Any) -> None:
    """The call is made without its graph, the window keeps less, the next ones too; `retain` stops there."""
    steered.times(monkeypatch.setattr)

    at = {"rollout": 0, "calls": 0}  # not in the network, which must not change

    class Full(Policy):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            if torch.is_grad_enabled() and at["rollout"] == 3:
                at["calls"] += 1
                if at["calls"] == 11:
                    raise torch.OutOfMemoryError("no memory")
            return super().forward(*args, **kwargs)

    def trained(lean: Lean | None) -> Result:
        at.update(rollout=0 if lean else -10, calls=0)
        torch.manual_seed(0)
        net = Full()

        def counted(number: int) -> bool:
            at["rollout"] += 1
            return True

        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
        return train(lean, net, optimizer, Config(rollouts=5), Hooks(lean_in=counted))

    assert_same(trained(Lean()), trained(None))
    kept = [found["kept"] for found in windows()]
    assert kept == [12, 10, 8, 8] and windows()[1]["replayed"] == 8 and windows()[1]["reasons"]["out of memory"] == 3
    assert "auto: a call ran out of memory: from here on" in capsys.readouterr().out
    monkeypatch.setenv("LEANGRPO_SCHEDULE", "retain")
    with pytest.raises(LeanError, match="LG608"):
        trained(Lean())


def test_a_peak_beyond_the_limit_lowers_the_budget(monkeypatch: pytest.MonkeyPatch, windows: Any, capsys: Any) -> None:
    """95 of 100 units are allowed, 80 are taken natively: 15 for graphs. A window that takes 98 leaves 12."""
    steered.times(monkeypatch.setattr)
    run(Lean(), rollouts=2)
    one = windows()[-1]["graph_bytes"]
    memory = steered.Memory(monkeypatch.setattr, 100 * one, 80 * one)

    def grow(net: Any) -> None:
        steps.append(1)
        memory.most = {3: 98.5 * one}.get(len(steps), memory.most)

    steps: list[int] = []
    assert_same(run(Lean(), rollouts=5, trained=4, hooks=Hooks(before_flush=grow)), run(None, rollouts=5, trained=4))
    assert [found["kept"] for found in windows()[1:]] == [15, 15, 11, 11]
    assert "native peaks: rollout" in capsys.readouterr().out


def test_windows_that_take_longer_are_native_in_the_end(
    monkeypatch: pytest.MonkeyPatch, windows: Any, capsys: Any
) -> None:
    runtime = Lean()
    seconds = {"retain": 1.2, "recompute": 1.0}
    steered.times(monkeypatch.setattr, update=0.03, window=1.0, seconds=lambda: seconds[runtime._run.auto.way.schedule])
    rollouts = 2 + ENOUGH + 2 * ENOUGH + 2
    assert_same(run(runtime, rollouts), run(None, rollouts))
    kept = [found["kept"] for found in windows()]
    assert kept == [12] * (1 + ENOUGH + ENOUGH)  # the probed one, three that were judged, three of the comparison
    said = capsys.readouterr().out
    assert "auto: compares retain with recompute, since windows take 1.2 s, natively 1 s" in said
    assert "auto: recompute: a window takes 1 s, 1.2 s with retain" in said


GRADIENT = sum(p.numel() for p in Policy().parameters()) * 4  # 32 kB; with 64 tokens a graph takes 120 kB


def large(rollouts: int = 4) -> dict[str, Any]:
    return {"tokens": 64, "rollouts": rollouts}


def budget_for(monkeypatch: pytest.MonkeyPatch, windows: Any, gradients: float) -> float:
    """Room for so many gradients beside one graph; returns how many graphs that is."""
    run(Lean(), **large(2))
    graph = windows()[-1]["graph_bytes"]
    monkeypatch.setenv("LEANGRPO_BUDGET_GB", str((graph + gradients * GRADIENT) / 1e9))
    return 1 + gradients * GRADIENT / graph


@pytest.mark.parametrize(
    ("gradients", "rewards_later", "kept", "held"),
    [
        (4.5, None, 12, 4),  # one per sample
        (3.5, None, 12, 3),  # sums of the group, as rewards come before the next sample
        (3.5, (0, 1, 2, 3), 9, 3),  # they come too late: a gradient each of three samples
    ],
)
def test_gradients_where_graphs_do_not_fit(
    gradients: float, rewards_later: Any, kept: int, held: int, monkeypatch: pytest.MonkeyPatch, windows: Any,
    capsys: Any,
) -> None:  # fmt: skip
    """The first window is upstream's to the bit, the one with the probe holds graphs, those after it gradients."""
    steered.times(monkeypatch.setattr)
    graphs = int(budget_for(monkeypatch, windows, gradients))
    capsys.readouterr()
    lean, native = (run(own, hooks=Hooks(rewards_later=rewards_later), **large()) for own in (Lean(), None))
    assert_same(lean, native, rtol=5e-6)
    for ours, theirs in zip(lean.gradients[:2], native.gradients[:2], strict=True):
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)  # type: ignore[arg-type]
    found = windows()[1:]
    assert graphs < kept and [window["kept"] for window in found] == [graphs, kept, kept]
    assert [window["gradients"] for window in found] == [0, held, held]
    assert [window["recomputed"] for window in found[1:]] == [12 - kept] * 2
    name = "affine" if gradients < 4 and rewards_later is None else "sample"
    assert f"auto: reweight {name}: graphs of {graphs} of 12 selected steps fit" in capsys.readouterr().out


def test_buffers_that_were_set_stay(monkeypatch: pytest.MonkeyPatch, windows: Any) -> None:
    steered.times(monkeypatch.setattr)
    for setting, gradients, held in (("sample", 3.5, 3), ("affine", 4.5, 3)):
        monkeypatch.delenv("LEANGRPO_BUDGET_GB", raising=False)
        monkeypatch.setenv("LEANGRPO_BUFFERS", setting)
        budget_for(monkeypatch, windows, gradients)
        run(Lean(), **large(3))
        assert windows()[-1]["gradients"] == held


def test_scaling_that_costs_more_than_it_saves(monkeypatch: pytest.MonkeyPatch, windows: Any) -> None:
    steered.times(monkeypatch.setattr, scaling=0.06, window=0.1)
    graphs = int(budget_for(monkeypatch, windows, 4.5))
    assert_same(run(Lean(), **large()), run(None, **large()))
    assert [(window["kept"], window["gradients"]) for window in windows()[1:]] == [(graphs, 0)] * 3


def test_a_tree_without_a_step_function_keeps_graphs(monkeypatch: pytest.MonkeyPatch, windows: Any) -> None:
    steered.times(monkeypatch.setattr, window=0.1)
    monkeypatch.setattr(Lean, "scored", lambda self, step, *args: step(*args))
    graphs = int(budget_for(monkeypatch, windows, 4.5))
    assert_same(run(Lean(), **large()), run(None, **large()))
    assert [window["kept"] for window in windows()[1:]] == [graphs] * 3


def test_gradients_in_vain_are_given_up(monkeypatch: pytest.MonkeyPatch, windows: Any, capsys: Any) -> None:
    """A weight per step: one window finds out and recomputes, the next ones hold what graphs fit."""
    steered.times(monkeypatch.setattr)
    graphs = int(budget_for(monkeypatch, windows, 4.5))

    def weighted() -> Hooks:
        made: list[int] = []
        return Hooks(loss=lambda loss: loss * (1.0, 0.5, 2.0)[made.append(0) or len(made) % 3])

    capsys.readouterr()
    lean, native = (run(own, hooks=weighted(), **large(5)) for own in (Lean(), None))
    assert_same(lean, native, rtol=5e-6)
    found = [(window["kept"], window["replayed"], window["gradients"]) for window in windows()[1:]]
    assert found == [(graphs, graphs, 0), (12, 0, 4), (graphs, graphs, 0), (graphs, graphs, 0)]
    said = capsys.readouterr().out
    assert "the loss weights a sample's steps unequally: auto chooses again" in said
    assert said.count("auto: gradients were kept in vain") == 1
    assert said.count("auto: retain: graphs of") == 1


@pytest.mark.usefixtures("in_float64")
def test_batches_that_are_shuffled(monkeypatch: pytest.MonkeyPatch, windows: Any) -> None:
    """In the order of upstream, which no choice changes; and held ones first from the second rollout on."""
    steered.times(monkeypatch.setattr)
    for order in ("upstream", "held-first"):
        monkeypatch.setenv("LEANGRPO_ORDER", order)
        config, results = epoch.Config(rollouts=3), []
        for lean in (Lean(), None):
            torch.manual_seed(0)
            results.append(epoch.train(lean, Network(), config, _late_first(config) if order != "upstream" else None))
        assert_same(*results, rtol=1e-12)
        assert all(found["replayed"] == 36 for found in windows()[-2:])


def _late_first(config: epoch.Config) -> epoch.Hooks:
    """The order of `held-first`, but for the first rollout."""
    first, orders = first_batches_first(config).order, []

    def order(drawn: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        orders.append(1)
        return drawn if len(orders) == 1 else first(drawn, rows)

    return epoch.Hooks(order=order)


def unequal(rank: int) -> Hooks:
    """Rank 1 alone has a network whose kept calls cost more than they save."""
    steered.times(setattr, extra=0.03 * rank)
    return Hooks()


def equal(rank: int) -> Hooks:
    steered.times(setattr)
    return Hooks()


def less_memory(rank: int) -> Hooks:
    """Room for 20 graphs on rank 0, and for 5 on rank 1."""
    steered.times(setattr)
    graph = int(os.environ["GRAPH"])
    steered.Memory(setattr, 100 * graph, (75 if rank == 0 else 89.5) * graph)
    return Hooks()


@pytest.mark.parametrize("kind", ["fsdp2", wide("fsdp"), "ddp", wide("none")])
def test_two_ranks(kind: str) -> None:
    """Each update as without `auto`; the first makes native calls."""
    env = AUTO | {"LEANGRPO_SYNC": "upstream"}
    for lean, native in both(kind, env=env, hooks=equal, config={"rollouts": 3, "accumulate": 2}):
        assert_same(lean.result, native.result, 1e-6 if kind == "ddp" else 0)
        assert [found["replayed"] for found in lean.windows] == [6, 6]


@pytest.mark.parametrize("kind", ["fsdp", "none"])
def test_the_slowest_rank_decides(kind: str) -> None:
    env = AUTO | {"LEANGRPO_SYNC": "upstream"}
    for lean, native in both(kind, env=env, hooks=unequal, config={"rollouts": 3}):
        assert_same(lean.result, native.result)
        assert len(lean.windows) == 1 and lean.window["kept"] == 0


@pytest.mark.parametrize("kind", [wide("fsdp"), "none"])
def test_the_rank_with_the_least_memory_decides(kind: str) -> None:
    found = both(kind, env=AUTO | {"LEANGRPO_SYNC": "upstream"}, hooks=equal, config={"rollouts": 2})
    env = AUTO | {"GRAPH": str(found[0][0].window["graph_bytes"]), "LEANGRPO_SYNC": "upstream"}
    for lean, native in both(kind, env=env, hooks=less_memory, config={"rollouts": 3}):
        assert_same(lean.result, native.result)
        assert [window["kept"] for window in lean.windows] == [5, 5]


def less_memory_for_gradients(rank: int) -> Hooks:
    """Room for all graphs on rank 0, and on rank 1 for those of a trajectory, of three steps, and four gradients."""
    steered.times(setattr)
    graph = int(os.environ["GRAPH"])
    left = 100 * graph if rank == 0 else 3 * graph + 4.5 * GRADIENT
    steered.Memory(setattr, 1000 * graph, 0.95 * 1000 * graph - left)
    return Hooks()


@pytest.mark.parametrize("kind", ["fsdp", wide("none"), wide("ddp")])
def test_gradients_on_two_ranks(kind: str) -> None:
    """All ranks keep gradients where one has no room for all graphs."""
    config = {"tokens": 128, "rollouts": 2}
    env = AUTO | {"LEANGRPO_SYNC": "upstream"}
    graph = both(kind, env=env, hooks=equal, config=config)[0][0].window["graph_bytes"]
    env |= {"GRAPH": str(graph)}
    for lean, native in both(kind, env=env, hooks=less_memory_for_gradients, config=config | {"rollouts": 3}):
        assert_same(lean.result, native.result, 5e-6)
        assert lean.windows[-1]["gradients"] > 0 and lean.windows[-1]["recomputed"] == 0


def late_is_faster(rank: int) -> Hooks:
    ways: list[Auto] = []
    begin = Auto.begin
    setattr(Auto, "begin", lambda self: (ways.append(self), begin(self))[1])  # noqa: B010
    steered.times(setattr, update=0.06, window=1.0, seconds=lambda: 0.5 if ways[-1].way.sync == "late" else 0.7)
    return Hooks()


@pytest.mark.parametrize("kind", [wide("fsdp2"), "fsdp"])
def test_late_is_tried_where_sync_was_not_set(kind: str) -> None:
    """In turn with upstream's reductions, then for good. Where somebody has set it, every bit is upstream's (above)."""
    for lean, native in both(kind, env=AUTO, hooks=late_is_faster, config={"rollouts": 9, "rows": 2, "accumulate": 2}):
        assert_same(lean.result, native.result, 1e-5)
        late = [window["flush"] in ("joint", "layer-major") for window in lean.windows]
        assert late == [False, *[True, False] * 3, True]


def late_has_room(rank: int) -> Hooks:
    """Of a device on which graphs have room: so have whole gradients on rank 0, and on rank 1 not."""
    hooks = late_is_faster(rank)
    memory = steered.Memory(setattr, 1e9, 0.0)
    memory.most = 0.0 if rank == 0 else 0.95e9 - 110e3  # 12 graphs of 8 kB, and 13 kB are left
    return hooks


def test_late_needs_room_on_every_rank() -> None:
    for lean, native in both("fsdp2", env=AUTO, hooks=late_has_room, config={"rollouts": 3}):
        assert_same(lean.result, native.result)
        assert [window["flush"] for window in lean.windows] == ["in order"] * 2


def test_audited_windows_are_not_judged(monkeypatch: pytest.MonkeyPatch, windows: Any, capsys: Any) -> None:
    """They recompute what they replay, so each takes longer than a native one."""
    monkeypatch.setenv("LEANGRPO_AUDIT", "every:1")
    steered.times(monkeypatch.setattr, update=0.06, window=1.0, seconds=lambda: 2.0)
    run(Lean(), rollouts=7, rows=2, accumulate=2)
    assert [found["kept"] for found in windows()] == [6] * 6 and "compares" not in capsys.readouterr().out


def test_an_update_of_two_rollouts_is_measured_in_the_second(capsys: Any, windows: Any) -> None:
    """A first rollout that nothing trains tells no seconds of an update: what comes after it is measured again."""
    lean, net = Lean(), Policy()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    with lean.rollout(rows=4, steps=6, trained=3, window=4):
        lean.rollout_call(net, [0], 0, latents=torch.zeros(1, 4, 8), timestep=torch.zeros(1), prompt=torch.zeros(1, 8))
    train(lean, net, optimizer, Config(rollouts=1))
    assert "auto:" not in capsys.readouterr().out
    train(lean, net, optimizer, Config(rollouts=1))
    assert capsys.readouterr().out.count("auto:") == 1
