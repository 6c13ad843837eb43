"""Tensors in containers: rebuilt in their type, compared by value."""

from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from leangrpo_core.rows import ROUNDED, compare
from leangrpo_core.values import Uncuttable, as_tuple, leaves, map_tensors, named, snapshot, uncomparable


def test_map_leaves_other_values_alone() -> None:
    value = {"a": (torch.ones(2), None, "x"), "b": [torch.zeros(1), {"c": 3}]}
    doubled = map_tensors(value, lambda tensor: tensor * 2)
    assert doubled["a"][0].tolist() == [2, 2] and doubled["a"][1:] == (None, "x") and doubled["b"][1] == {"c": 3}
    assert value["a"][0].tolist() == [1, 1]


def test_map_refuses_what_it_cannot_rebuild() -> None:
    with pytest.raises(Uncuttable, match="mappingproxy"):
        map_tensors(MappingProxyType({}), lambda tensor: tensor)


def test_paths_name_the_argument() -> None:
    assert [path for path, _ in leaves(((1,), {"k": [2, {"d": 3}]}))] == ["[0][0]", "[1].k[0]", "[1].k[1].d"]


X = torch.tensor([1.0, 2.0])


def difference(kept: Any, now: Any, promote: bool = True) -> str | None:
    """Why a call of one row with the argument `now` is not the one that was kept."""
    call = SimpleNamespace(inputs=snapshot({"x": kept}), rows=1)
    return compare({0: (call, 0)}, {"x": now}, rows=1, copies=1, promote=promote).get(0)


@pytest.mark.parametrize(
    ("kept", "now", "reason"),
    [
        (X, X.clone(), None),
        (X.bfloat16(), X, None),
        (X, X.double(), None),
        (torch.tensor([1, 2]), torch.tensor([1, 3]), "differs by up to 1"),
        (X, X + 1e-6, "differs by up to"),
        (X, torch.ones(3), "has shape"),
        (X, X[:1], "differs by up to 1"),
        (torch.ones(2), torch.ones(1), None),
        (X, torch.tensor([1.0, torch.nan]), "differs"),
        (torch.tensor([torch.nan]), torch.tensor([torch.nan]), "differs"),
        (X, [1.0, 2.0], "other arguments"),
        (X, 1.0, "no longer of the same kind"),
        (1, 2, "is 2, was 1"),
        (1, True, "is True, was 1"),
        (None, None, None),
        ({"a": 1}, {"b": 1}, "other arguments"),
        (0.1 + 0.2, 0.3, "is 0.3"),
    ],
)
def test_difference(kept: object, now: object, reason: str | None) -> None:
    found = difference(kept, now)
    assert found is None if reason is None else found is not None and reason in found


def test_another_dtype_is_the_same_under_autocast_only() -> None:
    assert difference(X.bfloat16(), X) is None
    assert difference(X.bfloat16(), X, promote=False) == f"{ROUNDED}x differs by up to 0"


def test_arguments_whose_change_nobody_could_see() -> None:
    assert uncomparable((X, 1, "a", None), {"k": [X, {"d": 2.0}]}) is None
    assert uncomparable((), {"cache": SimpleNamespace(a=1)}) == "[1].cache is a types.SimpleNamespace"


def test_snapshot_does_not_follow_later_writes() -> None:
    x = torch.ones(2)
    kept = snapshot({"x": x})
    x.zero_()
    assert torch.equal(kept[0][1], torch.ones(2))


class Named(nn.Module):
    def forward(self, sample: Any, timestep: Any, scale: float = 1.0, *, return_dict: bool = True, **more: Any) -> None:
        """Only its signature matters."""


def test_arguments_go_by_name_with_defaults() -> None:
    """However a call is spelt; without what only changes the container of the result."""
    spelt = [
        ((1, 2), {}),
        ((1,), {"timestep": 2, "return_dict": False}),
        ((), {"timestep": 2, "sample": 1, "scale": 1.0}),
    ]
    assert [named(Named(), args, kwargs) for args, kwargs in spelt] == [{"sample": 1, "timestep": 2, "scale": 1.0}] * 3
    assert named(Named(), (1, 2), {"extra": 3})["extra"] == 3
    assert named(Named(), (1,), {}) == {"0": 1}  # does not fit: as it was written


class Result(SimpleNamespace):
    def to_tuple(self) -> tuple[int]:
        return (self.sample,)


def test_a_named_result_as_a_tuple() -> None:
    result = Result(sample=1)
    assert as_tuple(result, {"return_dict": False}) == (1,)
    assert as_tuple(result, {}) is result and as_tuple((1,), {"return_dict": False}) == (1,)
