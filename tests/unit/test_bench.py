"""What a bench makes of recorded rollouts."""

import json
from pathlib import Path
from typing import Any

import pytest

from leangrpo_rehearsal.base import Config
from leangrpo_tools.apply import apply
from leangrpo_tools.errors import KitError
from leangrpo_tools.rehearsal import bench, picture, timing, trees
from leangrpo_tools.rehearsal.records import Records
from leangrpo_tools.rehearsal.rehearse import find_script
from leangrpo_tools.rehearsal.session import Session
from leangrpo_tools.rehearsal.timing import COSTS, BenchReport, Timing
from leangrpo_tools.rehearsal.ways import ways


def update(seconds: float, no_grad: int, grad: int, spent: float) -> dict[str, Any]:
    """One rank's record; counts and times add up over the run."""
    spread = {"no_grad": spent, "grad": 2 * spent, "backward": 3 * spent}
    return {"seconds": seconds, "forwards": {"no_grad": no_grad, "grad": grad}, "spent": spread}


def test_the_first_rollout_is_not_counted_and_the_slowest_rank_is() -> None:
    ranks = [[9.0, 9.0, 2.0, 1.0, 2.5, 1.0], [9.0, 9.0, 2.0, 3.0, 1.0, 1.0]]
    counts = [(10, 6), (10, 12), (20, 18), (20, 24), (30, 30), (30, 36)]
    updates = [
        [update(seconds[k], *counts[k], spent=float(k)) for seconds in ranks] for k in range(6)
    ]  # fmt: skip
    found = Timing("native")
    timing._add(found, Records(Path(), updates, [{"peak_rss_bytes": 7}, {"peak_rss_bytes": 8}]), 2)
    assert found.seconds == [5.0, 3.5] and found.median == 4.25
    assert found.calls == {"no_grad": 10, "grad": 12}
    assert found.costs == {"no_grad": [2.0, 2.0], "grad": [4.0, 4.0], "backward": [6.0, 6.0]}
    assert found.peak_rss_bytes == 8


def test_ratio_and_bound() -> None:
    """Ten forwards of 0.1 s removed from 4 s leave 3 s at best."""
    native = Timing("native", [4.0, 4.0, 9.0], {"no_grad": 20, "grad": 12}, {k: [2.0] for k in COSTS}, 1)
    retain = Timing("retain", [3.2], {"no_grad": 10, "grad": 12}, {k: [1.0] for k in COSTS}, 2_000_000)
    report = BenchReport("x", "y", Config(), 2, [native, retain], predicted={"retain": 1.3})
    assert report.ratio(retain) == pytest.approx(1.25) and report.bound(retain) == pytest.approx(4 / 3)
    assert report.ratio(native) == report.bound(native) == 1.0
    row = next(line for line in report.render().splitlines() if "retain" in line)
    assert row.split() == [
        "retain",
        "3.20",
        "1.25",
        "1.30",
        "1.33",
        "10",
        "12",
        "1.00",
        "1.00",
        "1.00",
        "0",
        "0",
        "0",
        "2",
    ]
    assert json.loads(json.dumps(report.to_json()))["timings"][1]["bound"] == pytest.approx(4 / 3)


@pytest.mark.parametrize(("recompute", "said"), [(4.1, False), (3.9, False), (4.6, True), (3.5, True)])
def test_ways_that_do_the_same_work_tell_what_the_others_are_worth(recompute: float, said: bool) -> None:
    seconds = {"native": 4.0, "recompute": recompute, "retain": 3.0}
    ways = [Timing(k, [s], {"no_grad": 20, "grad": 12}, {c: [2.0] for c in COSTS}) for k, s in seconds.items()]
    assert ("the other ratios are worth no more" in BenchReport("x", "y", Config(), 1, ways).render()) == said
    assert "worth" not in BenchReport("x", "y", Config(), 1, [ways[0], ways[2]]).render()


def test_what_auto_has_chosen(tmp_path: Path) -> None:
    """Its first eight rollouts are not counted, and its lines stand below the table."""
    log = tmp_path / "rank0.out"
    log.write_text("[leangrpo] auto: retain: why\nother\n[leangrpo] window 1: kept\n[leangrpo] auto: compares\n")
    found = Timing("auto", said=timing._choices(log))
    assert found.said == ["retain: why", "compares"]
    updates = [[update(float(k), k, k, spent=float(k)) | {"cpu": k / 2}] for k in range(10)]
    timing._add(found, Records(Path(), updates, [{"peak_rss_bytes": 7}]), 1, timing.AUTO_SKIPS)
    assert found.seconds == [8.0, 9.0] and found.cpu == [4.0, 4.5]
    native = Timing("native", [9.0], {"no_grad": 1, "grad": 1}, {k: [2.0] for k in COSTS})
    report = BenchReport("x", "y", Config(schedule="auto"), 1, [native, found])
    assert report.render().endswith("\nretain: why\ncompares")


