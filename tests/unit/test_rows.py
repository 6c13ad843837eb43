"""Rows of batched calls: split, joined, taken, merged and compared one by one."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from leangrpo_core.rows import compare, copies_in, join, merge, split, take
from leangrpo_core.values import Uncuttable, snapshot

ROWS, COPIES = 3, 2
BATCH = torch.arange(ROWS * COPIES * 4).reshape(ROWS * COPIES, 4)  # copy by copy: rows 0 1 2, then 0 1 2


def test_split_and_join() -> None:
    parts = split(BATCH, ROWS)
    assert parts is not None and [part[:, 0].tolist() for part in parts] == [[0, 12], [4, 16], [8, 20]]
    assert torch.equal(join(parts), BATCH)
    assert join([parts[2], parts[0]])[:, 0].tolist() == [8, 0, 20, 12]
    assert split(BATCH, 4) is None and split(torch.tensor(1.0), 2) is None
    assert split(torch.tensor(1.0), 1) == [torch.tensor(1.0)]


def test_take_leaves_shared_arguments_alone() -> None:
    shared, scalar = torch.arange(5), torch.tensor(7)
    args, kwargs = take((BATCH, shared), {"t": scalar, "deep": [BATCH]}, ROWS, COPIES, [2, 0])
    assert args[0][:, 0].tolist() == kwargs["deep"][0][:, 0].tolist() == [8, 0, 20, 12]
    assert args[1] is shared and kwargs["t"] is scalar
    assert copies_in((scalar, BATCH), {}, ROWS) == 2 and copies_in((BATCH,), {}, 4) is None


def test_merge_puts_rows_back() -> None:
    double = lambda part: {"out": part * 2, "same": (part,)}  # noqa: E731
    some, others = (take((BATCH,), {}, ROWS, COPIES, places)[0][0] for places in ([2, 0], [1]))
    merged = merge([([2, 0], double(some)), ([1], double(others))], container=double(others))
    assert torch.equal(merged["out"], BATCH * 2) and torch.equal(merged["same"][0], BATCH)
    with pytest.raises(Uncuttable, match="not made of rows"):
        merge([([0, 1], torch.ones(3)), ([2], torch.ones(1))], container=torch.ones(1))


def kept(rows: int, **arguments: Any) -> Any:
    return SimpleNamespace(inputs=snapshot(arguments), rows=rows)


def found(now: Tensor, timestep: Tensor, places: dict[int, int] | None = None) -> dict[int, str]:
    call = kept(ROWS, x=BATCH, t=torch.tensor(5))
    rows = {at: (call, place) for at, place in (places or {0: 2, 1: 0}).items()}
    return compare(rows, {"x": now, "t": timestep}, rows=2, copies=COPIES, promote=False)


PERMUTED = BATCH[[2, 0, 5, 3]]


def test_compare_row_by_row() -> None:
    assert found(PERMUTED, torch.tensor(5)) == {}
    assert found(PERMUTED, torch.full((4,), 5)) == {}
    assert found(BATCH[[0, 2, 3, 5]], torch.tensor(5)).keys() == {0, 1}
    changed = PERMUTED.clone()
    changed[3, 1] += 2  # the second copy of the second row
    assert found(changed, torch.tensor(5)) == {1: "x differs by up to 2"}
    assert found(PERMUTED, torch.tensor([5, 5, 6, 5])) == {0: "t differs by up to 1"}
    assert found(PERMUTED, torch.tensor([5, 6, 5, 5]), {1: 0}) == {1: "t differs by up to 1"}


def test_compare_names_what_is_not_of_the_same_kind() -> None:
    assert found(PERMUTED[:2], torch.tensor(5)) == dict.fromkeys([0, 1], "x has shape (2, 4), had (6, 4)")
    assert found(PERMUTED.double(), torch.tensor(5))[0] == "x is torch.float64, was torch.int64"
    rows = {0: (kept(1, x=BATCH), 0)}
    assert compare(rows, {"y": BATCH}, rows=1, copies=6, promote=False) == {0: "other arguments: x, y"}


def test_what_all_rows_share_is_compared_as_a_whole() -> None:
    call = kept(ROWS, x=BATCH, ids=torch.arange(4))
    rows = {0: (call, 1), 1: (call, 2)}
    now = {"x": BATCH[[1, 2, 4, 5]], "ids": torch.arange(4)}
    # Four entries, as many as two rows with two copies have: taken for rows, and then not the kept ones. Never wrong.
    assert compare(rows, now, rows=2, copies=COPIES, promote=False).keys() == {0, 1}
    call = kept(ROWS, x=BATCH, ids=torch.arange(5))
    rows = {0: (call, 1), 1: (call, 2)}
    assert compare(rows, now | {"ids": torch.arange(5)}, rows=2, copies=COPIES, promote=False) == {}
    assert compare(rows, now | {"ids": torch.arange(5).flip(0)}, rows=2, copies=COPIES, promote=False).keys() == {0, 1}


@pytest.mark.parametrize(
    ("before", "now", "same"),
    [
        ([5, 7], torch.tensor([5, 7]), True),
        ([5, 7], torch.tensor([5, 7], dtype=torch.int32), True),
        ((5, 7), torch.tensor([5, 7]), True),
        ([5, 7], torch.tensor([5, 8]), False),
        ([5, 7], torch.tensor([7, 5]), False),
        ([5, 7], torch.tensor([5.0, 7.0]), False),
        ([5.0, 7.0], torch.tensor([5, 7]), False),
        ([True, False], torch.tensor([1, 0]), False),
        ([5, 7], torch.tensor([5, 7, 9]), False),
        ([5, 7, 9], torch.tensor([5, 7]), False),
        ([5, 7], torch.tensor([[5, 7]]), False),
        ([5, 2**40], torch.tensor([5, 0], dtype=torch.int32), False),
        ([], torch.tensor([], dtype=torch.int64), False),
        ([5], torch.tensor(5), False),
        (torch.tensor([5, 7]), [5, 7], False),
    ],
)
def test_numbers_in_a_list_and_in_a_tensor(before: Any, now: Any, same: bool) -> None:
    """A rollout that passes lengths as a list, and an update that passes them as a tensor (DanceGRPO's Qwen-Image)."""
    call = kept(1, x=BATCH[:1], lengths=before, mask=BATCH[:1])
    arguments = {"x": BATCH[:1], "lengths": now, "mask": BATCH[:1]}
    found = compare({0: (call, 0)}, arguments, rows=1, copies=1, promote=True)
    assert (found == {}) == same


def test_numbers_in_a_list_are_compared_row_by_row() -> None:
    call = kept(ROWS, x=BATCH[:ROWS], lengths=[5, 6, 7])
    rows = {at: (call, 2 - at) for at in range(ROWS)}
    now = {"x": BATCH[[2, 1, 0]], "lengths": torch.tensor([7, 6, 5])}
    assert compare(rows, now, rows=ROWS, copies=1, promote=False) == {}
    now["lengths"] = torch.tensor([7, 6, 6])
    assert compare(rows, now, rows=ROWS, copies=1, promote=False) == {2: "lengths differs by up to 1"}


ONES = torch.ones(ROWS * COPIES, 4)


@pytest.mark.parametrize(
    ("before", "now", "same"),
    [
        (ONES, ONES.bfloat16(), "autocast"),
        (ONES[:, 0], ONES[:, 0].bfloat16(), "wrapper"),
        (torch.tensor(0.5), torch.tensor(0.5).bfloat16(), "wrapper"),
        (torch.tensor([0.5]), torch.full((ROWS * COPIES,), 0.5).half(), "wrapper"),
        (ONES.bool(), ONES, "never"),
        (ONES, ONES.bool(), "never"),
        (ONES.long(), ONES, "never"),
        (ONES.long(), ONES.bool(), "never"),
        (ONES.long(), ONES.int(), "never"),
    ],
)
def test_another_dtype_of_equal_value(before: Tensor, now: Tensor, same: str) -> None:
    """The same where the network casts it anyway: not a mask of another kind, nor what it computes with at once."""
    rows = {place: (kept(ROWS, x=before), place) for place in range(ROWS)}

    def told(promote: bool, cast: bool) -> dict[int, str]:
        return compare(rows, {"x": now}, rows=ROWS, copies=COPIES, promote=promote, cast=cast)

    assert told(False, False).keys() == {0, 1, 2}
    assert (told(True, False) == {}) == (same == "autocast")
    assert (told(False, True) == {}) == (same != "never")
