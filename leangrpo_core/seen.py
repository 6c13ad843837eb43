"""What a kept call depended on besides its arguments: looked at as a whole, or, where it must be quick, at a glance."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .guard import BITS, checksum, local, parameters_of
from .plain import Value, attributes_of, hooks_of, switched

_FEW = 4


@dataclass(frozen=True)
class Seen:
    """What a kept call depended on besides its arguments.

    Attributes:
        weights: checksum of all weights, frozen ones too; under a sharded wrapper of this rank's share. None after a
            glance.
        buffers: checksum of the buffers; None after a glance.
        beginnings, of_buffers: the first few values of each of them.
        versions: how often weights were written in place, as far as autograd counts it.
        trainable: which weights ask for a gradient: a graph has none for those that did not.
        adapters: which adapters of a peft network are active.
        hooks: hooks on the forward of the layers.
        attributes: plain attributes of the layers, by name: a precision, a scale, a switch.
    """

    weights: tuple[int, ...] | None
    buffers: tuple[int, ...] | None
    beginnings: tuple[int, ...]
    of_buffers: tuple[int, ...]
    versions: int
    trainable: tuple[bool, ...]
    adapters: tuple[str, ...]
    hooks: tuple[str, ...]
    attributes: dict[str, Value]

    def others(self, now: "Seen", books: Collection[str] = ()) -> list[str]:
        """What differs from what is seen now, in words; of attributes the first one, and none of `books`."""
        wholly = self.weights is not None and now.weights is not None
        same = {
            "weights": self.weights == now.weights if wholly else self.beginnings == now.beginnings,
            "buffers": self.buffers == now.buffers if wholly else self.of_buffers == now.of_buffers,
            "trainable": self.trainable == now.trainable,
            "adapters": self.adapters == now.adapters,
            "hooks": self.hooks == now.hooks,
        }
        found = [name for name, alike in same.items() if not alike]
        changed = [name for name in switched(self.attributes, now.attributes) if name not in books]
        return found or changed[:1]


def see(net: nn.Module, wholly: bool = True) -> Seen:
    """What a call of `net` would depend on now. At a glance, if not `wholly`: of weights and buffers the beginnings."""
    weights = parameters_of(net)
    buffers = list(net.buffers())
    return Seen(
        checksum(weight.data for weight in weights) if wholly else None,
        checksum(buffers) if wholly else None,
        _beginnings(weight.data for weight in weights),
        _beginnings(buffers),
        _versions(weights),
        tuple(weight.requires_grad for weight in weights),
        tuple(
            f"{module.active_adapters}{module.disable_adapters}"
            for module in net.modules()
            if hasattr(module, "active_adapters") and hasattr(module, "disable_adapters")
        ),
        hooks_of(net),
        attributes_of(net),
    )


def versions(net: nn.Module) -> int:
    """How often the weights were written in place, as far as autograd counts it."""
    return _versions(parameters_of(net))


def _versions(weights: Iterable[Tensor]) -> int:
    return sum(weight._version for weight in weights if not weight.is_inference())


@torch.no_grad()
def _beginnings(tensors: Iterable[Tensor]) -> tuple[int, ...]:
    """The bits of the first few values of each tensor's first row. One device synchronisation per dtype and device."""
    alike: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        share = local(tensor)
        if share.numel():
            row = share[(0,) * (share.dim() - 1)][:_FEW] if share.dim() else share.reshape(1)
            alike.setdefault((row.dtype, row.device), []).append(row)
    return tuple(bits for rows in alike.values() for bits in _bits(torch.cat(rows)))


def _bits(values: Tensor) -> list[int]:
    return values.view(BITS[values.element_size()]).tolist()
