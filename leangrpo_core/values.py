"""Tensors inside arguments and results of a network call: map, snapshot, compare."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)


class Uncuttable(Exception):
    """A container that cannot be rebuilt, so that the call cannot be kept."""


def map_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Rebuilds `value` with each tensor replaced, containers of the type they came in.

    Raises:
        Uncuttable: an object that is neither plain data nor a container known how to rebuild.
    """
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, tuple):
        items = [map_tensors(item, change) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if type(value) is list:
        return [map_tensors(item, change) for item in value]
    if type(value) is dict:
        return {key: map_tensors(item, change) for key, item in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):  # also diffusers' BaseOutput
        names = [field.name for field in dataclasses.fields(value) if field.init]
        return dataclasses.replace(value, **{name: map_tensors(getattr(value, name), change) for name in names})
    raise Uncuttable(f"a {type(value).__module__}.{type(value).__qualname__} cannot be rebuilt")


def tensors_of(value: Any) -> list[Tensor]:
    """The floating-point tensors in a network's result; none in one that cannot be rebuilt."""
    found: list[Tensor] = []

    def collect(tensor: Tensor) -> Tensor:
        if tensor.is_floating_point():
            found.append(tensor)
        return tensor

    try:
        map_tensors(value, collect)
    except Uncuttable:
        return []
    return found


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Each tensor and each other value inside `value`, with its path."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from leaves(item, f"{path}.{key}" if path else str(key))
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from leaves(item, f"{path}[{index}]")
    else:
        yield path, value


def detach_all(value: Any) -> None:
    """Cuts the graph off tensors in `value` in place, also off attributes of an object that cannot be rebuilt."""
    for _, item in leaves(value):
        for tensor in [item, *getattr(item, "__dict__", {}).values()]:
            if isinstance(tensor, Tensor) and not tensor._is_view():
                tensor.detach_()


def snapshot(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[str, Any]]:
    """Arguments as they are now: tensors are copied, since upstream may write into them later."""
    found = leaves((args, kwargs))
    return [(path, item.detach().clone() if isinstance(item, Tensor) else item) for path, item in found]


def needs_grad(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a gradient must flow into the arguments: a replay would cut it off."""
    return any(isinstance(item, Tensor) and item.requires_grad for _, item in leaves((args, kwargs)))


def uncomparable(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """The path and type of an argument whose change nobody could notice, or None."""
    for path, item in leaves((args, kwargs)):
        if not isinstance(item, (Tensor, *_PLAIN)):
            return f"{path} is a {type(item).__module__}.{type(item).__qualname__}"
    return None


def difference(kept: list[tuple[str, Any]], args: tuple[Any, ...], kwargs: dict[str, Any], promote: bool) -> str | None:
    """Why `args, kwargs` are not the arguments in `kept`; None when they are.

    Tensors are compared by value, NaN differs from everything. One device synchronisation in all.

    Args:
        promote: equal values of another dtype are the same (under autocast the network casts them anyway).
    """
    now = list(leaves((args, kwargs)))
    if [path for path, _ in kept] != [path for path, _ in now]:
        return "other arguments"
    pairs: list[tuple[str, Tensor, Tensor]] = []
    for (path, old), (_, new) in zip(kept, now, strict=True):
        if isinstance(old, Tensor) != isinstance(new, Tensor):
            return f"{path} is no longer of the same kind"
        if not isinstance(old, Tensor):
            if type(old) is not type(new) or not (old is new or old == new):
                return f"{path} is {new!r}, was {old!r}"
        elif old.shape != new.shape or old.device != new.device:
            return f"{path} has shape {tuple(new.shape)}, had {tuple(old.shape)}"
        elif old.dtype != new.dtype and not promote:
            return f"{path} is {new.dtype}, was {old.dtype}"
        else:
            wide = torch.promote_types(old.dtype, new.dtype)
            pairs.append((path, old.to(wide), new.detach().to(wide)))
    if not pairs:
        return None
    device = pairs[0][1].device
    differs = torch.stack([(old != new).any().to(device) for _, old, new in pairs]).tolist()
    for (path, old, new), bad in zip(pairs, differs, strict=True):
        if bad:
            # fp64, so that integers and booleans have a difference too
            return f"{path} differs by up to {(old.double() - new.double()).abs().max().item():.3g}"
    return None
