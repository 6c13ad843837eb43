"""Which policy calls are the last of an update or a group, against a list of all rows."""

import itertools

import pytest

from leangrpo_core.turns import Turns


def slowly(trained: int, batch: int, window: int, group: int, rows: int) -> list[bool]:
    """For each call of an epoch: whether a multiple of `window` or `group` rows is reached with its last step."""
    found = []
    for first in range(0, rows, batch):
        batch_rows = range(first, first + batch)
        ends = any((row + 1) % window == 0 or (row + 1) % group == 0 for row in batch_rows)
        found += [False] * (trained - 1) + [ends]
    return found


@pytest.mark.parametrize(("trained", "batch"), list(itertools.product([1, 3], [1, 2, 4])))
@pytest.mark.parametrize(("window", "group"), [(4, 4), (4, 2), (8, 4), (8, 3), (12, 5), (4, 6), (4, 1)])
def test_against_all_rows(trained: int, batch: int, window: int, group: int) -> None:
    for by_group in (False, True):
        turns = Turns(trained, batch, window, group, by_group)
        expected = slowly(trained, batch, window, group if by_group else window, 24)
        calls = [turns.next() for _ in expected]
        assert [due for _, due in calls] == expected
        assert [over for over, _ in calls] == [False, *expected[:-1]]


def test_a_boundary_begins_a_new_update() -> None:
    """Whatever number of calls was made."""
    turns = Turns(trained=2, batch=1, window=4, group=2, by_group=True)
    for calls in (3, 8, 9, 0, 17):
        for _ in range(calls):
            turns.next()
        turns.update_over()
        assert [turns.next() for _ in range(5)] == [
            (False, False),
            (False, False),
            (False, False),
            (False, True),
            (True, False),
        ]
        turns.update_over()


@pytest.mark.parametrize("batch", [1, 2])
def test_the_last_call_of_a_rollout(batch: int) -> None:
    """Gradients are due after it though the update is not full; a second pass over the rows ends the same way."""
    turns = Turns(trained=2, batch=batch, window=4 * batch, group=4 * batch, rows=6 * batch)
    for _ in range(2):
        due = []
        for call in range(1, 13):
            due.append(turns.next()[1])
            if call == 8:
                turns.update_over()
        assert due == [call in (8, 12) for call in range(1, 13)]
        turns.update_over()


def test_before_a_rollout_each_call_stands_alone() -> None:
    turns = Turns()
    assert [turns.next()[1] for _ in range(3)] == [True] * 3
    assert Turns(trained=0, window=0).next() == (False, True)
