"""Gradients per sample from one backward of a batched call, where all that trains is weights of linear layers (LoRA).

Within `recording`, such a layer runs as a function of its own: the same product, whose backward gives the gradient of
each sample by a batched product and leaves the weight's `.grad` alone. What it saves goes through autograd like any
other saved tensor, so activation checkpointing and offloading treat it as they do the layer's own.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from .buffers import Gradient, wide


def why_not(net: nn.Module) -> str:
    """Why there is no gradient per sample for this network, or nothing."""
    layers = {id(p) for module in _layers(net) for p in module.parameters(recurse=False)}
    for name, parameter in net.named_parameters():
        if parameter.requires_grad and id(parameter) not in layers:
            return f"{name} trains and is no weight of a plain linear layer"
    return ""


def _layers(net: nn.Module) -> list[nn.Linear]:
    """Linear layers of which something trains, whose forward is torch's own."""
    return [
        module
        for module in net.modules()
        if isinstance(module, nn.Linear)
        and type(module).forward is nn.Linear.forward
        and "forward" not in vars(module)
        and any(p.requires_grad for p in module.parameters(recurse=False))
    ]


class PerSample:
    """Gradients of one batched call.

    Args:
        net: the network, for which `why_not` says nothing.
        parameters: its trainable weights.
        rows, copies: samples of the call, and copies of them in each tensor (see `rows.py`).

    Attributes:
        sums: per weight, [rows, *shape]; None until a backward reached it.
        refusal: why the figures cannot be used, or nothing.
    """

    def __init__(self, net: nn.Module, parameters: list[nn.Parameter], rows: int, copies: int) -> None:
        self.rows, self.copies, self.refusal = rows, copies, ""
        self.sums: list[Tensor | None] = [None] * len(parameters)
        self._places = {id(parameter): place for place, parameter in enumerate(parameters)}
        self._layers = _layers(net)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Around the forward, and around its backward, which may run parts of the forward again."""
        for layer in self._layers:
            layer.forward = _Forward(layer, self)
        try:
            yield
        finally:
            for layer in self._layers:
                del layer.forward

    def of(self, place: int) -> Gradient:
        """One sample's gradient; views."""
        return [None if found is None else found[place] for found in self.sums]

    def add(self, layer: nn.Linear, x: Tensor, grad: Tensor) -> None:
        """What one call of a layer adds: its input and the gradient of its output, [copies * rows, ..., features]."""
        if x.shape[0] != self.copies * self.rows or x.dim() < 2:
            self.refusal = f"a linear layer ran on {tuple(x.shape)}, which is not {self.copies} x {self.rows} rows"
            return
        for xs, gs in zip(self._by_copy(x.to(grad.dtype)), self._by_copy(grad), strict=True):
            if layer.weight.requires_grad:
                self._put(layer.weight, torch.bmm(gs.transpose(1, 2), xs))
            if layer.bias is not None and layer.bias.requires_grad:
                self._put(layer.bias, gs.sum(dim=1))

    def _by_copy(self, tensor: Tensor) -> Tensor:
        """[copies, rows, tokens, features]: a view; bringing the copies of a row together would move all of it."""
        return tensor.reshape(self.copies, self.rows, -1, tensor.shape[-1])

    def _put(self, parameter: Tensor, grads: Tensor) -> None:
        place = self._places[id(parameter)]
        held, grads = self.sums[place], grads.to(wide(parameter.dtype))
        self.sums[place] = grads if held is None else held.add_(grads)


class _Forward:
    """The forward of a layer within `recording`."""

    def __init__(self, layer: nn.Linear, into: PerSample) -> None:
        self._layer, self._into = layer, into

    def __call__(self, input: Tensor) -> Tensor:
        layer = self._layer
        if not torch.is_grad_enabled():
            return nn.functional.linear(input, layer.weight, layer.bias)
        # The weight takes part so that the result asks for a gradient even where the input does not.
        return _Linear.apply(input, layer.weight, layer.bias, layer, self._into)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, layer: nn.Linear, into: PerSample) -> Tensor:
        out = nn.functional.linear(x, weight, bias)
        ctx.dtype, ctx.layer, ctx.into = x.dtype, layer, into
        ctx.save_for_backward(x.to(out.dtype), weight)  # under autocast in its precision, as torch's own does
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (grad,), (x, weight) = grads, ctx.saved_tensors
        ctx.into.add(ctx.layer, x, grad)
        back = (grad @ weight.to(grad.dtype)).to(ctx.dtype) if ctx.needs_input_grad[0] else None
        return back, None, None, None, None
