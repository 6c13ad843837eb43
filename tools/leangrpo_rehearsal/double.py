"""Everything in fp64: what differs only by fp32's rounding then agrees to about 1e-14.

Names of floating-point types mean fp64 from here on, as far as a script says them when it runs. A library that took the
type down when it was imported keeps casting; then two native runs tell that this look says nothing.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

KINDS = (torch.float32, torch.float16, torch.bfloat16)
KIND_NAMES = ("float32", "float", "float16", "half", "bfloat16")
MAKERS = ("from_numpy", "tensor", "as_tensor")


class _Names:
    """What names in torch mean: fp64, or torch's own, since what reads and writes files asks by name for types."""

    def __init__(self) -> None:
        self.own = {name: getattr(torch, name) for name in (*KIND_NAMES, *MAKERS)}
        self.wide = dict.fromkeys(KIND_NAMES, torch.float64) | {name: _doubled(self.own[name]) for name in MAKERS}

    def mean(self, meaning: dict[str, Any]) -> None:
        for name, value in meaning.items():
            setattr(torch, name, value)

    def as_torch(self, original: Callable[..., Any]) -> Any:
        """The function, called while names mean what they mean to torch."""

        @functools.wraps(original)
        def called(*args: Any, **kwargs: Any) -> Any:
            self.mean(self.own)
            try:
                return original(*args, **kwargs)
            finally:
                self.mean(self.wide)

        return called


def install() -> None:
    """In a child, before the script starts. Whatever is loaded, made or cast to another floating-point type is fp64."""
    names = _Names()
    torch.set_default_dtype(torch.float64)
    for cls in (torch.Tensor, torch.nn.Module):
        for name in ("float", "half", "bfloat16"):
            setattr(cls, name, lambda self, *_, **__: self.double())
        for name in ("to", "type"):
            setattr(cls, name, _without_casts(getattr(cls, name)))
    torch.load, torch.save = _doubled(names.as_torch(torch.load)), names.as_torch(torch.save)
    for module, name in (("diffusers", "ModelMixin"), ("transformers", "PreTrainedModel")):
        try:
            cls: Any = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError, RuntimeError):  # a script that does without them
            continue
        cls.from_pretrained = classmethod(_model(names.as_torch(cls.from_pretrained.__func__)))
    names.mean(names.wide)


def _wide(item: Any) -> Any:
    if isinstance(item, torch.dtype):
        return torch.float64 if item in KINDS else item
    if isinstance(item, torch.Tensor) and item.dtype in KINDS:
        return item.double()
    return item


def _without_casts(original: Callable[..., Any]) -> Any:
    @functools.wraps(original)
    def cast(self: Any, *args: Any, **kwargs: Any) -> Any:
        kinds = [_wide(item) if isinstance(item, torch.dtype) else item for item in args]
        named = {name: _wide(item) if isinstance(item, torch.dtype) else item for name, item in kwargs.items()}
        return original(self, *kinds, **named)

    return cast


def _doubled(original: Callable[..., Any]) -> Any:
    @functools.wraps(original)
    def made(*args: Any, **kwargs: Any) -> Any:
        return pytree.tree_map(_wide, original(*args, **kwargs))

    return made


def _model(load: Callable[..., Any]) -> Any:
    @functools.wraps(load)
    def from_pretrained(*args: Any, **kwargs: Any) -> Any:
        found = load(*args, **kwargs)
        (found[0] if isinstance(found, tuple) else found).double()
        return found

    return from_pretrained
