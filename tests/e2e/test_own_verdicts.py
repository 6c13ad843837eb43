"""Trees of a user's own, right ones and wrong ones: no verdict stops a right one, and none lets a wrong one pass."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support import minitrees

from leangrpo_rehearsal.base import Config
from leangrpo_tools.errors import KitError
from leangrpo_tools.rehearsal.rehearse import rehearse
from leangrpo_tools.rehearsal.report import Report
from leangrpo_tools.rehearsal.runs import Injection
from leangrpo_tools.rehearsal.secondlook import EXACT
from leangrpo_tools.rehearsal.session import Session
from leangrpo_tools.rehearsal.verdict import Verdict

pytestmark = pytest.mark.slow
FAULTS = Path(__file__).with_name("rehearsal_faults.py")
on_cpu = pytest.mark.skipif(torch.__version__ < "2.7", reason="FSDP2 does not run on a CPU in torch 2.5 and 2.6")


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    with Session() as shared:
        yield shared


@pytest.mark.parametrize(
    ("wrapper", "looked_again"),
    [("DDP", {"native", "alike"}), pytest.param("FSDP2", set(), marks=on_cpu)],
)
def test_a_wrapper_of_ones_own(tmp_path: Path, session: Session, wrapper: str, looked_again: set[str]) -> None:
    """What DDP averages after each backward is compared with one average, to the bit; a fault of 1e-6 is seen."""
    native, patched = minitrees.both(tmp_path, getattr(minitrees, wrapper))

    def rehearsed(*inject: Injection) -> Report:
        return rehearse("mini", native, patched, Config(ranks=2), session=session, inject=inject)

    right = rehearsed()
    assert right.verdict is Verdict.MATCH and right.control_caught and right.bound.bitwise, right.render()
    assert all(update.grad_bitwise and update.weights_bitwise for update in right.updates)
    assert [[window["replayed"] for window in rank] for rank in right.windows] == [[12, 12]] * 2
    assert set(right.second_look) == looked_again and all(0 < d < 1e-5 for d in right.second_look.values())

    wrong = rehearsed(Injection(f"{FAULTS}:skewed_gradient", (1,), args={"by": 1e-6}))
    assert wrong.verdict is Verdict.MISMATCH and wrong.bound.bitwise, wrong.render()
    assert not wrong.second_look.get("fp64", 1) <= EXACT


@pytest.mark.matrix
def test_ranks_that_add_up_in_another_order(tmp_path: Path, session: Session) -> None:
    """With three, a sum has an order. What is left then is rounding, as fp64 shows."""
    native, patched = minitrees.both(tmp_path, minitrees.DDP)
    report = rehearse("mini", native, patched, Config(ranks=3), session=session)
    looked = report.second_look
    assert report.verdict is Verdict.MATCH and not report.bound.bitwise, report.render()
    assert report.bound.rel_l2 == pytest.approx(3 * looked["alike"]) and report.bound.rel_l2 < 1e-5
    assert looked["fp64"] <= EXACT and looked["fp64_alike"] <= EXACT


def test_what_the_recorder_cannot_write_down_is_no_fault_of_the_script(tmp_path: Path, session: Session) -> None:
    native, patched = minitrees.both(tmp_path, {})
    broken = Injection(f"{FAULTS}:unwritable", None, ("native",))
    with pytest.raises(KitError) as caught:
        rehearse("mini", native, patched, Config(updates=1), session=session, inject=[broken])
    assert caught.value.code == "LG402" and caught.value.exit_code == 3 and "no such tensor" in caught.value.what
