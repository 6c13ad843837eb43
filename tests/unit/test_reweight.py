"""Reweight on one rank: every update has the native gradient, whatever the loss does with the samples.

The bounds are those of fp32 with another order of multiplications: 2e-6 with a buffer per sample, 5e-6 with two per
group. Where the loss is not of the form that reweighting assumes, samples are recomputed, which must be as exact.
Where a call of the rollout has other rows than one of the update, fp32 rounds otherwise on each machine: fp64 there.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import batched, epoch
from support.check import assert_same
from support.grpo import Config, Hooks, Policy, Result, train
from torch import Tensor, nn

from leangrpo_core import Lean, LeanError
from leangrpo_core.reweight.buffers import Buffers

BOUND = {"sample": 2e-6, "affine": 5e-6}
EXACT = 300 * torch.finfo(torch.float64).eps
Windows = Callable[[], list[dict[str, Any]]]


@pytest.fixture(autouse=True)
def _reweight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LEANGRPO_SCHEDULE", "reweight")


@pytest.fixture(params=["sample", "affine"])
def buffers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("LEANGRPO_BUFFERS", request.param)
    return request.param


def run(lean: Lean | None, config: Config, hooks: Hooks | None = None, **policy: Any) -> Result:
    torch.manual_seed(0)
    net = Policy(**policy)
    return train(lean, net, torch.optim.AdamW(net.parameters(), lr=1e-3), config, hooks)


def compare(bound: float, config: Config, hooks: Callable[[], Hooks] = Hooks, **policy: Any) -> tuple[Result, Result]:
    """Trains twice; `hooks` are made anew for each, since some count. Weights drift apart by rounding only."""
    native, lean = run(None, config, hooks(), **policy), run(Lean(), config, hooks(), **policy)
    assert_same(lean, native, rtol=bound)
    return lean, native


@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointing"])
@pytest.mark.parametrize("accumulate", [4, 2, 1])
def test_exact(accumulate: int, checkpointing: bool, buffers: str, windows: Windows) -> None:
    config = Config(accumulate=accumulate)
    lean, native = compare(BOUND[buffers], config, checkpointing=checkpointing)
    replayed = accumulate * config.trained
    assert [(w["kept"], w["replayed"], w["recomputed"]) for w in windows()] == [(replayed, replayed, 0)] * 2
    # As many forwards as with kept graphs: none of the first update's is made again.
    assert lean.calls["grad"] == native.calls["grad"]
    assert lean.calls["no_grad"] == native.calls["no_grad"] - 2 * replayed


def test_no_graph_is_held_while_the_next_step_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a call leaves behind is as large as its output, and the graph is gone when its log-prob is there."""
    alive: list[int] = []

    class Counting(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return Held.apply(x)

    class Held(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.token = Token()
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Tensor:
            return grads[0]

    class Token:
        living = 0

        def __init__(self) -> None:
            Token.living += 1

        def __del__(self) -> None:
            Token.living -= 1

    net = Policy()
    net.drop = Counting()  # type: ignore[assignment]
    hooks = Hooks(rollout_output=lambda out, row, step: alive.append(Token.living) or out)
    train(Lean(), net, torch.optim.AdamW(net.parameters()), Config(rollouts=1), hooks)
    assert max(alive) == 1 and Token.living == 0


@pytest.mark.parametrize("per_group", [1, 4, 16])
def test_affine_buffers_hold_three_gradients_whatever_the_group(
    per_group: int, monkeypatch: pytest.MonkeyPatch, windows: Windows
) -> None:
    monkeypatch.setenv("LEANGRPO_BUFFERS", "affine")
    peaks, made = [], []
    original = Buffers.__init__

    def follow(self: Buffers, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        made.append(self)

    def count(net: nn.Module) -> None:
        living = {
            id(t): t.numel()
            for g in made[-1].groups.values()
            for part in (g.sums, g.products or [])
            for t in part
            if t is not None
        } | {id(t): t.numel() for grads in made[-1].single.values() for t in grads if t is not None}
        peaks.append(sum(living.values()) / sum(p.numel() for p in net.parameters()))

    monkeypatch.setattr(Buffers, "__init__", follow)
    config = Config(rows=per_group, accumulate=per_group, trained=2, steps=3, rollouts=1)
    raw = [0.3, -0.1, 0.7, 0.2] * 4
    given, reward = lambda _: torch.tensor(raw[:per_group]), lambda _, row: torch.tensor([raw[row]])
    native = run(None, config, Hooks(advantages=given, reward=reward))
    lean = run(Lean(), config, Hooks(advantages=given, reward=reward, after_rollout=count))
    assert_same(lean, native, rtol=5e-6)
    assert made[-1].peak == min(per_group, 3)
    assert peaks[-1] <= 2.0
    assert windows()[0]["recomputed"] == 0


@pytest.mark.parametrize("offset", [10.0, 1000.0])
def test_affine_buffers_are_centred(offset: float, monkeypatch: pytest.MonkeyPatch, windows: Windows) -> None:
    monkeypatch.setenv("LEANGRPO_BUFFERS", "affine")
    compare(5e-6, Config(rows=8, accumulate=8), lambda: Hooks(reward=lambda reward, row: reward + offset))
    assert [window["recomputed"] for window in windows()] == [0, 0]


@pytest.mark.parametrize("place", [0, 2])
@pytest.mark.parametrize("far", [-1e3, -1e5, -1e7])
def test_a_far_reward_that_upstream_clamps(far: float, place: int, buffers: str, windows: Windows) -> None:
    """Its group's line would be made of sums in which the other samples are rounded away."""
    config = Config(rows=6, accumulate=6)

    def hooks() -> Hooks:
        seen: list[Tensor] = []

        def reward(reward: Tensor, row: int) -> Tensor:
            seen.append(torch.full_like(reward, far) if row == place else reward)
            return seen[-1]

        def advantages(_: Tensor) -> Tensor:
            clamped = torch.cat(seen[-6:]).clamp(-1, 1)
            return (clamped - clamped.mean()) / (clamped.std() + 1e-8)

        return Hooks(reward=reward, advantages=advantages)

    compare(BOUND[buffers], config, hooks)
    if buffers == "affine":
        assert windows()[0]["replayed"] == 0 and "so far from" in str(windows()[0]["reasons"])


Term = Callable[[Tensor, Tensor], Tensor]
TERMS: dict[str, Term] = {
    "difference": lambda new, old: (new - old).mean(),
    "product": lambda new, old: 0.05 * (new * old).mean(),
    "square": lambda new, old: (new - 0.5 * old).square().mean(),
}


@pytest.mark.parametrize("term", TERMS)
@pytest.mark.parametrize("made_of_it", [False, True])
def test_what_the_rollout_keeps_of_an_output_may_be_part_of_the_loss(made_of_it: bool, term: str, buffers: str) -> None:
    """As natively, where it has no graph: its gradient reaches nothing, and is not taken for the update's."""

    def hooks() -> Hooks:
        old: dict[tuple[int, int], Tensor] = {}
        new: list[tuple[Tensor, Tensor]] = []

        def keep(out: Tensor, row: int, step: int) -> Tensor:
            old[row, step] = out.sin() if made_of_it else out
            return old[row, step]

        def trained(out: Tensor, row: int, step: int) -> Tensor:
            out = out.sin() if made_of_it else out
            new.append((out, old[row, step]))
            return out

        return Hooks(rollout_output=keep, update_output=trained, loss=lambda loss: loss + TERMS[term](*new[-1]))

    compare(BOUND[buffers], Config(), hooks)


@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_on_weights_see_upstreams_own_gradients(kind: str, buffers: str, windows: Windows) -> None:
    """They need not be linear, and may come later than the first window."""

    def hooks() -> Hooks:
        done: list[bool] = []

        def clamp(grad: Tensor) -> Tensor:
            return grad.clamp(-1e-3, 1e-3)

        def in_place(weight: Tensor) -> None:
            assert weight.grad is not None
            weight.grad.clamp_(-1e-3, 1e-3)

        def register(net: nn.Module) -> None:
            for weight in [] if done else net.parameters():
                getattr(weight, kind)(clamp if kind == "register_hook" else in_place)
            done.append(True)

        return Hooks(after_step=register)

    compare(BOUND[buffers], Config(rollouts=3), hooks)
    assert "graphs" not in windows()[0] and windows()[-1]["gradients"] == 0


def clipped(advantages: Tensor) -> Tensor:
    return advantages.clamp(-0.5, 0.5)


def two_rewards(advantages: Tensor) -> Tensor:
    return 0.7 * advantages + 0.3 * torch.tensor([0.4, -1.0, 0.1, 0.5])


def of_another_group(advantages: Tensor) -> Tensor:
    return advantages * torch.tensor([1.0, 1.0, 2.0, 2.0])


ADVANTAGES: dict[str, tuple[Callable[[Tensor], Tensor], dict[str, list[int]]]] = {
    # Which samples are recomputed, per window and kind of buffer: steps.
    "as they are": (lambda a: a, {"sample": [0, 0], "affine": [0, 0]}),
    "clipped": (clipped, {"sample": [0, 0]}),
    "two rewards": (two_rewards, {"sample": [0, 0]}),
    "another group's": (of_another_group, {"sample": [0, 0]}),
    "zero": (torch.zeros_like, {"sample": [0, 0], "affine": [0, 0]}),
    "one is zero": (lambda a: a * torch.tensor([1.0, 0.0, 1.0, 1.0]), {"sample": [0, 0], "affine": [3, 3]}),
}


@pytest.mark.parametrize("name", ADVANTAGES)
def test_any_advantage_per_sample(name: str, buffers: str, windows: Windows) -> None:
    """One number per sample is exact with a buffer each. What is not affine in the reward is recomputed."""
    change, expected = ADVANTAGES[name]
    compare(BOUND[buffers], Config(), lambda: Hooks(advantages=change))
    if buffers in expected:
        assert [window["recomputed"] for window in windows()] == expected[buffers]


def test_the_same_reward_for_all(buffers: str, windows: Windows) -> None:
    """Zero variance: advantages are zero; and if they are not, one number for all."""
    same = lambda reward, row: torch.ones(1)  # noqa: E731
    for change in (lambda a: a, lambda a: torch.full_like(a, 0.7)):
        compare(BOUND[buffers], Config(rollouts=1), lambda change=change: Hooks(reward=same, advantages=change))
    assert [window["recomputed"] for window in windows()] == [0, 0]


class PerStep:
    """A loss in which each step has a weight of its own."""

    def __init__(self, weights: list[float]) -> None:
        self.weights, self.made = weights, 0

    def __call__(self, loss: Tensor) -> Tensor:
        self.made += 1
        return loss * self.weights[(self.made - 1) % len(self.weights)]


@pytest.mark.parametrize("weights", [[1.0, 0.5, 2.0], [1.0, 1.0, 1.0 + 1e-4], [1.0, 0.0, 1.0], [0.0, 0.0, 0.0]])
def test_weights_per_step(weights: list[float], buffers: str, windows: Windows) -> None:
    """A sample whose steps count unequally is no multiple of its buffer, however small the difference."""
    compare(BOUND[buffers], Config(rollouts=1), lambda: Hooks(loss=PerStep(weights)))
    (window,) = windows()
    unequal = len(set(weights)) > 1
    assert (window["replayed"], window["recomputed"]) == ((0, 12) if unequal else (12, 0))
    if unequal:
        assert window["reasons"] == {"the loss weights a sample's steps unequally": 12}


def test_after_a_window_in_vain_graphs_are_kept(windows: Windows, capsys: pytest.CaptureFixture[str]) -> None:
    compare(2e-6, Config(), lambda: Hooks(loss=PerStep([1.0, 0.5, 2.0])))
    first, second = windows()
    assert (first["replayed"], first["recomputed"]) == (0, 12)
    assert (second["replayed"], second["recomputed"]) == (12, 0) and second["peak_held_bytes"] > 0
    assert capsys.readouterr().out.count("as with LEANGRPO_SCHEDULE=retain") == 1


@pytest.mark.usefixtures("in_float64")
def test_a_kl_term_is_no_multiple(windows: Windows, capsys: pytest.CaptureFixture[str]) -> None:
    config = epoch.Config(reference=True)

    def once(lean: Lean | None) -> Result:
        torch.manual_seed(0)
        return epoch.train(lean, batched.Network(), config, None if lean else epoch.first_batches_first(config))

    assert_same(once(Lean()), once(None), rtol=EXACT)
    first, second = windows()
    assert first["reasons"] == {"the loss's gradient is no multiple of the log-prob's": first["kept"]}
    assert second["recomputed"] == 0
    assert capsys.readouterr().out.count("the loss's gradient is no multiple of the log-prob's: from here on") == 1


def test_values_that_are_not_finite_are_upstreams_own(buffers: str) -> None:
    """A reward that is NaN makes NaN natively; no update gets better or worse."""
    config = Config(rollouts=1)

    def hooks() -> Hooks:
        return Hooks(advantages=lambda a: a * torch.tensor([1.0, float("nan"), 1.0, 1.0]))

    native, lean = run(None, config, hooks()), run(Lean(), config, hooks())
    for name, grad in native.gradients[0].items():
        ours = lean.gradients[0][name]
        assert grad is not None and ours is not None and torch.equal(grad.isnan(), ours.isnan()), name
        assert grad.isnan().all()


def test_a_reward_that_is_not_finite_is_not_folded(monkeypatch: pytest.MonkeyPatch, windows: Windows) -> None:
    """Upstream may leave such a sample out of its statistics; the sums must not hold it."""
    monkeypatch.setenv("LEANGRPO_BUFFERS", "affine")
    nan = lambda reward, row: reward * float("nan") if row == 1 else reward  # noqa: E731
    given = torch.tensor([0.5, 0.0, -0.25, 1.0])
    compare(5e-6, Config(rollouts=1), lambda: Hooks(reward=nan, advantages=lambda a: given))


@pytest.mark.parametrize("later", [(0, 1, 2, 3), (3, 1, 0, 2), (2,), ()])
def test_rewards_that_come_late_or_out_of_order_or_never(
    later: tuple[int, ...], monkeypatch: pytest.MonkeyPatch, windows: Windows, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LEANGRPO_BUFFERS", "affine")
    compare(5e-6, Config(), lambda: Hooks(rewards_later=later))
    assert [window["recomputed"] for window in windows()] == [0, 0]
    assert capsys.readouterr().out.count("one gradient is kept per sample") == 1


@pytest.mark.parametrize("change", ["dropped step", "changed input"])
def test_a_step_that_is_not_replayed_costs_its_sample_the_buffer(change: str, buffers: str, windows: Windows) -> None:
    """The buffer holds a step that the update trains elsewhere, or not at all."""
    if change == "changed input":
        moved = lambda latents, row, step: latents + 1e-3 * (row == 1)  # noqa: E731
        compare(BOUND[buffers], Config(rollouts=1), lambda: Hooks(update_latents=moved))
        expected = 3
    else:

        def others(order: Tensor) -> Tensor:  # row 2 trains a step that was not announced, in place of one that was
            order = order.clone()
            order[2, 0] = order[2, -1]
            return order

        compare(BOUND[buffers], Config(rollouts=1), lambda: Hooks(steps_of=others))
        expected = 3
    (window,) = windows()
    assert window["recomputed"] == expected if buffers == "sample" else window["recomputed"] >= expected


def test_weights_that_change_in_between_stop_the_run(buffers: str) -> None:
    def change(net: nn.Module) -> None:
        with torch.no_grad():
            next(net.parameters()).mul_(1.01)

    with pytest.raises(LeanError) as caught:
        run(Lean(), Config(), Hooks(before_flush=change))
    assert caught.value.code == "LG604"


def test_weights_that_change_before_the_update_are_noticed(windows: Windows) -> None:
    def change(net: nn.Module) -> None:
        with torch.no_grad():
            next(net.parameters()).mul_(1.01)

    compare(2e-6, Config(rollouts=1), lambda: Hooks(before_update=change))
    assert windows()[0]["replayed"] == 0


def test_an_argument_written_in_place_stops_a_recomputation() -> None:
    """The call can no longer be made as it was; nothing wrong is used."""
    held: list[Tensor] = []

    def write(net: nn.Module) -> None:
        for latents in held:
            latents.add_(1.0)

    def hooks() -> Hooks:
        return Hooks(
            update_latents=lambda latents, row, step: held.append(latents.clone()) or held[-1],
            loss=PerStep([1.0, 0.5, 2.0]), before_flush=write,
        )  # fmt: skip

    with pytest.raises(LeanError) as caught:
        run(Lean(), Config(), hooks())
    assert caught.value.code == "LG614"


@pytest.mark.parametrize("gradients", [0, 2, 9])
def test_budget_counts_gradients(gradients: int, monkeypatch: pytest.MonkeyPatch, windows: Windows) -> None:
    one = sum(p.numel() for p in Policy().parameters()) * 4
    monkeypatch.setenv("LEANGRPO_BUDGET_GB", str((gradients + 0.5) * one / 1e9))
    compare(2e-6, Config(rollouts=1))
    (window,) = windows()
    kept = min(gradients, 4) * 3
    assert (window["kept"], window["replayed"], window["recomputed"]) == (kept, kept, 12 - kept)
    assert window["reasons"] == ({"over LEANGRPO_BUDGET_GB": 12 - kept} if kept < 12 else {})


def test_a_tree_without_its_step_function_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the rollout went on with would have a graph; the run is stopped, in upstream's own grad mode."""
    monkeypatch.setattr(Lean, "scored", lambda self, step, *args: step(*args))
    with pytest.raises(LeanError) as caught, torch.no_grad():
        run(Lean(), Config())
    assert caught.value.code == "LG610" and torch.is_grad_enabled()


def test_a_step_function_without_a_log_prob(monkeypatch: pytest.MonkeyPatch, windows: Windows) -> None:
    original = Lean.scored

    def hidden(self: Lean, step: Any, *args: Any) -> Any:
        kept: list[Any] = []
        latents = original(self, lambda *a: kept.extend(torch.no_grad()(step)(*a)) or kept[0].clone(), *args)
        return latents, kept[1]

    monkeypatch.setattr(Lean, "scored", hidden)
    compare(0.0, Config())
    assert windows()[0]["reasons"] == {"no log-prob with a gradient is among what the step function returns": 12}


def test_evaluation_is_inert() -> None:
    """Outside a window the wrapped step function is upstream's own call."""
    out = Lean().scored(lambda x: (x * 2, x.sum()), torch.ones(2, requires_grad=True))
    assert all(item.requires_grad for item in out)


@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize("trained_only", ["all", "adapters"])
@pytest.mark.parametrize(
    "config",
    [
        batched.Config(rollouts=1),
        batched.Config(rollouts=1, trained=3, guidance=False, train_guidance=False),
        batched.Config(rollouts=1, train_batch=2, accumulate=1),
    ],
    ids=["guidance", "some steps", "half batches"],
)
def test_batches(config: batched.Config, trained_only: str, windows: Windows) -> None:
    """Several samples per call: apart by per-sample gradients where only linear layers train, else in calls of one."""

    def once(lean: Lean | None) -> Result:
        torch.manual_seed(0)
        net = batched.Network()
        for name, parameter in net.named_parameters():
            parameter.requires_grad_(trained_only == "all" or ".up." in name)
        return batched.train(lean, net, config)

    assert_same(once(Lean()), once(None), rtol=EXACT)
    first = config.train_batch * config.accumulate * config.trained
    assert [(w["kept"], w["recomputed"]) for w in windows()] == [(first, 0)]
    calls = windows()[0]["calls"]
    assert calls == first if trained_only == "all" else calls <= config.batches * config.steps


@pytest.mark.usefixtures("in_float64")
def test_two_calls_per_step(windows: Windows) -> None:
    """Guidance as a second call of the step: the log-prob's gradient reaches both. Each step begins without grad."""
    config, modes = epoch.Config(rollouts=1), list[bool]()

    def once(lean: Lean | None) -> Result:
        torch.manual_seed(0)
        hooks = epoch.Hooks() if lean else epoch.first_batches_first(config)
        hooks.in_rollout = lambda batch, step: modes.append(torch.is_grad_enabled())
        return epoch.train(lean, batched.Network(), config, hooks)

    assert_same(once(Lean()), once(None), rtol=EXACT)
    (window,) = windows()
    assert window["kept"] == window["replayed"] == 36 and not any(modes)


def test_bf16_is_as_near_to_fp64_as_native() -> None:
    """Gradients of one rollout under bf16 autocast, natively and reweighted, against the same losses in fp64."""
    recorded: list[tuple[Any, ...]] = []
    config = Config(rollouts=1, rows=16, accumulate=16, bf16=True, tokens=16)

    class Recording(Policy):
        def forward(self, latents: Tensor, timestep: Tensor, prompt: Tensor, scale: float = 1.0) -> Any:
            if self.training and torch.is_autocast_enabled("cpu"):
                recorded.append((latents, timestep, prompt))
            return super().forward(latents, timestep, prompt, scale)

    def once(lean: Lean | None, hooks: Hooks) -> tuple[Result, nn.Module]:
        torch.manual_seed(0)
        net = Recording()
        before = {name: p.detach().clone() for name, p in net.named_parameters()}
        result = train(lean, net, torch.optim.SGD(net.parameters(), lr=0.0), config, hooks)
        net.load_state_dict(before, strict=True)
        return result, net

    cotangents: list[Tensor] = []

    def follow(out: Tensor, row: int, step: int) -> Tensor:
        out.register_hook(lambda grad: cotangents.append(grad.detach().double()))
        return out

    native, net = once(None, Hooks(update_output=follow))
    inputs = list(recorded)
    lean, _ = once(Lean(), Hooks())
    exact = Policy().double()
    exact.load_state_dict({name: p.double() for name, p in net.state_dict().items()})
    for call, cotangent in zip(inputs, cotangents, strict=True):
        exact(*(item.double() for item in call))[0].backward(cotangent)
    truth = {name: p.grad for name, p in exact.named_parameters()}

    def distance(result: Result) -> float:
        pairs = [(result.gradients[0][name], grad) for name, grad in truth.items()]
        off = sum(float((a.double() - b).square().sum()) for a, b in pairs if a is not None and b is not None)
        return (off / sum(float(b.square().sum()) for _, b in pairs if b is not None)) ** 0.5

    assert 1e-4 < distance(native) < 5e-2
    assert distance(lean) <= 1.1 * distance(native)
