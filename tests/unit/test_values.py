"""Tensors in containers: rebuilt in their type, compared by value."""

from types import MappingProxyType, SimpleNamespace

import pytest
import torch

from leangrpo_core.values import Uncuttable, difference, leaves, map_tensors, snapshot, uncomparable


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


@pytest.mark.parametrize(
    ("kept", "now", "reason"),
    [
        (X, X.clone(), None),
        (X.bfloat16(), X, None),
        (X, X.double(), None),
        (torch.tensor([1, 2]), torch.tensor([1, 3]), "differs by up to 1"),
        (X, X + 1e-6, "differs by up to"),
        (X, X[:1], "has shape"),
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
    found = difference(snapshot((), {"x": kept}), (), {"x": now}, promote=True)
    assert found is None if reason is None else found is not None and reason in found


def test_another_dtype_is_the_same_under_autocast_only() -> None:
    kept = snapshot((X.bfloat16(),), {})
    assert difference(kept, (X,), {}, promote=True) is None
    assert difference(kept, (X,), {}, promote=False) == "[0][0] is torch.float32, was torch.bfloat16"


def test_arguments_whose_change_nobody_could_see() -> None:
    assert uncomparable((X, 1, "a", None), {"k": [X, {"d": 2.0}]}) is None
    assert uncomparable((), {"cache": SimpleNamespace(a=1)}) == "[1].cache is a types.SimpleNamespace"


def test_snapshot_does_not_follow_later_writes() -> None:
    x = torch.ones(2)
    kept = snapshot((x,), {})
    x.zero_()
    assert difference(kept, (torch.ones(2),), {}, True) is None and difference(kept, (x,), {}, True) is not None
