"""What `auto` chooses, worked out by hand: plans, the worst rank's figures, windows that are compared, peaks."""

import math

import pytest
from support.steered import Memory

from leangrpo_core.auto import choice, clock, stopwatch
from leangrpo_core.auto.choice import Figures, Plan, Way
from leangrpo_core.auto.noticed import Noticed
from leangrpo_core.auto.peaks import Peaks
from leangrpo_core.auto.stopwatch import Stopwatch
from leangrpo_core.auto.watch import Watch

# A window of 10 s; a step saves 0.100 - 0.010 - 0.030 s, checks cost 0.5 s; 20 graphs of 1 GB are wanted.
FIGURES = Figures(
    window=10.0, rollout=0.1, update=0.1, backward=0.2, extra=0.03, replay=0.01, checks=0.5, graph=1e9,
    budget=math.inf, selected=20,
)  # fmt: skip
NATIVE, RETAIN, LATE = Way("recompute", "upstream"), Way("retain", "upstream"), Way("retain", "late")


@pytest.mark.parametrize(
    ("changes", "steps", "saves"),
    [
        ({}, 20, 20 * 0.06 - 0.5),
        ({"budget": 12.9e9}, 12, 12 * 0.06 - 0.5),
        ({"budget": 0.9e9}, 0, -0.5),
        ({"budget": 4e9, "host": 5.5}, 9, 9 * 0.06 - 0.5),
        ({"budget": 18e9, "host": 5}, 20, 20 * 0.06 - 0.5),
        ({"share": 0.5}, 20, 20 * (0.5 * 0.09 - 0.03) - 0.5),
        ({"graph": 0.0, "budget": 0.0}, 20, 20 * 0.06 - 0.5),
    ],
)
def test_what_retain_saves(changes: dict[str, float], steps: int, saves: float) -> None:
    plan = choice.retain(FIGURES._replace(**changes))
    assert plan.steps == steps and plan.saves == pytest.approx(saves)


@pytest.mark.parametrize(
    ("changes", "best"),
    [
        ({}, "retain"),
        ({"extra": 0.08}, "recompute"),  # 20 x 0.01 s less than the checks take
        ({"checks": 1.14}, "retain"),  # 0.06 s left of 10
        ({"checks": 1.16}, "recompute"),  # 0.04 s are not worth it
        ({"budget": 0.0}, "recompute"),
        ({"share": 0.4}, "recompute"),
    ],
)
def test_the_best_plan(changes: dict[str, float], best: str) -> None:
    plans = choice.choose(FIGURES._replace(**changes))
    assert plans[0].schedule == best and {plan.schedule for plan in plans} == {"retain", "recompute"}


# Five samples of four steps; a gradient is as large as 3 graphs, sums need 3 of them, scaling one takes 0.02 s.
GRADIENTS = FIGURES._replace(budget=10e9, gradient=3e9, samples=5, affine=3, scaling=0.02)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        # Beside the graph of one call there is room for three gradients: sums hold all, at twice the scaling.
        ({}, Plan("reweight", 20, 20 * 0.06 - 5 * 0.04 - 0.5, "affine")),
        ({"affine": math.inf}, Plan("reweight", 12, 12 * 0.06 - 3 * 0.02 - 0.5)),
        ({"budget": 9.9e9}, None),  # two: 8 steps, and 9 graphs
        ({"budget": 16e9}, Plan("reweight", 20, 20 * 0.06 - 5 * 0.02 - 0.5)),
        ({"live": 4}, None),  # a trajectory's graphs at a time leave room for two
        ({"share": 0.5}, Plan("reweight", 20, 20 * (0.5 * 0.09 - 0.03 - 0.5 * 0.2) - 5 * 0.04 - 0.5, "affine")),
        ({"gradient": math.inf}, None),
        ({"budget": math.inf}, None),  # all graphs fit
        ({"budget": 20e9}, None),
        ({"gradient": 0.0}, Plan("reweight", 20, 20 * 0.06 - 5 * 0.02 - 0.5)),
    ],
)
def test_what_reweight_saves(changes: dict[str, float], expected: Plan | None) -> None:
    plan = choice.reweight(GRADIENTS._replace(**changes))
    if expected is None:
        assert plan is None
    else:
        assert plan is not None and (plan.steps, plan.buffers) == (expected.steps, expected.buffers)
        assert plan.saves == pytest.approx(expected.saves)


