"""What a call depends on besides its arguments, changed at every time between a rollout and its flush.

Before the update and within the rollout: recomputed, with the native gradient. After a replay: LG604.
"""

import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support import ranks
from support.check import assert_same
from support.grpo import Config, Hooks, Policy, Result, train
from support.wrapped import both as wrapped
from support.wrapped import wrap
from torch import Tensor, nn

from leangrpo_core import Lean, LeanError, plain, seen

SMALL = Config(rows=4, steps=3, trained=2, rollouts=1)
Window = Callable[[], dict[str, Any]]


@pytest.fixture
def window(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Window:
    monkeypatch.setenv("LEANGRPO_REPORT_DIR", str(tmp_path))
    return lambda: json.loads((tmp_path / "rank0.jsonl").read_text().splitlines()[0])


class Rich(Policy):
    """Its output depends on something of every kind."""

    gain = 1.0
    active_adapters = ("default",)
    disable_adapters = False

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.plain, self.scaling, self.scales = 1.0, {"default": 1.0}, [("all", [1.0])]
        self.register_buffer("shift", torch.zeros(3))
        self.shift: Tensor

    def forward(self, latents: Tensor, timestep: Tensor, prompt: Tensor, scale: float = 1.0) -> Any:
        scale *= self.plain * self.scaling["default"] * self.scales[0][1][0] * self.gain  # type: ignore[operator, index]
        scale *= 0.5 if self.disable_adapters else 1.0
        return super().forward(latents + self.shift[0], timestep, prompt, scale)


def halve(module: nn.Module, args: Any, out: Any) -> Any:
    return out * 0.5


def double(module: nn.Module, args: Any, out: Any) -> Any:
    return out * 2.0


def halve_before(module: nn.Module, args: Any) -> Any:
    return (args[0] * 0.5,)


@torch.no_grad()
def in_place(net: Any) -> None:
    net.enter.weight.mul_(2.0)


@torch.no_grad()
def in_place_back(net: Any) -> None:
    net.enter.weight.mul_(0.5)


def by_data(net: Any) -> None:
    net.enter.weight.data.mul_(2.0)


def by_data_back(net: Any) -> None:
    net.enter.weight.data.mul_(0.5)


def other_storage(net: Any) -> None:
    net.enter.weight.data = net.enter.weight.data * 2.0


def other_storage_back(net: Any) -> None:
    net.enter.weight.data = net.enter.weight.data * 0.5


def unhook(net: Any) -> None:
    for hooks in (net.leave._forward_hooks, net.leave._forward_pre_hooks):
        hooks.clear()


def hooked(net: Any, hook: Any) -> None:
    unhook(net)
    net.leave.register_forward_hook(hook)


# What changes, how it is put back, and how the reason names it.
CHANGES: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any], str]] = {
    "attribute": (lambda net: setattr(net, "plain", 0.5), lambda net: setattr(net, "plain", 1.0), ".plain"),
    "dict": (lambda net: net.scaling.update(default=0.5), lambda net: net.scaling.update(default=1.0), ".scaling"),
    "list": (lambda net: net.scales[0][1].insert(0, 0.5), lambda net: net.scales[0][1].pop(0), ".scales"),
    "of the class": (lambda net: setattr(net, "gain", 0.5), lambda net: delattr(net, "gain"), ".gain"),
    "hook": (lambda net: hooked(net, partial(halve)), unhook, "hooks"),
    "hook before": (lambda net: net.leave.register_forward_pre_hook(halve_before), unhook, "hooks"),
    "adapters": (
        lambda net: setattr(net, "disable_adapters", True),
        lambda net: setattr(net, "disable_adapters", False),
        "adapters",
    ),
    "buffer": (lambda net: net.shift.fill_(0.5), lambda net: net.shift.zero_(), "buffers"),
    "frozen": (
        lambda net: net.blocks[0].requires_grad_(False),
        lambda net: net.blocks[0].requires_grad_(True),
        "trainable",
    ),
    "weights": (by_data, by_data_back, "weights"),
    "weights in place": (in_place, in_place_back, "weights"),
    "weights in another storage": (other_storage, other_storage_back, "weights"),
}
SCHEDULES = pytest.mark.parametrize("schedule", ["retain", "reweight"])
KINDS = pytest.mark.parametrize(
    ("kind", "schedule"),
    [*((kind, "retain") for kind in CHANGES), *((kind, "reweight") for kind in ("dict", "frozen", "weights in place"))],
)


def run(lean: Lean | None, hooks: Hooks, policy: Callable[[], nn.Module] = Rich) -> Result:
    torch.manual_seed(0)
    net = policy()
    return train(lean, net, torch.optim.SGD(net.parameters(), lr=1e-2), SMALL, hooks)


