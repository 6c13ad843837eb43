"""Faults that tests put into single ranks of a rehearsal; each takes the rank's `Context` before the script starts."""

from __future__ import annotations

import functools
import math
import time
from typing import Any

import torch

from leangrpo_rehearsal.base import Context


def other_inputs(context: Context) -> None:
    """The update sees other image ids than the rollout did, in one of its calls (`args["call"]`)."""
    squeeze, calls = torch.Tensor.squeeze, 0

    def changed(tensor: torch.Tensor, *args: Any) -> torch.Tensor:
        nonlocal calls
        out = squeeze(tensor, *args)
        # Upstream's update squeezes the image ids, [1, tokens, 3], before each network call.
        if (
            torch.is_grad_enabled()
            and args == (0,)
            and tensor.shape[0] == 1
            and tensor.ndim == 3
            and tensor.shape[2] == 3
        ):
            calls += 1
            if calls == context.args["call"]:
                return out + 1
        return out

    torch.Tensor.squeeze = changed  # type: ignore[assignment, method-assign]


def advantages(context: Context) -> None:
    """Every advantage of the rank becomes `args["value"]`, or NaN without one."""
    clamp = torch.clamp

    def replaced(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        out = clamp(tensor, *args, **kwargs)
        if args == (-5.0, 5.0) and not tensor.requires_grad:
            return torch.full_like(out, context.args.get("value", math.nan))
        return out

    torch.clamp = replaced  # type: ignore[assignment]


def lower_budget(context: Context) -> None:
    """The runtime of this rank works with `args["bytes"]`, while all ranks agree on the settings."""

    def lower(module: Any) -> None:
        rollout_call = module.rollout_call

        @functools.wraps(rollout_call)
        def poorer(*args: Any, **kwargs: Any) -> Any:
            kwargs["budget"] = context.args["bytes"]
            return rollout_call(*args, **kwargs)

        module.rollout_call = poorer

    context.after_import("_leangrpo.keep", lower)


def sleep(context: Context) -> None:
    """The rank stops for good at the first clipping."""
    clamp = torch.clamp

    def asleep(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        if args == (-5.0, 5.0):
            time.sleep(3600)
        return clamp(tensor, *args, **kwargs)

    torch.clamp = asleep  # type: ignore[assignment]


def skewed_gradient(context: Context) -> None:
    """One entry of one gradient is wrong by one part in a hundred thousand, or by `args["by"]`."""
    from diffusers import FluxTransformer2DModel

    by = context.args.get("by", 1e-5)

    init = FluxTransformer2DModel.__init__

    @functools.wraps(init)
    def hooked(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        self.proj_out.register_full_backward_hook(lambda module, grad_in, grad_out: (grad_in[0] * (1 + by),))

    FluxTransformer2DModel.__init__ = hooked  # type: ignore[method-assign]


def skewed_adapters(context: Context) -> None:
    """The gradients of every adapter's A are wrong by one part in a hundred thousand, or `args["by"]`."""
    from diffusers.loaders.peft import PeftAdapterMixin

    original, by = PeftAdapterMixin.add_adapter, context.args.get("by", 1e-5)

    def skewed(module: Any, args: Any, out: torch.Tensor) -> torch.Tensor:
        return out.detach() + (out - out.detach()) * (1 + by)

    def add_adapter(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        for name, module in self.named_modules():  # type: ignore[attr-defined]
            if name.endswith("lora_A.default"):
                module.register_forward_hook(skewed)

    PeftAdapterMixin.add_adapter = add_adapter  # type: ignore[method-assign]


def missing_module(context: Context) -> None:
    """The script's next import fails."""
    import sys

    sys.modules["accelerate.utils"] = None  # type: ignore[assignment]


def without_advantages(context: Context) -> None:
    """All groups of rank `args["rank"]` have the same reward: its advantages are zero, as every rank computes them."""

    def replace(module: Any) -> None:
        update = module.PerPromptStatTracker.update

        @functools.wraps(update)
        def zeroed(self: Any, prompts: Any, rewards: Any, *args: Any) -> Any:
            found = update(self, prompts, rewards, *args)
            share = len(found) // context.world
            found[context.args["rank"] * share : (context.args["rank"] + 1) * share] = 0.0
            return found

        module.PerPromptStatTracker.update = zeroed

    context.after_import("flow_grpo.stat_tracking", replace)


def unshuffled(context: Context) -> None:
    """The script trains the samples in the order in which it drew them."""
    draw: Any = torch.randperm

    def randperm(count: int, *args: Any, **kwargs: Any) -> Any:
        drawn = draw(count, *args, **kwargs)
        return torch.arange(count, device=kwargs["device"]) if "device" in kwargs else drawn

    torch.randperm = randperm  # type: ignore[assignment]


def unwritable(context: Context) -> None:
    """What the recorder is to write down cannot be written."""

    def save(*_: Any) -> None:
        raise TypeError("no such tensor")

    torch.save = save  # type: ignore[assignment]
