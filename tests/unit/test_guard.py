"""The checksum sees every change of a weight that a norm would miss."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from leangrpo_core import guard
from leangrpo_core.guard import checksum, why_unlike_training

CHANGES: dict[str, Callable[[Tensor], object]] = {
    "sign": lambda w: w.neg_(),
    "one bit": lambda w: w.view(-1)[5].add_(w.view(-1)[5].abs() * 0.01 + 1),
    "two exchanged in a row": lambda w: w[0, :2].copy_(w[0, :2].flip(0).clone()),
    "two exchanged in a column": lambda w: w[:2, 0].copy_(w[:2, 0].flip(0).clone()),
    "rows rolled": lambda w: w.copy_(w.roll(1, 0)),
    "columns rolled": lambda w: w.copy_(w.roll(1, 1)),
    "transposed block": lambda w: w[:3, :3].copy_(w[:3, :3].T.clone()),
    "negative zero": lambda w: w[0, 0].zero_().neg_(),
    "last value": lambda w: w.view(-1)[-1].add_(1),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.float16])
@pytest.mark.parametrize("change", list(CHANGES))
def test_every_change_shows(dtype: torch.dtype, change: str) -> None:
    torch.manual_seed(0)
    weight = torch.randn(7, 5).to(dtype)
    if change == "negative zero":
        weight[0, 0] = 0
    before = checksum([weight])
    assert checksum([weight.clone()]) == before
    CHANGES[change](weight)
    assert checksum([weight]) != before


def test_shapes_and_order_count() -> None:
    a, b = torch.ones(1), torch.arange(10.0)
    assert checksum([a, b]) != checksum([b, a])
    assert checksum([]) == ()
    assert len(checksum([torch.empty(0), torch.tensor(1.0), torch.randn(3, dtype=torch.complex64)])) == 3


def test_permutations_that_keep_sums_show() -> None:
    eye, shuffled = torch.eye(24), torch.eye(24)[torch.randperm(24)]
    assert checksum([eye]) != checksum([shuffled])
    assert checksum([torch.tensor([[1.0, 2.0], [2.0, 1.0]])]) != checksum([torch.tensor([[2.0, 1.0], [1.0, 2.0]])])


def test_large_tensors_are_summed_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(guard._PIECES, "cpu", 7)
    weight = torch.randn(40)
    before = checksum([weight])
    for place in range(39):
        changed = weight.clone()
        changed[place], changed[place + 1] = weight[place + 1], weight[place]
        assert checksum([changed]) != before


def test_random_exchanges_show() -> None:
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(40, 40, generator=generator)
    before = checksum([weight])
    for _ in range(200):
        i, j = torch.randint(1600, (2,), generator=generator).tolist()
        changed = weight.clone().view(-1)
        changed[i], changed[j] = weight.view(-1)[j], weight.view(-1)[i]
        assert (checksum([changed.view(40, 40)]) != before) == (i != j)


def test_layers_that_depend_on_the_mode() -> None:
    assert why_unlike_training(nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.0), nn.LayerNorm(2))) is None
    assert "0 (" not in str(why_unlike_training(nn.Sequential(nn.Dropout(0.1))))
    assert why_unlike_training(nn.Dropout2d(0.5)) is not None
    assert why_unlike_training(nn.Sequential(nn.BatchNorm2d(3))) is not None