def same(hooks: Callable[[], Hooks], schedule: str, policy: Callable[[], nn.Module] = Rich) -> None:
    os.environ["LEANGRPO_SCHEDULE"] = schedule  # the fixture `window` has put the old one aside
    assert_same(run(Lean(), hooks(), policy), run(None, hooks(), policy), 0.0 if schedule == "retain" else 2e-6)


@pytest.fixture(autouse=True)
def _schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LEANGRPO_SCHEDULE", "retain")


class Switching:
    """Hooks that change the network when row `first` begins, in the rollout or the update, and put it back later."""

    def __init__(self, kind: str, first: int, until: int | None = None) -> None:
        self.change, self.back, _ = CHANGES[kind]
        self.first, self.until, self.on = first, until, False
        self.net: nn.Module = Policy()

    def at(self, row: int) -> None:
        if row == self.first and not self.on:
            self.on = True
            self.change(self.net)
        if row == self.until and self.on:
            self.on = False
            self.back(self.net)

    def policy(self) -> nn.Module:
        self.net = Rich()
        return self.net

    def in_rollout(self) -> Hooks:
        return Hooks(reward=lambda reward, row: self.at(row + 1) or reward)

    def in_update(self) -> Hooks:
        return Hooks(update_latents=lambda latents, row, step: self.at(row) or latents)


@KINDS
def test_changed_between_rollout_and_update(kind: str, schedule: str, window: Window) -> None:
    change, _, name = CHANGES[kind]
    same(lambda: Hooks(before_update=change), schedule)
    assert window()["replayed"] == 0
    assert any(reason == f"{name} changed since the rollout" for reason in window()["reasons"])


@KINDS
def test_samples_drawn_by_another_network(kind: str, schedule: str, window: Window) -> None:
    """Rows 1 and 2 of the rollout; everything is back before the update."""
    os.environ["LEANGRPO_SCHEDULE"] = schedule
    results = []
    for lean in (Lean(), None):
        switching = Switching(kind, 1, 3)
        results.append(run(lean, switching.in_rollout(), switching.policy))
    assert_same(results[0], results[1], 0.0 if schedule == "retain" else 2e-6)
    reason = f"{CHANGES[kind][2]} were others when the rollout made this call"
    # Weights in place: a graph of before cannot be walked, and whether a later one is of the same cannot be told.
    expected = {"retain": 0, "reweight": 2}[schedule] if kind == "weights in place" else 4
    assert (window()["replayed"], window()["reasons"][reason]) == (expected, 8 - max(expected, 2))


@KINDS
def test_changed_in_the_middle_of_the_update(kind: str, schedule: str) -> None:
    os.environ["LEANGRPO_SCHEDULE"] = schedule
    switching = Switching(kind, 2)
    with pytest.raises(LeanError) as caught:
        run(Lean(), switching.in_update(), switching.policy)
    assert caught.value.code == "LG604" and CHANGES[kind][2] in str(caught.value)


@pytest.mark.parametrize("kind", CHANGES)
def test_changed_for_a_sample_of_the_update(kind: str, window: Window) -> None:
    """Put back before the flush: what ran meanwhile was another evaluation than the rollout's."""
    os.environ["LEANGRPO_SCHEDULE"] = "reweight"
    results = []
    for lean in (Lean(), None):
        switching = Switching(kind, 1, 2)
        results.append(run(lean, switching.in_update(), switching.policy))
    assert_same(results[0], results[1], 2e-6)
    assert (window()["replayed"], window()["recomputed"]) == (6, 2)


@KINDS
def test_switched_for_another_call_and_put_back(kind: str, schedule: str, window: Window) -> None:
    """As a reference is computed with the adapters off; modes are switched, too."""
    change, back, _ = CHANGES[kind]
    nets: list[Any] = []

    def policy() -> nn.Module:
        nets.append(Rich())
        return nets[-1]

    def refer(latents: Tensor, row: int, step: int) -> Tensor:
        change(nets[-1].eval())
        with torch.no_grad():
            nets[-1](latents, torch.zeros(1), torch.zeros(1, 8))
        back(nets[-1])
        return latents

    same(lambda: Hooks(update_latents=refer), schedule, policy)
    written = (kind, schedule) == ("weights in place", "retain")  # a graph cannot be walked after that
    assert (window()["replayed"], window()["recomputed"]) == ((0, 8) if written else (8, 0))


@SCHEDULES
def test_written_in_place_with_the_same_values(schedule: str, window: Window) -> None:
    """A graph that is held cannot be walked after that; a gradient that is there is still right."""

    def again(net: Any) -> None:
        with torch.no_grad():
            net.enter.weight.copy_(net.enter.weight.clone())

    same(lambda: Hooks(before_update=again), schedule)
    assert window()["replayed"] == (0 if schedule == "retain" else 8)
    late = Hooks(before_flush=again)
    if schedule == "reweight":
        run(Lean(), late)
    else:
        with pytest.raises(LeanError, match="LG604: weights, in place, changed"):
            run(Lean(), late)


