"""LEANGRPO_LAYOUT=shared and LEANGRPO_UPDATES=on-policy against a native training of the same samples."""

import math
from typing import Any

import pytest
import torch
from support import ranks
from support.parted import STEPS, TRAINED, Run, Sizes, both, check, job
from support.wrapped import UNITS

from leangrpo_core import Lean, LeanError
from leangrpo_core.layout.teams import fingerprint

SHARED = {"LEANGRPO_LAYOUT": "shared"}
LATE = {"LEANGRPO_SYNC": "late"}
ON_POLICY = {"LEANGRPO_UPDATES": "on-policy"}
MATRIX = pytest.mark.matrix


def run(world: int, kind: str, sizes: Sizes, env: dict[str, str], natively: Sizes | None = None) -> Any:
    found = ranks.run(both, world, kind, sizes, env, natively or sizes)
    return [ours for ours, _ in found], [native for _, native in found]


NORMAL = {
    "three samples a rank": (2, "fsdp", Sizes(group=6, update=6), {}),
    "pairs of ranks": (4, "ddp", Sizes(group=6, update=6), {}),
    "two prompts, an update each": (2, "fsdp2", Sizes(prompts=2, until=4), {}),
    "averaged where upstream does not": (2, "none", Sizes(), LATE),
}
WIDE = {
    "one sample a rank, late": (2, "fsdp", Sizes(group=2, update=2), LATE),
    "more ranks than samples": (4, "ddp", Sizes(group=2, update=2), {}),
    "half a prompt per update": (2, "fsdp", Sizes(update=2, until=4), LATE),
    "an update that ends inside a prompt": (2, "fsdp", Sizes(prompts=2, group=6, update=4, until=3), {}),
    "four ranks, FSDP2, late": (4, "fsdp2", Sizes(prompts=2, update=8), LATE),
    "per group": (2, "fsdp", Sizes(prompts=2, update=8), {"LEANGRPO_SYNC": "group"}),
}
CASES = [pytest.param(*case, id=name) for name, case in NORMAL.items()]
CASES += [pytest.param(*case, id=name, marks=MATRIX) for name, case in WIDE.items()]


@pytest.mark.parametrize(("world", "kind", "sizes", "env"), CASES)
def test_shared_prompts(world: int, kind: str, sizes: Sizes, env: dict[str, str]) -> None:
    if kind == "none":  # natively nothing is averaged: DDP stands in
        ours = ranks.run(job, world, kind, sizes, SHARED | env)
        native = ranks.run(job, world, "ddp", sizes, None)
        for reference in native:
            reference.weights = [{n.removeprefix("module."): w for n, w in each.items()} for each in reference.weights]
    else:
        ours, native = run(world, kind, sizes, SHARED | env)
    check(ours, native)
    team = math.gcd(sizes.group, world)
    first = min(sizes.update, sizes.group) // team
    for side in ours:
        assert all(window["kept"] == window["replayed"] == first * TRAINED for window in side.windows)
        # Of the rows of a rollout, those of the first update are replayed, the others are recomputed.
        rollouts = len(side.losses)
        rows = sizes.prompts * sizes.group * rollouts
        assert side.calls["grad"] == rows * TRAINED
        assert side.calls["no_grad"] == rows * STEPS - sizes.update * rollouts * TRAINED


def test_one_reduction_for_all_parts_of_an_update() -> None:
    """Late, FSDP1 reduces each unit once for four parts; and a rank holds two of four samples' graphs at a time."""
    sizes = Sizes(prompts=2, update=8)
    ours, native = run(2, "fsdp", sizes, SHARED | LATE)
    check(ours, native)
    assert ours[0].counted["reduce_scatter"] == UNITS * sizes.until
    assert native[0].counted["reduce_scatter"] == UNITS * sizes.until * sizes.update * TRAINED
    held = max(window["peak_held_bytes"] for window in ours[0].windows)
    [alone, _] = ranks.run(job, 2, "fsdp", Sizes(), LATE)
    assert held == pytest.approx(max(window["peak_held_bytes"] for window in alone.windows) / 2, rel=0.05)


