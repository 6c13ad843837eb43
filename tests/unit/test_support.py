"""The table of supported scripts: README has it as the command prints it, and each row stands on a measurement."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from leangrpo_tools import data, support
from leangrpo_tools.errors import KitError
from leangrpo_tools.rehearsal.rehearse import find_script

ROWS = support.support().rows
REWEIGHTED = 2e-6


def test_readme_has_the_table_as_the_command_prints_it() -> None:
    readme = (data.data_root() / "README.md").read_text(encoding="utf-8")
    assert support.support().table() in readme, "leangrpo support prints another table: put it into README.md"


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.upstream}-{row.script}")
def test_each_row_was_measured_and_within_what_its_rehearsal_allows(row: support.Row) -> None:
    assert row.rehearsed == (not row.reason)
    if not row.rehearsed:
        assert not row.exact and len(row.reason) >= 10
        return
    assert set(row.exact) == set(support.RANKS)
    for ranks, found in row.exact.items():
        assert math.isfinite(found) and found <= row.bounds[ranks]
    assert "retain" in row.schedules


def test_bounds_are_those_that_the_rehearsals_enforce() -> None:
    for name, script in support.scripts():
        if not script.rehearsal:
            continue
        rehearsal, found = find_script(script.rehearsal), support.measured()[name][script.name]
        for ranks in support.RANKS:
            enforced = rehearsal.bound(rehearsal.configure(ranks=ranks, options=rehearsal.shown))
            bound = found["exact"][str(ranks)]["bound"]
            # Where batches are regrouped, the bound is a multiple of what that does natively.
            assert bound >= enforced.rel_l2 or rehearsal.regrouped(rehearsal.configure(ranks=ranks)) is not None
            assert enforced.bitwise == (bound == 0.0), (name, script.name, ranks)
        if found["reweight"] is not None:
            assert 0 <= found["reweight"] <= max(REWEIGHTED, found["exact"]["1"]["bound"])


def test_every_script_of_every_recipe_has_a_row_and_no_row_is_left_over() -> None:
    known = {(name, script.name) for name, script in support.scripts()}
    assert [(row.upstream, row.script) for row in ROWS] == [(name, script.name) for name, script in support.scripts()]
    assert {(name, script) for name, scripts in support.measured().items() for script in scripts} <= known


def test_figures_are_written_beside_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support, "path", lambda: tmp_path / "support.json")
    assert support.measured() == {}
    exact = {"1": {"rel_l2": 0.0, "bound": 0.0}, "2": {"rel_l2": 3e-7, "bound": 5e-6}}
    support.put("mini", "train", {"exact": exact, "reweight": 1e-7, "shared": None})
    support.put("DanceGRPO", "flux", {"launch": [{"file": "a.sh", "updates": 2, "share": 0.5, "ratio": 1.094}] * 2})
    support.put("mini", "train", {"launch": []})
    assert list(json.loads(support.path().read_text())) == ["DanceGRPO", "mini"]
    rows = {(row.upstream, row.script): row.cells() for row in support.support().rows}
    assert rows["mini", "train"][2:] == ("bitwise", "3.0e-07 (<= 5e-06)", "retain, reweight", "1", "-", "-")
    assert rows["DanceGRPO", "flux"][2:] == ("not measured", "not measured", "", "2", "50 %", "1.09")


def test_what_is_refused_is_in_the_table_and_says_why() -> None:
    found = support.support()
    assert set(found.refused) == {("flowGRPO", "`bagel`"), ("DPOK", "")}
    assert "| flowGRPO | `bagel` | refused |" in found.table() and "| DPOK | | refused |" in found.table()
    assert "DPOK is refused: its policy steps train single states" in " ".join(found.render().split())


def test_asking_for_one_script() -> None:
    assert [script.name for _, script in support.scripts("dancegrpo", "FLUX")] == ["flux"]
    with pytest.raises(KitError, match="LG203"):
        list(support.scripts("mini", "none"))
    with pytest.raises(KitError, match="LG102"):
        list(support.scripts("none"))


def test_what_the_gain_takes_for_granted_is_said_where_the_table_is() -> None:
    readme = (data.data_root() / "README.md").read_text(encoding="utf-8")
    for text in (readme, support.support().render()):
        after = " ".join(text[text.index(support.support().table()) :].split())
        assert support.GAIN in after


def test_scripts_that_keep_nothing_as_shipped_do_not_promise_an_update() -> None:
    """Those with launch files by what was planned for these; the others keep nothing by their own warnings."""
    shares = {(row.upstream, row.script): row.shares for row in ROWS}
    others = {("flowGRPO", "wan2_1"), ("ddpo-pytorch", "train")}
    for name, script in support.scripts():
        key = name, script.name
        nothing = key in others or (bool(shares[key]) and not any(shares[key]))
        assert ("nothing is kept" in script.updates_per_rollout) == nothing, key
