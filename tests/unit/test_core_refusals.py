"""What could make a replay another evaluation than upstream's: recomputed, counted with the reason, or refused."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from support.check import assert_same
from support.grpo import Config, Hooks, Policy, Result, train
from torch import Tensor, nn

from leangrpo_core import Lean, LeanError, guard


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[], dict[str, Any]]:
    monkeypatch.setenv("LEANGRPO_REPORT_DIR", str(tmp_path))
    return lambda: json.loads((tmp_path / "rank0.jsonl").read_text().splitlines()[0])


def both(  # the same trainer with and without the runtime
    config: Config, hooks: Callable[[], Hooks], **policy: Any
) -> tuple[Result, Result]:
    results = []
    for lean in (Lean(), None):
        torch.manual_seed(0)
        net = Policy(**policy)
        results.append(train(lean, net, torch.optim.AdamW(net.parameters(), lr=1e-2, fused=True), config, hooks()))
    return results[0], results[1]


def in_place(out: Tensor, *_: int) -> Tensor:
    return out.mul_(1.5).add_(0.1)


def in_place_view(out: Tensor, *_: int) -> Tensor:
    out[:, :2].mul_(-1)
    return out


@pytest.mark.parametrize("where", ["rollout_output", "update_output"])
@pytest.mark.parametrize("change", [in_place, in_place_view])
@pytest.mark.parametrize("bf16", [False, True])
def test_in_place_on_the_output(where: str, change: Any, bf16: bool, figures: Any) -> None:
    lean, native = both(Config(bf16=bf16), lambda: Hooks(**{where: change}))
    assert_same(lean, native)
    assert figures()["replayed"] == 12


def test_output_used_twice(figures: Any) -> None:
    lean, native = both(Config(), lambda: Hooks(update_output=lambda out, row, step: out * 0.5 + out.tanh()))
    assert_same(lean, native)
    assert figures()["replayed"] == 12


@torch.no_grad()
def flip_sign(net: nn.Module) -> None:
    next(net.parameters()).mul_(-1)


@torch.no_grad()
def permute(net: nn.Module) -> None:
    weight = next(net.parameters())
    weight.copy_(weight[torch.arange(len(weight)).roll(1)])


def write_data(net: nn.Module) -> None:
    next(net.parameters()).data[0, 0] += 1e-3


def swap_two(net: nn.Module) -> None:
    weight = next(net.parameters()).data
    weight[0, 0], weight[1, 1] = weight[1, 1].clone(), weight[0, 0].clone()


def fused_step(net: nn.Module) -> None:
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter)
    torch.optim.AdamW(net.parameters(), lr=1e-3, fused=True).step()
    for parameter in net.parameters():
        parameter.grad = None


CHANGES = [flip_sign, permute, write_data, swap_two, fused_step]


@pytest.mark.parametrize("change", CHANGES)
def test_weights_changed_after_the_rollout(change: Any, figures: Any) -> None:
    lean, native = both(Config(rollouts=1), lambda: Hooks(before_update=change))
    assert_same(lean, native)
    assert figures()["replayed"] == 0
    assert any("weights changed" in r or "optimizer stepped" in r for r in figures()["reasons"])


@pytest.mark.parametrize("change", CHANGES)
def test_weights_changed_before_the_flush(change: Any) -> None:
    with pytest.raises((LeanError, RuntimeError)) as caught:
        both(Config(rollouts=1), lambda: Hooks(before_flush=change))
    assert isinstance(caught.value, LeanError) and caught.value.code in ("LG603", "LG604")


class Reusing(Policy):
    """Its output's memory is written again by the next call."""

    last: Tensor | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.last is not None:
            self.last.data.zero_()
        (self.last,) = super().forward(*args, **kwargs)
        return (self.last,)


class Noisy(Policy):
    """Adds noise of its own, so that no two evaluations are the same."""

    def forward(self, latents: Tensor, *args: Any, **kwargs: Any) -> Any:
        return super().forward(latents + 0.01 * torch.randn(latents.shape), *args, **kwargs)