@pytest.mark.parametrize(("schedule", "budget"), [("recompute", "unlimited"), ("retain", "0"), ("retain", "0.00008")])
@pytest.mark.parametrize("kind", ["fsdp", "fsdp2"])
@pytest.mark.parametrize("sync", ["upstream", "group", "late"])
@MATRIX
def test_what_is_not_held_is_recomputed(kind: str, sync: str, schedule: str, budget: str) -> None:
    env = SHARED | {"LEANGRPO_SCHEDULE": schedule, "LEANGRPO_BUDGET_GB": budget, "LEANGRPO_SYNC": sync}
    ours, native = run(2, kind, Sizes(prompts=2, update=8), env)
    check(ours, native)


def test_part_of_the_graphs_under_a_budget() -> None:
    env = SHARED | LATE | {"LEANGRPO_BUDGET_GB": "0.00008"}
    ours, native = run(2, "fsdp", Sizes(), env)
    check(ours, native)
    assert any(0 < window["replayed"] < window["selected"] for window in ours[0].windows)


@pytest.mark.parametrize("layout", [pytest.param("native", marks=MATRIX), "shared"])
def test_on_policy_updates_are_those_of_smaller_rollouts(layout: str) -> None:
    """Two prompts per rank and rollout, trained in an update each, as natively in rollouts of one prompt."""
    sizes = Sizes(prompts=2, until=4)
    env = ON_POLICY | {"LEANGRPO_LAYOUT": layout, "LEANGRPO_AUDIT": "off"}
    ours = ranks.run(_from_the_same_noise, 2, "fsdp", sizes, env)
    native = ranks.run(_from_the_same_noise, 2, "fsdp", Sizes(until=4), None)
    for side in ours + native:
        side.logged, side.losses = [], []  # per rollout, of which there are half as many
    check(ours, native)
    rows = 4 * sizes.group
    assert ours[0].calls == {"grad": rows * TRAINED, "no_grad": rows * (STEPS - TRAINED)}
    assert all(window["recomputed"] == 0 for window in ours[0].windows)


def _from_the_same_noise(rank: int, world: int, kind: str, sizes: Sizes, env: dict[str, str] | None) -> Run:
    """The latent that all samples of a rank start from is drawn per rollout: here the same one in every rollout."""
    from support import parted

    drawn = parted.drawn
    parted.drawn = lambda *what, **how: drawn(*(what[:2] if what[0] == "first" else what), **how)
    return job(rank, world, kind, sizes, env)


REWEIGHT = {"LEANGRPO_SCHEDULE": "reweight"}


@pytest.mark.parametrize(
    ("kind", "buffers", "env"),
    [
        ("fsdp", "sample", {}),
        pytest.param("fsdp", "affine", {}, marks=MATRIX),
        pytest.param("fsdp", "affine", LATE, marks=MATRIX),
        pytest.param("ddp", "sample", {}, marks=MATRIX),
        pytest.param("ddp", "affine", LATE, marks=MATRIX),
    ],
)
def test_gradients_in_place_of_graphs(kind: str, buffers: str, env: dict[str, str]) -> None:
    """Four parts of three samples a rank. FSDP1 reduces once per part, whatever LEANGRPO_SYNC; DDP once per update."""
    sizes = Sizes(prompts=2, group=6, update=12, until=1)
    ours, native = run(2, kind, sizes, SHARED | REWEIGHT | {"LEANGRPO_BUFFERS": buffers} | env)
    check(ours, native)
    gradients = 2 if (kind, buffers) == ("fsdp", "affine") else 3  # sums are spread over the two ranks
    for side in ours:
        assert [(w["replayed"], w["recomputed"], w["gradients"]) for w in side.windows] == [(9, 0, gradients)] * 4
    if kind == "fsdp":
        assert ours[0].counted["reduce_scatter"] == 4 * UNITS
        assert native[0].counted["reduce_scatter"] == 12 * TRAINED * UNITS


