"""Matrix products whose rounding depends on their shapes, as that of many machines' libraries does.

A row of a product is summed in an order that follows from the whole product's shape and from the row's place in it. So
equal calls agree to the bit, and a row alone rounds otherwise than among others. On the machine at hand the library may
not do so; a test that silently relies on that fails here.
"""

import functools
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

NAME = "TEST_ROUNDING"  # the suite runs with such products where this variable is `by-shape`
STARTUP = str(Path(__file__).with_name("startup"))  # on PYTHONPATH the interpreters of rehearsals have them, too
_kept: list[Any] = []  # a library's registrations end with it


@functools.cache
def _order(inner: int, seed: int) -> Tensor:
    return torch.randperm(inner, generator=torch.Generator().manual_seed(seed))


def _product(out: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """`a @ b`, [..., M, K] by [..., K, N], into `out`."""
    rows, inner, columns = a.shape[-2], a.shape[-1], b.shape[-1]
    multiply = torch.ops.aten.mm.out if a.dim() == 2 else torch.ops.aten.bmm.out
    whole = rows - rows % 4  # libraries compute what is left over in another way
    for part, begin, end in ((0, 0, whole), (1, whole, rows)):
        if end > begin:
            order = _order(inner, ((rows * 1009 + columns) * 1009 + inner) * 2 + part)
            multiply(a[..., begin:end, order], b[..., order, :], out=out[..., begin:end, :])
    return out


def _mm(a: Tensor, b: Tensor) -> Tensor:
    return _product(a.new_empty(*a.shape[:-1], b.shape[-1]), a, b)


def _addmm(bias: Tensor, a: Tensor, b: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Tensor:
    product = _mm(a, b)
    product = product if alpha == 1 else product * alpha
    return product if beta == 0 else product + (bias if beta == 1 else bias * beta)


def install() -> None:
    """From now on, in this process and its forks; forwards and backwards, in any thread."""
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a kernel is replaced
        for name, function in (("mm", _mm), ("bmm", _mm), ("addmm", _addmm), ("baddbmm", _addmm)):
            library.impl(name, function, "CPU")
    _kept.append(library)
