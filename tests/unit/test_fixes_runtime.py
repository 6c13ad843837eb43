"""Fixes of the runtime's errors, followed as they are printed: the same training goes through."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import ranks
from support.check import assert_same
from support.fixes import follows
from support.grpo import Config, Hooks, Policy, Result, train
from support.wrapped import both, job
from torch import Tensor, nn

from leangrpo_core import Lean, LeanError, guard, late, replay, sync
from leangrpo_core.layout.parts import Cut

ONE = Config(rollouts=1)


def trained(
    lean: Lean | None, config: Config = ONE, hooks: Hooks | None = None, net: nn.Module | None = None
) -> Result:
    torch.manual_seed(0)
    policy = net or Policy()
    return train(lean, policy, torch.optim.AdamW(policy.parameters(), lr=1e-2), config, hooks)


def stops(code: str, run: Callable[[], Any]) -> str:
    """Run it, expect this error, and give what it says to do."""
    with pytest.raises(LeanError) as caught:
        run()
    assert caught.value.code == code, caught.value
    return caught.value.fix


def settings(fix: str) -> dict[str, str]:
    """The settings that a fix names with a value."""
    found = dict(re.findall(r"(LEANGRPO_[A-Z_]+)=([\w-]+)", fix))
    assert found, fix
    return found


@pytest.fixture
def export(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Set in the environment what a fix says."""

    def to_environment(fix: str) -> None:
        for name, value in settings(fix).items():
            monkeypatch.setenv(name, value)

    return to_environment


@follows("LG601")
def test_a_value_that_is_not_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LEANGRPO_SCHEDULE", "retian")
    fix = stops("LG601", lambda: trained(Lean()))
    assert "retain" in fix
    monkeypatch.setenv("LEANGRPO_SCHEDULE", "retain")
    assert_same(trained(Lean()), trained(None))


@follows("LG601")
def test_a_setting_that_is_misspelt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LEANGRPO_SHEDULE", "retain")
    fix = stops("LG601", lambda: trained(Lean()))
    assert "LEANGRPO_SCHEDULE" in fix
    monkeypatch.delenv("LEANGRPO_SHEDULE")
    monkeypatch.setenv("LEANGRPO_SCHEDULE", "retain")
    assert_same(trained(Lean()), trained(None))


@follows("LG602")
def test_settings_that_differ_between_ranks() -> None:
    with pytest.raises(ranks.RankFailed, match="LG602") as caught:
        ranks.run(job, 2, "none", True, {"env": {"LEANGRPO_SCHEDULE": ["retain", "recompute"]}})
    assert "the same LEANGRPO_* variables on every node" in str(caught.value)
    for lean, native in both("none", env={"LEANGRPO_SCHEDULE": ["retain", "retain"]}):
        assert_same(lean.result, native.result)


@follows("LG603")
def test_a_step_without_flush() -> None:
    fix = stops("LG603", lambda: trained(Lean(), hooks=Hooks(no_flush=True)))
    assert "call lean.flush(model, optimizer) before clipping" in fix
    assert_same(trained(Lean(), hooks=Hooks(no_flush=False)), trained(None))


@torch.no_grad()
def flip(net: nn.Module) -> None:
    next(net.parameters()).mul_(-1)


@follows("LG604")
@pytest.mark.parametrize("follow", ["move", "recompute"])
def test_weights_changed_before_the_flush(follow: str, export: Any) -> None:
    fix = stops("LG604", lambda: trained(Lean(), hooks=Hooks(before_flush=flip)))
    hooks = Hooks(before_flush=flip)
    if follow == "move":
        assert "behind optimizer.step()" in fix
        hooks = Hooks(after_step=flip)
    else:
        export(fix)
    assert_same(trained(Lean(), hooks=hooks), trained(None, hooks=hooks))


def twice(loss: Tensor) -> None:
    loss.backward(retain_graph=True)
    loss.backward()


@follows("LG605")
@pytest.mark.parametrize("follow", ["once", "recompute"])
def test_backward_twice(follow: str, export: Any) -> None:
    fix = stops("LG605", lambda: trained(Lean(), hooks=Hooks(backward=twice)))
    hooks = Hooks(backward=twice)
    if follow == "once":
        assert "backward once" in fix
        hooks = Hooks(backward=lambda loss: (loss + loss).backward())
    else:
        export(fix)
    assert_same(trained(Lean(), hooks=hooks), trained(None, hooks=hooks))


@follows("LG607")
def test_another_gradient_than_the_native_one(monkeypatch: pytest.MonkeyPatch, export: Any) -> None:
    monkeypatch.setenv("LEANGRPO_AUDIT", "first")
    walk = replay.walk

    def wrong(window: Any, wrapper: Any, net: nn.Module, calls: Any) -> None:
        walk(window, wrapper, net, calls)
        next(net.parameters()).grad.mul_(-1)  # type: ignore[union-attr]

    monkeypatch.setattr(replay, "walk", wrong)
    export(stops("LG607", lambda: trained(Lean())))
    assert_same(trained(Lean()), trained(None))


