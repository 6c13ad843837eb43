"""A random generator for "the device", separate from the CPU's, as on a GPU.

On a GPU, noise drawn with `device=...` and a permutation drawn without it come from two generators, so moving one draw
does not change the other. On CPU both would share one stream and moving the permutations would change the noise.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

_SIZED = ("randn", "rand", "randint", "randperm")


def install() -> torch.Generator:
    """Makes random tensors that belong to the device draw from the generator that is returned.

    Device tensors are those asked for with a `device` that is not the string "cpu", and everything `*_like`.
    An explicit `generator` is respected. The generator is seeded wherever torch seeds CUDA's.
    """
    generator = torch.Generator("cpu")
    for name in _SIZED:
        setattr(torch, name, _sized(getattr(torch, name), generator))
    torch.randn_like = _like(lambda out: out.normal_(generator=generator))  # type: ignore[assignment]
    torch.rand_like = _like(lambda out: out.uniform_(generator=generator))  # type: ignore[assignment]

    def seed(value: int) -> None:
        generator.manual_seed(int(value))

    torch.cuda.manual_seed = seed  # type: ignore[assignment]
    torch.cuda.manual_seed_all = seed  # type: ignore[assignment]
    original = torch.manual_seed

    def manual_seed(value: int) -> torch.Generator:
        seed(value)
        return original(value)

    torch.manual_seed = manual_seed  # type: ignore[assignment]
    torch.random.manual_seed = manual_seed  # type: ignore[assignment]
    torch.cuda.get_rng_state = lambda device=None: generator.get_state()  # type: ignore[assignment]
    torch.cuda.set_rng_state = lambda state, device=None: generator.set_state(state)  # type: ignore[assignment]
    return generator


def _sized(function: Callable[..., Any], generator: torch.Generator) -> Callable[..., Any]:
    @functools.wraps(function)
    def draw(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("generator") is None and kwargs.get("device") not in (None, "cpu"):
            kwargs["generator"] = generator
        return function(*args, **kwargs)

    return draw


def _like(fill: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., torch.Tensor]:
    def draw(tensor: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        requires_grad = kwargs.pop("requires_grad", False)
        with torch.no_grad():
            out = fill(torch.empty_like(tensor, **kwargs))
        return out.requires_grad_(requires_grad)

    return draw