def test_books_are_not_compared(window: Window) -> None:
    """What a network writes down in containers at its own calls, and what it sets at its first."""

    class Keeping(Rich):
        ready = False

        def __init__(self) -> None:
            super().__init__()
            self.lengths: list[int] = []
            self.books = {"calls": 0}

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            self.lengths.append(args[0].shape[1] if args else 0)
            self.books["calls"] += 1
            self.ready = True
            return super().forward(*args, **kwargs)

    same(Hooks, "retain", Keeping)
    assert window()["replayed"] == 8


def test_attributes_by_value() -> None:
    net = nn.Linear(2, 2)
    net.nan, net.one, net.deep = float("nan"), 1, {"a": [(1, {"b": None})], 2: torch.float32}  # type: ignore[assignment]
    net.tensors = [torch.ones(1)]  # type: ignore[assignment]
    before = plain.attributes_of(net)
    net.later, net.in_features = 3, 2  # type: ignore[assignment]
    assert plain.switched(before, plain.attributes_of(net)) == []  # what is set later is none that was there
    assert ".deep" in before and ".tensors" not in before
    net.one = True  # type: ignore[assignment]
    assert plain.switched(before, plain.attributes_of(net)) == [".one"]


def test_a_glance_takes_every_dtype_and_shape() -> None:
    net = nn.Module()
    for place, values in enumerate(
        [torch.zeros(()), torch.zeros(0, 3), torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last)]
    ):
        net.register_buffer(f"float{place}", values.clone())
    for dtype in (torch.int64, torch.bool, torch.uint8, torch.bfloat16, torch.complex64):
        net.register_buffer(str(dtype).replace(".", ""), torch.zeros(3, 2, dtype=dtype))
    before = seen.see(net, wholly=False)
    assert before.others(seen.see(net, wholly=False)) == []
    for buffer in net.buffers():
        if buffer.numel():
            buffer[(0,) * buffer.dim()] = 1
            assert before.others(seen.see(net, wholly=False)) == ["buffers"], buffer.dtype
            buffer.zero_()


# -- Wrappers ---------------------------------------------------------------------------------------------------------


def found_in(rank: int, world: int) -> dict[str, tuple[list[str], int, tuple[str, ...]]]:
    """Per wrapper: attributes of the layers, how often weights count as written, and hooks; after two calls."""
    found = {}
    for kind in ("none", "ddp", "fsdp", "fsdp-orig", "fsdp2"):
        net = wrap(kind, Policy())
        before = seen.versions(net)
        with torch.no_grad():
            net(torch.zeros(1, 4, 8), torch.zeros(1), torch.zeros(1, 8))
        net(torch.zeros(1, 4, 8), torch.zeros(1), torch.zeros(1, 8))[0].sum().backward()
        names = [name.split(".")[-1] for name in plain.attributes_of(net)]
        found[kind] = (sorted(set(names)), seen.versions(net) - before, plain.hooks_of(net))
    return found


def test_wrappers_are_no_change() -> None:
    """FSDP2 makes the layers' class its own and hooks into their forward: neither hides nor is a change."""
    for found in ranks.run(found_in, 2):
        assert {"checkpointing", "calls", "in_features"} <= set(found["none"][0])
        for kind, (names, written, hooks) in found.items():
            assert set(found["none"][0]) <= set(names) and written == 0 and hooks == (), kind


@pytest.mark.parametrize("schedule", ["retain", "reweight"])
def test_samples_drawn_by_other_weights_on_one_rank(schedule: str) -> None:
    """A share of the weights is another one's on rank 1 alone: no rank may keep these calls."""

    def hooks(rank: int) -> Hooks:
        nets: list[nn.Module] = []

        def scale(by: float) -> None:
            if rank == 1 and nets:
                next(p for p in nets[0].parameters() if p.numel()).data.mul_(by)

        def reward(value: Tensor, row: int) -> Tensor:
            scale({0: 2.0, 2: 0.5}.get(row, 1.0))
            return value

        return Hooks(reward=reward, after_step=nets.append)

    config = {"rows": 4, "steps": 2, "trained": 1, "rollouts": 2}
    for rank, (lean, native) in enumerate(
        wrapped("fsdp", hooks=hooks, config=config, env={"LEANGRPO_SCHEDULE": schedule})
    ):
        assert_same(lean.result, native.result, 1e-6)
        assert lean.windows[0]["replayed"] == 4
        assert lean.windows[1]["replayed"] < 4
        if schedule == "reweight":  # with retain the ranks compare afterwards what they hold
            assert any("on another rank were others" in text for text in lean.windows[1]["reasons"]) == (not rank)