def test_what_auto_trains_where_upstreams_order_may_change() -> None:
    """No native run can be given the order of a run that is yet to choose."""
    for name, options, comparable in (
        ("flowgrpo_sd3", (), False), ("flowgrpo_sd3", (("order", "upstream"),), True), ("trl_ddpo", (), False),
        ("dancegrpo_flux", (), True), ("mini", (), True),
    ):  # fmt: skip
        script = find_script(name)
        assert (
            script.incomparable(script.configure(schedule="auto", options=options, updates_per_rollout=2)) is None
        ) == comparable
        assert script.incomparable(script.configure(schedule="retain", options=options, updates_per_rollout=2)) is None


def test_on_the_example() -> None:
    report = bench("mini", script="train", repeat=1, updates_per_rollout=1, schedule="retain")
    assert [item.name for item in report.timings] == ["native", "recompute", "retain"]
    native, recompute, retain = report.timings
    # 24 forwards without gradient and 12 with, of which retain saves 12: natively 24 + 12 (g + b) and the rest
    spent = {kind: native.cost(kind) / native.calls["no_grad" if kind == "no_grad" else "grad"] for kind in COSTS}
    assert report.predicted["retain"] == pytest.approx(native.median / (native.median - 12 * spent["no_grad"]))
    assert report.predicted["native"] == 1 and retain.graph_bytes == pytest.approx(4.92e6, rel=0.01)
    assert native.calls == recompute.calls and retain.calls["no_grad"] < native.calls["no_grad"]
    assert all(len(item.seconds) == 2 and all(cost > 0 for cost in item.costs["backward"]) for item in report.timings)


def test_a_way_that_fails_ends_the_others(tmp_path: Path) -> None:
    """Here the patched tree is empty; natively the first rollout is over, and the run waits for its next turn."""
    apply("mini", tmp_path / "tree")
    found = trees.export(tmp_path / "tree", tmp_path / "trees", "train")
    config = find_script("mini").configure(schedule="retain", updates_per_rollout=1)
    (tmp_path / "empty").mkdir()
    with Session(tmp_path / "session") as session:
        with pytest.raises(KitError, match="does not run here"):
            timing.measure("mini", found.native, tmp_path / "empty", config, session=session, upstream="mini", repeat=1)
        # A way that cannot be started, since its tree cannot be copied, leaves nobody waiting either.
        with pytest.raises(OSError):
            timing.measure("mini", found.native, tmp_path / "none", config, session=session, upstream="mini", repeat=1)


def test_ways_of_running() -> None:
    one = ways(Config(schedule="all"))
    assert list(one) == ["native", "recompute", "retain", "reweight sample", "reweight affine"]
    assert (one["reweight affine"].schedule, one["reweight affine"].buffers) == ("reweight", "affine")
    two = ways(Config(schedule="all", ranks=2))
    assert list(two) == [
        "native", "recompute", "recompute late", "retain", "retain late", "reweight sample", "reweight affine",
    ]  # fmt: skip
    assert (two["retain late"].schedule, two["retain late"].sync) == ("retain", "late")
    reweighted = ["reweight sample", "reweight affine"]
    assert list(ways(Config(schedule="auto"))) == ["native", "recompute", "retain", *reweighted, "auto"]
    assert list(ways(Config(schedule="retain"))) == ["native", "recompute", "retain"]


def test_a_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    native = Timing("native", [4.0], {"no_grad": 20, "grad": 12}, {k: [2.0] for k in COSTS}, 1)
    retain = Timing("retain", [3.2], {"no_grad": 10, "grad": 12}, {k: [1.0] for k in COSTS}, 2, held_bytes=3)
    report, file = BenchReport("x", "y", Config(), 2, [native, retain]), tmp_path / "bench.png"
    picture.check(file)
    picture.draw(report, file)
    assert file.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(KitError, match="there is no folder"):
        picture.check(tmp_path / "none" / "bench.png")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(KitError, match="needs matplotlib"):
        picture.check(file)