def test_gradients_where_graphs_do_not_fit() -> None:
    def chosen(**changes: float) -> list[str]:
        return [str(plan) for plan in choice.choose(GRADIENTS._replace(**changes))]

    assert chosen() == ["reweight affine", "retain", "recompute"]  # 0.5 s, and 0.1 s with ten graphs
    assert chosen(budget=16e9) == ["reweight sample", "retain", "recompute"]
    assert chosen(scaling=0.1) == ["retain", "recompute", "reweight affine"]
    figures = GRADIENTS._replace(budget=10e9)
    text = choice.reason(choice.choose(figures), figures)
    assert text.startswith(
        "reweight affine: graphs of 10 of 20 selected steps fit 10 GB (one takes 1 GB), gradients (3 GB) of 20; "
        "saves about 5.0% of a window"
    )
    assert text.endswith("runner-up retain")


def test_a_way_is_named_with_its_buffers() -> None:
    assert str(Way("reweight", "late", "affine")) == "reweight affine with sync=late" and str(RETAIN) == "retain"


def test_what_the_native_window_shows() -> None:
    """Rewards that come before the next sample, after it, and not at all."""
    for events, in_time in (
        ([[0], None, [1], None], True),
        ([[0, 1], [0, 1], None, [2, 3], None], True),
        ([[0], [1], None], False),
        ([[0], [0]], False),
    ):
        noticed = Noticed()
        for event in events:
            noticed.rewarded() if event is None else noticed.rolls(event)
        assert noticed.in_time == in_time
        assert "no step function" in noticed.why_not()
        noticed.scored = True
        assert noticed.why_not() == ""
        noticed.reference = True
        assert "a reference" in noticed.why_not()


def test_plans_that_are_close_are_timed() -> None:
    def close(saves: float, steps: int = 20) -> list[str]:
        plans = [Plan("retain", steps, saves), Plan("recompute", 0, 0.0)]
        return [str(plan) for plan in choice.close(sorted(plans, key=lambda plan: -plan.saves), FIGURES)]

    assert close(2.49) == ["recompute"] and close(-2.49) == ["retain"]
    assert close(2.51) == close(-2.51) == [] and close(0.0, steps=0) == []


def test_the_worst_ranks_figures() -> None:
    """Of each figure the one that speaks most against keeping, to the nanosecond and the byte."""
    other = FIGURES._replace(window=11.0, update=0.09, extra=-0.02, graph=1.5e9, budget=7e9, share=0.5, selected=18)
    both = zip(choice.pack(FIGURES), choice.pack(other), strict=True)
    worst = choice.unpack([min(pair) for pair in both])
    assert worst.gradient == worst.affine == math.inf
    more = FIGURES._replace(gradient=2e9, samples=4, affine=3, scaling=0.5, live=2)
    assert choice.unpack([min(pair) for pair in zip(choice.pack(more), choice.pack(GRADIENTS), strict=True)]) == (
        pytest.approx(GRADIENTS._replace(scaling=0.5, live=2), abs=1e-9)
    )
    assert worst == pytest.approx(
        FIGURES._replace(window=11.0, update=0.09, graph=1.5e9, budget=7e9, share=0.5), abs=1e-9
    )
    assert choice.unpack(choice.pack(FIGURES)) == pytest.approx(FIGURES, abs=1e-9)
    assert choice.unpack(choice.pack(FIGURES._replace(extra=-0.25))).extra == pytest.approx(-0.25)


