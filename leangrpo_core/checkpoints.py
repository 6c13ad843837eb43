"""Makes activation checkpointing save tensors that it is passed by keyword, or in a container, through autograd.

`torch.utils.checkpoint` without reentrance saves positional tensors as a graph saves any, but keeps keyword arguments
and containers in a closure, where nobody can move them. `checkpoint_wrapper` passes on what the network's author wrote.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .segments import swap

try:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
except ImportError:  # what is passed by keyword stays on the device, and is counted there
    CheckpointWrapper = None


def _flattened(original: Callable[..., Any]) -> Callable[..., Any]:
    """`original`, a checkpoint function, with all tensors of the call as positional arguments."""

    def run(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        tensors: list[Tensor] = []

        def note(tensor: Tensor) -> Tensor:
            tensors.append(tensor)
            return torch.tensor(len(tensors) - 1, device="cpu")  # the tensor's place stands for it

        template = swap((args, kwargs), note)

        def call(*given: Tensor) -> Any:
            its_args, its_kwargs = swap(template, lambda place: given[int(place)])
            return function(*its_args, **its_kwargs)

        return original(call, *tensors)

    return run


@contextmanager
def saving_keywords(net: nn.Module) -> Iterator[None]:
    """Within, CheckpointWrappers of `net` save all tensors they are passed; the wrapped module sees the same call.

    Reentrant ones are left alone: torch itself flattens their keywords, and tensors in containers are no part of their
    graph. So are those with a checkpoint function of their own.
    """
    changed: list[tuple[Any, Any]] = []
    for module in net.modules():
        original = getattr(module, "checkpoint_fn", None)
        if (
            CheckpointWrapper is not None
            and isinstance(module, CheckpointWrapper)
            and isinstance(original, functools.partial)
            and original.func is checkpoint
            and original.keywords.get("use_reentrant") is False
        ):
            changed.append((module, original))
            setattr(module, "checkpoint_fn", _flattened(original))  # noqa: B010 (declared as a partial)
    try:
        yield
    finally:
        for module, original in changed:
            module.checkpoint_fn = original
