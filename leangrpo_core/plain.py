"""What a layer computes by besides weights and buffers, as far as it can be compared: plain attributes and hooks.

A tensor that is an attribute and neither weight nor buffer is not looked at: FSDP1 puts such tensors in the place of
weights, now and then with nothing in them.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

try:
    from torch.distributed.fsdp import FSDPModule
except ImportError:  # torch before 2.6
    from torch.distributed._composable.fsdp import FSDPModule

# What every module has: `training`, which the update's mode sets anyway, and the hooks.
_OWN = frozenset(vars(nn.Module()))
_PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device)
_WRAPPERS = ("torch.distributed.", "torch.nn.parallel.")
_DEEP = 4  # containers in containers


class Value(NamedTuple):
    """A plain attribute, as text: so NaN equals itself, and True and 1 differ.

    Attributes:
        text: the value.
        container: it is a dict, a list or a tuple.
        default: what the class has under that name, which counts while the layer has none of its own.
    """

    text: str
    container: bool
    default: str | None


def attributes_of(net: nn.Module) -> dict[str, Value]:
    """Plain attributes of every layer, and containers of plain values, less those of torch's own wrappers.

    Some trainers switch the precision of the layers between rollout and update with nothing but such an attribute; peft
    has an adapter's scale in a dict. Wrappers keep books in theirs. FSDP2 is none: it makes a layer's class its own,
    and the attributes stay the layer's.
    """
    found = {}
    for name, module in net.named_modules():
        if type(module).__module__.startswith(_WRAPPERS) and not isinstance(module, FSDPModule):
            continue
        for key, value in vars(module).items():
            if key not in _OWN and _is_plain(value):
                default = getattr(type(module), key, found)  # `found` stands for none: it is not plain
                found[f"{name}.{key}"] = Value(
                    repr(value), not isinstance(value, _PLAIN), repr(default) if isinstance(default, _PLAIN) else None
                )
    return found


def _is_plain(value: Any, deep: int = _DEEP) -> bool:
    if isinstance(value, _PLAIN):
        return True
    if deep and isinstance(value, dict):
        return all(isinstance(key, _PLAIN) and _is_plain(item, deep - 1) for key, item in value.items())
    return bool(deep) and isinstance(value, (list, tuple)) and all(_is_plain(item, deep - 1) for item in value)


def switched(before: Mapping[str, Value], now: Mapping[str, Value]) -> list[str]:
    """Names of attributes that changed. What a layer sets at its first call, or deletes, does not count.

    Unless its class has a value of that name: then the layer had that one before, or has it now.
    """
    found = []
    for name in before.keys() | now.keys():
        old, new = before.get(name), now.get(name)
        if old is not None and new is not None:
            if old.text != new.text and old.container == new.container:
                found.append(name)
        else:
            one = old or new
            if one is not None and one.default not in (None, one.text):
                found.append(name)
    return sorted(found)


def books(before: Mapping[str, Value], after: Mapping[str, Value]) -> set[str]:
    """Attributes that one call of the network has changed and that are its own affair: containers, and what it has set
    or deleted. A plain one that a call changes, such as a counter, may be what the next one computes by.
    """
    return {
        name for name in switched(before, after) if name not in before or name not in after or after[name].container
    }


def hooks_of(net: nn.Module) -> tuple[str, ...]:
    """Hooks on the forward of every layer, less torch's own and the runtime's, each as layer and function."""
    found = []
    for name, module in net.named_modules():
        for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values()):
            called: Any = hook
            while isinstance(called, partial):
                called = called.func
            if not hasattr(called, "__qualname__"):
                called = type(called)
            if called.__module__.split(".")[0] not in ("torch", __name__.split(".")[0]):
                found.append(f"{name}: {called.__module__}.{called.__qualname__}")
    return tuple(found)