@pytest.mark.parametrize("buffers", [pytest.param("sample", marks=MATRIX), "affine"])
@pytest.mark.parametrize("layout", [pytest.param("native", marks=MATRIX), "shared"])
def test_gradients_in_place_of_graphs_in_on_policy_updates(layout: str, buffers: str) -> None:
    env = ON_POLICY | REWEIGHT | {"LEANGRPO_LAYOUT": layout, "LEANGRPO_AUDIT": "off", "LEANGRPO_BUFFERS": buffers}
    ours = ranks.run(_from_the_same_noise, 2, "fsdp", Sizes(prompts=2, until=2), env)
    native = ranks.run(_from_the_same_noise, 2, "fsdp", Sizes(until=2), None)
    for side in ours + native:
        side.logged, side.losses = [], []
    check(ours, native)
    for side in ours:
        assert all(window["recomputed"] == 0 and window["gradients"] for window in side.windows)


@MATRIX
@pytest.mark.parametrize("kind", ["fsdp", "ddp"])
def test_a_schedule_that_chooses_itself(kind: str) -> None:
    ours, native = run(2, kind, Sizes(prompts=2, until=8), SHARED | {"LEANGRPO_SCHEDULE": "auto"})
    check(ours, native)


def test_upstreams_settings_call_the_step_as_it_is() -> None:
    ours, native = run(1, "none", Sizes(prompts=2), {"LEANGRPO_SCHEDULE": "recompute"})
    for side, reference in zip(ours, native, strict=True):
        assert side.logged == reference.logged and side.losses == reference.losses and side.norms == reference.norms
        for a, b in zip(side.weights, reference.weights, strict=True):
            assert all(torch.equal(a[name], b[name]) for name in b)


@pytest.mark.parametrize(
    ("kind", "sizes", "env", "words"),
    [
        ("none", Sizes(), SHARED, "no gradient is shared between ranks"),
        ("fsdp", Sizes(prompts=2, group=2, update=3), SHARED, "upstream leaves 1 samples over"),
        ("fsdp", Sizes(group=3, update=3), SHARED, "no common divisor"),
        ("fsdp", Sizes(update=2), ON_POLICY, "set upstream's gradient accumulation to one of [4]"),
    ],
)
def test_refused(kind: str, sizes: Sizes, env: dict[str, str], words: str) -> None:
    with pytest.raises(ranks.RankFailed) as refused:
        ranks.run(job, 2, kind, sizes, env)
    assert len(refused.value.errors) == 2
    assert all("LG613" in text and words in text for text in refused.value.errors.values())


def test_ranks_with_the_same_seed_are_refused() -> None:
    with pytest.raises(ranks.RankFailed, match="the same random state"):
        ranks.run(_same_seed, 2, "fsdp", Sizes(), SHARED)


def test_the_same_state_is_known_in_another_process() -> None:
    """Ranks are started one by one: what they compare must not depend on the process, as `hash` does."""
    state = torch.arange(5, dtype=torch.uint8)
    assert fingerprint(state) == "08bb5e5d6eaac1049ede0893d30ed022b1a4d9b5b48db414871f51c9cb35283d"
    assert fingerprint(state) != fingerprint(state + 1)


def _same_seed(rank: int, world: int, kind: str, sizes: Sizes, env: dict[str, str]) -> Run:
    seed = torch.manual_seed
    torch.manual_seed = lambda value: seed(0)
    return job(rank, world, kind, sizes, env)


@pytest.mark.parametrize("env", [SHARED, ON_POLICY])
def test_a_script_without_parts_is_refused(env: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    with (
        pytest.raises(
            LeanError, match=r"^LG613: LEANGRPO_[A-Z]+=[a-z-]+: this script's rollout cannot be cut by prompt"
        ),
        Lean().rollout(rows=4, steps=2, trained=1, window=4),
    ):
        pass
    with (
        pytest.raises(LeanError, match="spreads each prompt's samples over the ranks already"),
        Lean().rollout_batch(0, batches=2, rows=4, steps=2, window=2, model=torch.nn.Linear(1, 1)),
    ):
        pass
