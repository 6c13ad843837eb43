"""Arguments and results of a network call: their names, the tensors inside them, copies of them."""

import dataclasses
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

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


def rebuildable(value: Any) -> bool:
    """Whether :func:`map_tensors` can rebuild `value`."""
    try:
        map_tensors(value, lambda tensor: tensor)
    except Uncuttable:
        return False
    return True


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


def named(net: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments by the names of `net`'s parameters, with defaults: rollout and update may spell a call differently.

    Without `return_dict`, which changes the container of the result only. Arguments that do not fit the signature, as
    behind a wrapper that takes anything, go by their place.
    """
    try:
        bound = inspect.signature(net.forward).bind(*args, **kwargs)
    except (TypeError, ValueError):
        found: dict[str, Any] = {str(place): item for place, item in enumerate(args)} | kwargs
    else:
        bound.apply_defaults()
        found = dict(bound.arguments)
        for name, parameter in bound.signature.parameters.items():
            if parameter.kind == parameter.VAR_KEYWORD:
                found |= found.pop(name)
    found.pop("return_dict", None)
    return found


def hidden(net: nn.Module) -> str:
    """Why arguments that are only spelt in another way cannot be told from others, in words; nothing if they can.

    What takes the place of a `forward` may do anything with an argument that is absent, so it is not looked through.
    """
    try:
        parameters = inspect.signature(net.forward).parameters.values()
    except (TypeError, ValueError):
        return "the signature of its forward cannot be read"
    if any(parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD) for parameter in parameters):
        return ""
    name = getattr(net.forward, "__qualname__", type(net.forward).__name__)
    return f"{name} took the place of its forward and hides the parameters; functools.wraps(forward) on it shows them"


def snapshot(named: dict[str, Any]) -> list[tuple[str, Any]]:
    """Arguments as they are now: tensors are copied, since upstream may write into them later."""
    return [(path, item.detach().clone() if isinstance(item, Tensor) else item) for path, item in leaves(named)]


def in_tensors_of(before: list[tuple[str, Any]], now: list[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """`before`, with lists of integers as tensors where `now` has an integer tensor of one dimension in their place.

    A list of lengths in the rollout and a tensor of the same lengths in the update are the same numbers for a network.
    Only lists of as many entries, all of them plain integers that the tensor could hold; anything else stays what it
    is, and so is another argument.
    """
    found = list(before)
    for path, tensor in now:
        if not isinstance(tensor, Tensor) or tensor.dim() != 1 or tensor.dtype not in (torch.int32, torch.int64):
            continue
        listed = [place for place, (name, _) in enumerate(found) if name.startswith(f"{path}[")]
        numbers = [found[place][1] for place in listed]
        names = [f"{path}[{index}]" for index in range(tensor.numel())]
        largest = torch.iinfo(tensor.dtype).max
        if not listed or [found[place][0] for place in listed] != names:
            continue
        if all(type(number) is int and abs(number) <= largest for number in numbers):
            folded = torch.tensor(numbers, dtype=tensor.dtype, device=tensor.device)
            found[listed[0] : listed[-1] + 1] = [(path, folded)]
    return found


def as_tuple(result: Any, kwargs: dict[str, Any]) -> Any:
    """A named result (diffusers, transformers) as the tuple that `return_dict=False` asks for."""
    plain = kwargs.get("return_dict", True) is False and hasattr(result, "to_tuple")
    return result.to_tuple() if plain else result


def needs_grad(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a gradient must flow into the arguments: a replay would cut it off."""
    return any(isinstance(item, Tensor) and item.requires_grad for _, item in leaves((args, kwargs)))


def uncomparable(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """The path and type of an argument whose change nobody could notice, or None."""
    for path, item in leaves((args, kwargs)):
        if not isinstance(item, (Tensor, *_PLAIN)):
            return f"{path} is a {type(item).__module__}.{type(item).__qualname__}"
    return None