class Small(Policy):
    """On a device with room for two graphs."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.kept = getattr(self, "kept", 0) + torch.is_grad_enabled()
        if torch.is_grad_enabled() and not self.updating and self.kept > 2:
            raise torch.OutOfMemoryError("played")
        return super().forward(*args, **kwargs)

    updating = False


@follows("LG608")
def test_graphs_that_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    def begin(net: nn.Module) -> None:
        net.updating = True  # type: ignore[assignment]

    monkeypatch.setenv("LEANGRPO_BUDGET_GB", "unlimited")
    fix = stops("LG608", lambda: trained(Lean(), hooks=Hooks(before_update=begin), net=Small()))
    least = re.search(r"LEANGRPO_BUDGET_GB to less than ([\d.e+-]+)", fix)
    assert least
    monkeypatch.setenv("LEANGRPO_BUDGET_GB", f"{float(least[1]) * 0.9:.9f}")
    torch.manual_seed(0)
    hooks = Hooks(before_update=begin)
    assert_same(trained(Lean(), hooks=hooks, net=Small()), trained(None, hooks=hooks))


@follows("LG609")
def test_replicas_that_differ() -> None:
    def wrong(rank: int) -> Hooks:
        sync.flat_mean = lambda parameters: None  # type: ignore[assignment]  # in this forked process only
        return Hooks()

    with pytest.raises(ranks.RankFailed) as caught:
        ranks.run(job, 2, "ddp", True, {"hooks": wrong})
    assert set(caught.value.errors) == {0, 1} and all("LG609" in text for text in caught.value.errors.values())
    for ours in ranks.run(job, 2, "ddp", True, {"hooks": wrong, "env": settings(caught.value.errors[0])}):
        assert ours.result.gradients


@follows("LG610")
def test_a_rollout_before_the_flush() -> None:
    fix = stops("LG610", lambda: trained(Lean(), Config(accumulate=5)))
    assert "flush" in fix
    assert_same(trained(Lean(), Config(accumulate=4)), trained(None, Config(accumulate=4)))


@follows("LG613")
@pytest.mark.parametrize("follow", ["numbers", "native"])
def test_numbers_that_do_not_fit(follow: str) -> None:
    fix = stops("LG613", lambda: Cut(1, 12, 3, 8, shared=True, on_policy=False))
    if follow == "numbers":
        for number in re.findall(r"\d+", re.findall(r"\[.*?\]", fix)[0]):
            Cut(1, 12, int(number), 8, shared=True, on_policy=False)
    else:
        assert settings(fix) == {"LEANGRPO_LAYOUT": "native"}
        Cut(1, 12, 3, 8, shared=False, on_policy=False)


@follows("LG611")
def test_a_rank_that_stops() -> None:
    """The other rank's message leads to the first error; without that all is well."""

    def fails(rank: int) -> Hooks:
        def loss(value: Tensor) -> Tensor:
            if rank == 1:
                raise ValueError("the reward model is gone")
            return value

        return Hooks(loss=loss)

    with pytest.raises(ranks.RankFailed) as caught:
        ranks.run(job, 2, "fsdp", True, {"hooks": fails})
    other, own = caught.value.errors[0], caught.value.errors[1]
    assert "LG611" in other and "see that rank's own output" in other and "rank 1" in other
    assert "the reward model is gone" in own
    for lean, native in both("fsdp"):
        assert_same(lean.result, native.result)


@follows("LG612")
def test_gradients_that_no_backward_reduced() -> None:
    def hooks(rank: int) -> Hooks:
        late._Call.walk_with_zeros = lambda self: None  # type: ignore[method-assign]  # in this forked process only
        calls = iter(range(100))
        return Hooks(
            backward=lambda loss: None if next(calls) == 5 else loss.backward(), after_flush=guard.parameters_of
        )

    case = {"hooks": hooks, "config": {"rollouts": 1, "rows": 3, "accumulate": 3, "trained": 2, "announced": 4}}
    env = {"LEANGRPO_SCHEDULE": "recompute", "LEANGRPO_SYNC": "late"}
    with pytest.raises(ranks.RankFailed) as caught:
        ranks.run(job, 2, "fsdp2", True, case | {"env": env})
    assert all("LG612" in text for text in caught.value.errors.values())
    env |= {name: value for name, value in settings(caught.value.errors[0]).items() if name == "LEANGRPO_SYNC"}
    assert env["LEANGRPO_SYNC"] == "upstream"
    native = ranks.run(job, 2, "fsdp2", False, case)
    for ours, theirs in zip(ranks.run(job, 2, "fsdp2", True, case | {"env": env}), native, strict=True):
        assert_same(ours.result, theirs.result)


@follows("LG614")
def test_an_argument_written_in_place(monkeypatch: pytest.MonkeyPatch, export: Any) -> None:
    """Reweight has to make a call again; each step's loss has a weight of its own, so that it cannot do without."""
    monkeypatch.setenv("LEANGRPO_SCHEDULE", "reweight")

    def hooks() -> Hooks:
        held: list[Tensor] = []
        weights = iter([1.0, 0.5, 2.0] * 8)
        return Hooks(
            update_latents=lambda latents, row, step: held.append(latents.clone()) or held[-1],
            loss=lambda loss: loss * next(weights),
            before_flush=lambda net: torch._foreach_add_(held, 1.0),
        )

    export(stops("LG614", lambda: trained(Lean(), hooks=hooks())))
    assert_same(trained(Lean(), hooks=hooks()), trained(None, hooks=hooks()))