class Counting(Policy):
    """Its output depends on a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shift", torch.zeros(1))
        self.shift: Tensor

    def forward(self, latents: Tensor, *args: Any, **kwargs: Any) -> Any:
        return super().forward(latents + self.shift, *args, **kwargs)


def of_kind(kind: type[Policy], config: Config, hooks: Hooks) -> tuple[Result, Result]:
    results = []
    for lean in (Lean(), None):
        torch.manual_seed(0)
        net = kind()
        results.append(train(lean, net, torch.optim.AdamW(net.parameters(), lr=1e-2), config, hooks))
    return results[0], results[1]


def test_a_network_that_uses_its_output_memory_again(figures: Any) -> None:
    assert_same(*of_kind(Reusing, Config(), Hooks()))
    assert figures()["replayed"] == 12


def test_a_network_that_draws_random_numbers(figures: Any) -> None:
    of_kind(Noisy, Config(rollouts=1), Hooks())
    assert figures()["kept"] == 0 and figures()["reasons"]["the network draws random numbers"] >= 1


@torch.no_grad()
def shift_buffer(net: nn.Module) -> None:
    net.shift.add_(0.5)  # type: ignore[union-attr, operator]


def freeze(net: nn.Module) -> None:
    next(net.parameters()).requires_grad_(False)


def thaw(net: nn.Module) -> None:
    next(net.parameters()).requires_grad_(True)


@pytest.mark.parametrize(
    ("before", "after", "reason"),
    [
        (lambda net: None, shift_buffer, "buffers changed"),
        (lambda net: None, freeze, "trainable changed"),
        (freeze, thaw, "trainable changed"),
    ],
)
def test_what_a_call_depends_on_changed(before: Any, after: Any, reason: str, figures: Any) -> None:
    results = []
    for lean in (Lean(), None):
        torch.manual_seed(0)
        net = Counting()
        before(net)
        hooks = Hooks(before_update=after)
        results.append(train(lean, net, torch.optim.AdamW(net.parameters(), lr=1e-2), Config(rollouts=1), hooks))
    assert_same(*results)
    assert figures()["replayed"] == 0 and any(reason in text for text in figures()["reasons"])


class Averaging(Policy):
    """Keeps running statistics in train mode, as instance norm can: a kept call would change them."""

    def __init__(self) -> None:
        super().__init__()
        self.stats = nn.InstanceNorm1d(4, track_running_stats=True)

    def forward(self, latents: Tensor, *args: Any, **kwargs: Any) -> Any:
        return super().forward(self.stats(latents), *args, **kwargs)


def test_a_network_that_changes_its_buffers(figures: Any) -> None:
    of_kind(Averaging, Config(rollouts=1), Hooks())
    assert figures()["kept"] == 0 and figures()["reasons"]["the network changes its buffers"] >= 1


class TwoFaced(Policy):
    """Clamps its output in eval mode only: without random numbers or buffers, so that only values tell."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        (out,) = super().forward(*args, **kwargs)
        return (out if self.training else out.clamp(-0.2, 0.2),)