def test_the_reason_has_the_figures() -> None:
    def why(**changes: float) -> str:
        figures = FIGURES._replace(**changes)
        return choice.reason(choice.choose(figures), figures)

    text = why(budget=12.9e9)
    assert text.startswith("retain: graphs of 12 of 20 selected steps fit 12.9 GB; saves about 2.2% of a window")
    assert "100 ms of forward less in the update, 30 ms more in the rollout, 10 ms to replay; 500 ms of checks" in text
    assert text.endswith("runner-up recompute")
    assert why(extra=0.08).startswith("recompute: to retain would cost 3.0% of a window")
    assert why(checks=1.16).startswith("recompute: to retain would save only 0.4% of a window")
    assert why(budget=0.9e9) == "recompute: graphs of 0 of 20 selected steps fit 0.9 GB (one takes 1 GB)"


def run(watch: Watch, seconds: dict[Way, float], windows: int) -> list[Way]:
    """The ways of so many windows that take as long as it says."""
    found = []
    for _ in range(windows):
        way, _ = watch.next()
        found.append(way)
        watch.add(way, seconds[way])
    return found


def test_a_way_that_keeps_its_promise_is_kept() -> None:
    watch = Watch(RETAIN, (NATIVE, 1.0), [])
    assert run(watch, {RETAIN: 1.02}, 20) == [RETAIN] * 20


def test_windows_that_take_longer_are_compared_in_turn() -> None:
    """Three windows show it, then three each: native ones were as fast as the first, so upstream's way it is."""
    watch = Watch(RETAIN, (NATIVE, 1.0), [])
    assert run(watch, {RETAIN: 1.1, NATIVE: 1.0}, 12) == [RETAIN] * 3 + [NATIVE, RETAIN] * 3 + [NATIVE] * 3


def test_a_machine_that_became_slower_is_no_reason() -> None:
    watch = Watch(RETAIN, (NATIVE, 1.0), [])
    ways = run(watch, {RETAIN: 1.5, NATIVE: 1.8}, 30)
    assert ways == [RETAIN] * 3 + [NATIVE, RETAIN] * 3 + [RETAIN] * 21


def test_the_faster_of_two_that_are_close() -> None:
    for seconds, home in ((1.01, RETAIN), (0.99, NATIVE)):
        watch = Watch(RETAIN, (NATIVE, 0.5), [NATIVE])
        assert run(watch, {RETAIN: 1.0, NATIVE: seconds}, 8) == [NATIVE, RETAIN] * 3 + [home] * 2


def test_median_and_fastest_must_agree() -> None:
    watch, seconds = Watch(RETAIN, (NATIVE, 0.5), [NATIVE]), {RETAIN: [0.9, 1.2, 1.2], NATIVE: [1.0, 1.0, 1.0]}
    for _ in range(6):
        way, _ = watch.next()
        watch.add(way, seconds[way].pop())
    assert watch.next()[0] == RETAIN


def test_a_way_that_rounds_otherwise_must_be_better_by_more_than_noise() -> None:
    for seconds, home in ((0.99, RETAIN), (0.9, LATE)):
        watch = Watch(RETAIN, (NATIVE, 1.5), [LATE])
        assert run(watch, {RETAIN: 1.0, LATE: seconds}, 9) == [LATE, RETAIN] * 3 + [home] * 3


def test_gradients_must_beat_graphs_by_more_than_noise() -> None:
    """They round otherwise than upstream; also where they were chosen by the estimate."""
    reweight = Way("reweight", "upstream", "affine")
    for seconds, home in ((0.99, RETAIN), (0.9, reweight)):
        watch = Watch(reweight, (NATIVE, 1.5), [RETAIN])
        assert run(watch, {RETAIN: 1.0, reweight: seconds}, 9) == [RETAIN, reweight] * 3 + [home] * 3


