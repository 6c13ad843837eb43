"""Every row of the table of supported scripts, measured again.

bash tools/test -m matrix tests/matrix/test_support.py -n 0
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from leangrpo_tools import support, supportrun
from leangrpo_tools.apply import apply
from leangrpo_tools.recipe import Script
from leangrpo_tools.rehearsal import verify
from leangrpo_tools.rehearsal.session import Session

pytestmark = [pytest.mark.matrix, pytest.mark.slow, pytest.mark.upstream]
SCRIPTS = [(upstream, script) for upstream, script in support.scripts() if script.rehearsal]


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    with Session() as found:
        yield found


@pytest.mark.parametrize(("upstream", "script"), SCRIPTS, ids=lambda item: getattr(item, "name", item))
def test_a_row(upstream: str, script: Script, session: Session, tmp_path: Path) -> None:
    apply(upstream, tmp_path / "tree", scripts=[script.name])
    found, written = (
        supportrun.rehearsed(upstream, script, tmp_path / "tree", session),
        support.measured()[upstream][script.name],
    )
    for ranks in map(str, support.RANKS):
        assert (found["exact"][ranks]["rel_l2"] == 0) == (written["exact"][ranks]["rel_l2"] == 0)
    for way in ("reweight", "shared"):
        assert (found[way] is None) == (written[way] is None), way


@pytest.mark.parametrize(("upstream", "script"), SCRIPTS, ids=lambda item: getattr(item, "name", item))
def test_a_patched_tree_that_recomputes_is_upstreams_own(
    upstream: str, script: Script, session: Session, tmp_path: Path
) -> None:
    """LEANGRPO_SCHEDULE=recompute: every bit, where two native runs have the same ones."""
    apply(upstream, tmp_path / "tree", scripts=[script.name])
    report = verify(upstream, script=script.name, tree=tmp_path / "tree", session=session, schedule="recompute")
    assert report.ok and report.floor_bitwise, report.problems
    assert all(update.grad_bitwise and update.weights_bitwise for update in report.updates)