def test_the_audit_compares_the_modes(figures: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LEANGRPO_AUDIT", "first")
    assert_same(*of_kind(TwoFaced, Config(rollouts=1), Hooks()))
    assert figures()["kept"] == 0 and any("in train mode" in reason for reason in figures()["reasons"])


def turn_up(net: nn.Module) -> None:
    net.gain = net.gain * 1.5  # type: ignore[operator, assignment]


class Gained(Policy):
    """Its output depends on a tensor that is neither weight nor buffer, which nobody looks at."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = torch.ones(())

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return (super().forward(*args, **kwargs)[0] * self.gain,)


def test_the_audit_compares_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LEANGRPO_AUDIT", "first")
    with pytest.raises(LeanError, match="LG607"):
        of_kind(Gained, Config(rollouts=1), Hooks(before_update=turn_up))


def test_a_second_network_is_told_apart() -> None:
    lean, net, args, ids = kept_once()
    other = Policy()
    assert lean.policy_call(other, *ids, *args)[0].requires_grad and other.calls["grad"] == 1
    with lean.rollout(rows=2, steps=1, trained=1, window=2), torch.no_grad():
        lean.rollout_call(net, [0], 0, *args)
        lean.rollout_call(other, [1], 0, *args)
    assert net.calls["grad"] == 2 and other.calls == {"grad": 1, "no_grad": 1}


def test_an_argument_that_cannot_be_compared() -> None:
    class Cache:
        value = 1

    lean, net = Lean(), nn.Bilinear(2, 2, 2)
    net.forward = lambda x, cache: nn.functional.linear(x, net.weight[0])  # type: ignore[method-assign]
    with lean.rollout(rows=1, steps=1, trained=1, window=1), torch.no_grad():
        lean.rollout_call(net, [0], 0, torch.ones(1, 2), Cache())
    lean.step_order(1, 1)
    ids = lean.identity()
    assert lean.policy_call(net, ids["lean_row"], [0], torch.ones(1, 2), Cache()).requires_grad


def test_a_replay_without_gradient_is_counted(figures: Any) -> None:
    hooks = Hooks(backward=lambda loss: None)
    torch.manual_seed(0)
    net = Policy()
    train(Lean(), net, torch.optim.SGD(net.parameters()), Config(rollouts=1), hooks)
    assert figures()["reasons"]["replayed, but no gradient came back"] == 12


class Switched(Policy):
    """Computes in the precision that an attribute names, and sets up another one at its first call."""

    def __init__(self) -> None:
        super().__init__()
        self.precision = "high"
        self.table: Tensor | None = None

    def forward(self, latents: Tensor, *args: Any, **kwargs: Any) -> Any:
        if self.table is None:
            self.table = torch.ones(1)
        return super().forward(latents * (self.table if self.precision == "high" else 0.9), *args, **kwargs)


@pytest.mark.parametrize("switches", [False, True])
def test_a_precision_that_is_switched_for_the_rollout(switches: bool, figures: Any) -> None:
    """As trainers with a quantised rollout do: neither weights nor inputs tell."""

    def set_to(precision: str) -> Callable[[nn.Module], None]:
        return lambda net: setattr(net, "precision", precision if switches else "high")

    results = []
    for lean in (Lean(), None):
        torch.manual_seed(0)
        net = Switched()
        set_to("low")(net)
        hooks = Hooks(before_update=set_to("high"))
        results.append(train(lean, net, torch.optim.AdamW(net.parameters(), lr=1e-2), Config(rollouts=1), hooks))
    assert_same(*results)
    assert figures()["replayed"] == (0 if switches else 12)
    assert any(".precision changed since" in text for text in figures()["reasons"]) == switches


class Adapted(Policy):
    """As a peft layer does, it computes something else when its adapter is off."""

    active_adapters = ("default",)
    disable_adapters = False

    def forward(self, latents: Tensor, *args: Any, **kwargs: Any) -> Any:
        return super().forward(latents * (0.5 if self.disable_adapters else 1.0), *args, **kwargs)


def test_an_adapter_switched_off_after_the_rollout(figures: Any) -> None:
    results = []
    for lean in (Lean(), None):
        torch.manual_seed(0)
        net = Adapted()
        hooks = Hooks(before_update=lambda net: setattr(net, "disable_adapters", True))
        results.append(train(lean, net, torch.optim.AdamW(net.parameters()), Config(rollouts=1), hooks))
    assert_same(*results)
    assert figures()["replayed"] == 0 and figures()["reasons"]["adapters changed since the rollout"] > 0


@pytest.mark.parametrize("amount", [1e-6, 1.0])
def test_other_inputs(amount: float, figures: Any) -> None:
    def change(latents: Tensor, row: int, step: int) -> Tensor:
        return latents + amount if row == 1 else latents

    lean, native = both(Config(rollouts=1), lambda: Hooks(update_latents=change))
    assert_same(lean, native)
    assert figures()["replayed"] == 9 and figures()["recomputed"] == 3
    assert any("differs by up to" in reason for reason in figures()["reasons"])


def test_nan_differs_from_everything(figures: Any) -> None:
    """Also from the same NaN in the rollout: the call is recomputed and upstream sees its own NaN."""
    with pytest.raises(AssertionError, match="relative L2 nan"):
        assert_same(*both(Config(rollouts=1), lambda: Hooks(update_latents=lambda x, row, step: x * torch.nan)))
    assert figures()["replayed"] == 0 and figures()["recomputed"] == 12


def test_a_wider_dtype_with_the_same_values_is_replayed(figures: Any) -> None:
    """The first latent of some trainers is bf16 in the rollout and fp32 in the update."""
    lean, net = Lean(), Policy()
    x, t, p = torch.randn(1, 4, 8).bfloat16(), torch.zeros(1), torch.randn(1, 8)
    with lean.rollout(rows=1, steps=1, trained=1, window=1), torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        lean.rollout_call(net, [0], 0, x, t, p)
    lean.step_order(1, 1)
    ids = lean.identity()
    with torch.autocast("cpu", torch.bfloat16):
        lean.policy_call(net, ids["lean_row"], ids["lean_step"], x.float(), t, p)[0].sum().backward()
    lean.flush(net, None)
    assert figures()["replayed"] == 1


def test_steps_in_another_order(figures: Any) -> None:
    lean, native = both(Config(), lambda: Hooks(steps_of=lambda order: order[:, :3].flip(1)))
    assert_same(lean, native)
    assert figures()["replayed"] == 12


def test_steps_that_were_not_selected(figures: Any) -> None:
    lean, native = both(Config(), lambda: Hooks(steps_of=lambda order: order.flip(1)))
    assert_same(lean, native)
    assert figures()["replayed"] == 0 and figures()["recomputed"] == 12


def test_network_called_twice_per_step(figures: Any) -> None:
    lean, native = both(Config(), lambda: Hooks(extra_calls=1))
    assert_same(lean, native)
    assert figures()["replayed"] == 0
    assert figures()["reasons"] == {"the network was called twice for one step and site": 12}


def test_backward_twice_is_refused() -> None:
    def twice(loss: Tensor) -> None:
        loss.backward(retain_graph=True)
        loss.backward()

    with pytest.raises(LeanError, match="LG605"):
        both(Config(), lambda: Hooks(backward=twice))


def test_zero_advantage_is_walked(figures: Any) -> None:
    """Zeros, not None: AdamW moves weights by momentum and decay where a gradient is zero."""
    lean, native = both(Config(), lambda: Hooks(advantages=torch.zeros_like))
    assert_same(lean, native)
    assert all(grad is not None and not grad.any() for grad in lean.gradients[0].values())


def test_loss_without_the_output(figures: Any) -> None:
    """A loss that does not depend on some calls leaves None where the native trainer has None."""
    hooks = Hooks(
        update_output=lambda out, row, step: out if row else out.detach(),
        backward=lambda loss: loss.backward() if loss.requires_grad else None,
    )
    assert_same(*both(Config(rollouts=1), lambda: hooks))


def test_inference_mode(figures: Any) -> None:
    lean, native = both(Config(rollouts=1), lambda: Hooks(rollout_context=torch.inference_mode))
    assert_same(lean, native)
    assert figures()["kept"] == 0 and figures()["recomputed"] == 12


def test_active_dropout(figures: Any) -> None:
    lean, native = both(Config(rollouts=1), lambda: Hooks(), dropout=0.3)
    assert_same(lean, native)
    assert figures()["kept"] == 0 and any("dropout 0.3" in reason for reason in figures()["reasons"])


def test_step_without_flush_is_refused() -> None:
    with pytest.raises(LeanError, match="LG603"):
        both(Config(), lambda: Hooks(no_flush=True))


def test_new_rollout_without_flush_is_refused() -> None:
    with pytest.raises(LeanError, match="LG610"):
        both(Config(accumulate=5), lambda: Hooks())


class Pair(NamedTuple):
    sample: Tensor
    extra: int


@dataclass
class Output:
    sample: Tensor
    note: str = "text"

    def __getitem__(self, index: int) -> Tensor:
        return self.sample


@pytest.mark.parametrize("wrap", [lambda out: Pair(out, 3), Output, lambda out: [out, None], lambda out: {0: out}])
def test_containers_keep_their_type(wrap: Any, figures: Any) -> None:
    results = []
    for lean in (Lean(), None):
        torch.manual_seed(0)
        net = Policy()
        net.wrap = wrap
        seen: set[type] = set()
        if lean is not None:
            for name in ("rollout_call", "policy_call"):
                call = getattr(lean, name)

                def typed(*args: Any, call: Any = call, seen: set[type] = seen, **kwargs: Any) -> Any:
                    value = call(*args, **kwargs)
                    seen.add(type(value))
                    return value

                setattr(lean, name, typed)
        results.append(train(lean, net, torch.optim.AdamW(net.parameters()), Config()))
        if lean is not None:
            assert seen == {type(wrap(torch.zeros(1)))}
    assert_same(*results)
    assert figures()["replayed"] == 12


def test_a_container_that_cannot_be_rebuilt(figures: Any) -> None:
    class Opaque(SimpleNamespace):
        def __getitem__(self, index: int) -> Tensor:
            return self.sample

    results = []
    for lean in (Lean(), None):
        torch.manual_seed(0)
        net = Policy()
        net.wrap = lambda out: Opaque(sample=out)
        results.append(train(lean, net, torch.optim.AdamW(net.parameters()), Config()))
    assert_same(*results)
    assert figures()["kept"] == 0 and any("cannot be rebuilt" in reason for reason in figures()["reasons"])


def test_nothing_is_kept_outside_a_window(figures: Any) -> None:
    """Evaluation goes through the same functions: without a window, without rows, or in the update's phase."""
    lean, net = Lean(), Policy()
    args = (torch.randn(1, 4, 8), torch.zeros(1), torch.randn(1, 8))
    with torch.no_grad():
        lean.rollout_call(net, [0], 0, *args)
        with lean.rollout(rows=1, steps=1, trained=1, window=1):
            lean.rollout_call(net, None, 0, *args)
        lean.rollout_call(net, [0], 0, *args)
    assert net.calls == {"grad": 0, "no_grad": 3}


def test_reference_forward_is_native() -> None:
    """A policy call under no_grad (a KL reference) is never answered from the tape."""
    lean, net, args, ids = kept_once()
    with torch.no_grad():
        assert not lean.policy_call(net, *ids, *args)[0].requires_grad
    assert net.calls == {"grad": 1, "no_grad": 1}
    assert lean.policy_call(net, *ids, *args)[0].requires_grad
    assert net.calls == {"grad": 1, "no_grad": 1}


def test_samples_of_an_older_rollout_never_match() -> None:
    lean, net = Lean(), Policy()
    args = (torch.randn(1, 4, 8), torch.zeros(1), torch.randn(1, 8))
    old = None
    for _ in range(2):
        with lean.rollout(rows=1, steps=1, trained=1, window=1), torch.no_grad():
            lean.rollout_call(net, [0], 0, *args)
        lean.step_order(1, 1)
        old = old or lean.identity()
    lean.policy_call(net, old["lean_row"], old["lean_step"], *args)  # type: ignore[index]
    assert net.calls["grad"] == 3  # two kept, one native


def test_gradient_into_the_arguments_is_not_cut_off() -> None:
    """A trained prompt embedding needs its gradient through the network."""
    lean, net, (latents, time, prompt), ids = kept_once()
    trained = prompt.clone().requires_grad_()
    lean.policy_call(net, *ids, latents, time, trained)[0].sum().backward()
    assert trained.grad is not None and trained.grad.any()


def kept_once() -> tuple[Lean, Policy, tuple[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]:
    lean, net = Lean(), Policy()
    args = (torch.randn(1, 4, 8), torch.zeros(1), torch.randn(1, 8))
    with lean.rollout(rows=1, steps=1, trained=1, window=1), torch.no_grad():
        lean.rollout_call(net, [0], 0, *args)
    lean.step_order(1, 1)
    ids = lean.identity()
    return lean, net, args, (ids["lean_row"], ids["lean_step"])


def test_a_row_is_consumed_once() -> None:
    lean, net, args, ids = kept_once()
    lean.policy_call(net, *ids, *args)
    assert net.calls["grad"] == 1
    lean.policy_call(net, *ids, *args)
    assert net.calls["grad"] == 2


def test_another_autocast_state_is_recomputed() -> None:
    lean, net, args, ids = kept_once()
    with torch.autocast("cpu", torch.bfloat16):
        assert lean.policy_call(net, *ids, *args)[0].dtype == torch.bfloat16
    assert net.calls["grad"] == 2


def test_another_site_is_recomputed() -> None:
    lean, net, args, ids = kept_once()
    lean.policy_call(net, *ids, *args, site="uncond")
    assert net.calls["grad"] == 2


@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune"])
def test_cuda_graph_modes_of_compile_are_named(mode: str) -> None:
    assert guard.uses_cuda_graphs(torch.compile(nn.Linear(2, 2), mode=mode))  # type: ignore[arg-type]
    in_place = nn.Sequential(nn.Linear(2, 2))
    in_place[0].compile(mode=mode)
    assert guard.uses_cuda_graphs(in_place)
    assert not guard.uses_cuda_graphs(torch.compile(nn.Linear(2, 2)))  # type: ignore[arg-type]


def test_a_failing_rollout_leaves_no_window() -> None:
    lean, net = Lean(), Policy()
    with pytest.raises(ZeroDivisionError), lean.rollout(rows=1, steps=1, trained=1, window=1):
        raise ZeroDivisionError
    assert lean.policy_call(net, [0], [0], torch.randn(1, 4, 8), torch.zeros(1), torch.randn(1, 8))[0].requires_grad


def test_a_wrong_flush_is_caught_by_the_audit(monkeypatch: pytest.MonkeyPatch) -> None:
    from leangrpo_core import replay

    monkeypatch.setenv("LEANGRPO_AUDIT", "first")
    walk = replay.walk

    def wrong(window: Any, wrapper: Any, net: nn.Module, calls: Any) -> None:
        walk(window, wrapper, net, calls)
        next(net.parameters()).grad.mul_(-1)  # type: ignore[union-attr]

    monkeypatch.setattr(replay, "walk", wrong)
    with pytest.raises(LeanError, match="LG607"):
        both(Config(), lambda: Hooks())