def test_comparisons_end() -> None:
    """A machine that becomes slower by a tenth every ten windows would be a reason for one each time: four are made."""
    watch, ways = Watch(RETAIN, (NATIVE, 1.0), []), []
    for tens in range(20):
        ways += run(watch, {RETAIN: 1.1 * 1.1**tens, NATIVE: 1.1 * 1.1**tens}, 10)
    assert ways.count(NATIVE) == 4 * 3 and ways[-10:] == [RETAIN] * 10


def test_windows_without_a_duration_say_nothing() -> None:
    watch = Watch(RETAIN, (NATIVE, math.nan), [])
    assert run(watch, {RETAIN: math.nan}, 5) == [RETAIN] * 5
    assert run(watch, {RETAIN: 3.0}, 5) == [RETAIN] * 5


def test_room_beside_the_fullest_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    """95 GB of 100 may be used; 40 are at the peak of the update, and 8 of optimizer state have come to stay."""
    memory = Memory(monkeypatch.setattr, 100e9, 0)
    memory.now, peaks = 10e9, Peaks()
    peaks.begin()
    for phase, most in (("rollout", 30e9), ("reward", 20e9), ("update", 40e9), ("step", 90e9)):
        memory.most = most
        peaks.end(phase)
    memory.now = 18e9
    assert memory.resets == 5 and peaks.room() == pytest.approx(95e9 - 40e9 - 8e9)
    assert peaks.told() == "; native peaks: rollout 30 GB, reward 20 GB, update 40 GB, step 90 GB"
    memory.total = 40e9
    assert peaks.room() == 0.0


def test_a_window_beyond_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    memory, peaks = Memory(monkeypatch.setattr, 100e9, 50e9), Peaks()
    peaks.begin()
    found = []
    for before, after in ((50e9, 94e9), (94e9, 97e9), (97e9, 97e9)):  # the last is an older peak
        memory.most = before
        peaks.watch()
        memory.most = after
        peaks.look()
        found.append(peaks.over())
    assert found == pytest.approx([0.0, 2e9, 0.0])


def test_without_a_device_there_is_no_limit() -> None:
    peaks = Peaks()
    peaks.begin()
    peaks.end("rollout")
    assert peaks.room() == peaks.limit() == math.inf and peaks.told() == "" and peaks.over() == 0.0


def test_a_native_window_without_its_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls of 5, 1, 1 s in the rollout and 4, 2, 2 in the update: 4 + 2 s are warm-up. Other work stays."""
    ticks = [0.0]

    class Stamp(clock.Stamp):
        def __init__(self) -> None:
            super().__init__()
            self._at = ticks[0]

    monkeypatch.setattr(stopwatch, "Stamp", Stamp)

    def lasts(seconds: float) -> None:
        ticks[0] += seconds

    watch = Stopwatch()
    watch.rollout_call(lambda: lasts(7.0), "cond")  # before anything begins
    watch.begin(detailed=True)
    with watch.rolling_out():
        for seconds in (5.0, 1.0, 1.0):
            watch.rollout_call(lambda seconds=seconds: lasts(seconds), "cond")
        lasts(0.5)
    watch.rollout_call(lambda: lasts(100.0), "cond")  # an evaluation
    for place, seconds in enumerate((4.0, 2.0, 2.0)):
        assert watch.update_begins() == (place == 0)
        watch.native_call(lambda seconds=seconds: lasts(seconds))
    lasts(0.25)
    assert watch.update_ends() and not watch.update_ends()
    assert watch.seconds() == 7.5 + 8.25 and watch.sites == {"cond"}
    assert watch.finish()
    watch.begin(detailed=False)
    assert watch.native == 7.5 + 8.25 - 4.0 - 2.0 and math.isnan(watch.seconds())
    assert (watch.median("rollout"), watch.median("update"), watch.median("backward")) == (1.0, 2.0, 0.0)
