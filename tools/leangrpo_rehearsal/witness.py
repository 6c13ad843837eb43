"""What a script says and does beside gradients and weights: learning rates, logged numbers, clipping, averaged weights.

Everything is noted under a name, in the order in which it happens, from one optimizer step to the next.
"""

from __future__ import annotations

import functools
import gc
import importlib
import re
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from leangrpo_rehearsal.beside import AUTOCAST, AVERAGES_MOVED, CLIP_RANGE, CLIPPED, UNCLIPPED
from leangrpo_rehearsal.importhook import after_import

RUNTIME = "leangrpo/"
"""What the runtime itself logs begins like that; a run of the untouched tree has none of it."""
CLOCK = re.compile(r"(^|[_/\s])(time|times|sec|secs|seconds?|s|elapsed|duration|speed|throughput|memory|mem)($|[_/\s])")
"""Logged names that say how fast or how large a run is."""
AVERAGE = re.compile(r"EMA|Ema|ExponentialMoving|^Average$")
"""Names of classes that hold an average of the weights."""


class Witness:
    """Notes by name since the last optimizer step; :meth:`cut` hands them over."""

    def __init__(self) -> None:
        self._told: dict[str, list[float | str]] = {}
        self._kinds: Counter[str] = Counter()
        self._averages: list[weakref.ref[Any]] | None = None
        self._before: dict[str, torch.Tensor] = {}
        self._inside = False

    def install(self) -> None:
        """Hooks what scripts log with, schedulers, and clamps of a ratio."""
        self._logged(importlib.import_module("wandb"), "log", "logged", method=False)
        after_import("tqdm.std", lambda module: self._logged(module.tqdm, "set_postfix", "shown"))
        after_import("accelerate.accelerator", lambda module: self._logged(module.Accelerator, "log", "logged"))
        self._schedulers()
        for holder in (torch, torch.Tensor):
            self._clamps(holder, "clamp")

    def tell(self, name: str, value: float | str) -> None:
        """Notes a value."""
        self._told.setdefault(name, []).append(value)

    def forward(self) -> None:
        """A policy forward begins."""
        from leangrpo_rehearsal import shims

        self._kinds[shims.wanted()] += 1

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer is about to step."""
        for index, group in enumerate(optimizer.param_groups):
            self.tell(f"learning rate of group {index}", float(group["lr"]))

    def cut(self) -> tuple[dict[str, list[float | str]], dict[str, torch.Tensor]]:
        """What was noted since the last time, and the averaged weights as they are now."""
        if self._kinds:
            self._told[AUTOCAST] = [*sorted(self._kinds)]
        averages, before = self._averaged(), self._before
        if averages:
            moved = [name for name in averages if name in before and not torch.equal(averages[name], before[name])]
            self.tell(AVERAGES_MOVED, float(len(moved)))
        told, self._told, self._kinds, self._before = self._told, {}, Counter(), averages
        return told, averages

    def _logged(self, owner: Any, name: str, how: str, method: bool = True) -> None:
        original: Any = getattr(owner, name)

        @functools.wraps(original)
        def log(*args: Any, **kwargs: Any) -> Any:
            # Accelerate's log may come to wandb's.
            if not self._inside:
                values = args[method] if len(args) > method else kwargs.get("data", kwargs.get("values"))
                values = values if isinstance(values, Mapping) else kwargs
                for key, value in values.items():
                    number = as_number(value)
                    if number is not None and not str(key).startswith(RUNTIME) and not CLOCK.search(str(key)):
                        self.tell(f"{how} {key}", number)
            self._inside, outer = True, self._inside
            try:
                return original(*args, **kwargs)
            finally:
                self._inside = outer

        setattr(owner, name, log)

    def _schedulers(self) -> None:
        schedulers: Any = importlib.import_module("torch.optim.lr_scheduler")
        for cls in (schedulers.LRScheduler, schedulers.ReduceLROnPlateau):
            original: Any = cls.step

            def step(scheduler: Any, *args: Any, _original: Any = original, **kwargs: Any) -> Any:
                done = _original(scheduler, *args, **kwargs)
                self.tell("scheduler steps", float(scheduler.last_epoch))
                for rate in getattr(scheduler, "_last_lr", ()):
                    self.tell("scheduler's rates", float(rate))
                return done

            cls.step = functools.wraps(original)(step)

    def _clamps(self, owner: Any, name: str) -> None:
        original: Callable[..., Any] = getattr(owner, name)

        @functools.wraps(original)
        def clamp(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            low = args[0] if args else kwargs.get("min")
            high = args[1] if len(args) > 1 else kwargs.get("max")
            if torch.is_grad_enabled() and low is not None and high is not None and _around_one(low, high):
                clipped = int(((tensor < low) | (tensor > high)).sum())
                self._told[CLIP_RANGE] = sorted({*self._told.get(CLIP_RANGE, ()), float(low), float(high)}, key=float)
                self.tell(CLIPPED, float(clipped))
                self.tell(UNCLIPPED, float(tensor.numel() - clipped))
                self.tell("mean ratio", float(tensor.detach().double().mean()))
            return original(tensor, *args, **kwargs)

        setattr(owner, name, clamp)

    def _averaged(self) -> dict[str, torch.Tensor]:
        if self._averages is None:
            # Whatever was there before the fork is left out by `gc.freeze`.
            found = [item for item in gc.get_objects() if AVERAGE.search(type(item).__name__)]
            self._averages = [weakref.ref(item) for item in found if hasattr(type(item), "__weakref__")]
        held, seen = {}, Counter[str]()
        for holder in [holder for ref in self._averages if (holder := ref()) is not None]:
            found = {name: tensor.detach().clone() for name, tensor in _tensors(getattr(holder, "__dict__", {}))}
            if found:
                name = type(holder).__name__
                seen[name] += 1
                number = f" {seen[name]}" if seen[name] > 1 else ""
                held |= {f"{name}{number}.{at}": tensor for at, tensor in found.items()}
        return held


def of_the_runtime() -> bool:
    """Whether the runtime makes this forward at the end of an update: to reduce what it has added up, with zeros."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "flush" and frame.f_code.co_filename.endswith("_leangrpo/runtime.py"):
            return True
        frame = frame.f_back
    return False


def _around_one(low: Any, high: Any) -> bool:
    return isinstance(low, (int, float)) and isinstance(high, (int, float)) and 0 < low < 1 < high


def _tensors(values: Any, depth: int = 3) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors in an object's dicts and lists, with the way to them."""
    items: Iterable[tuple[Any, Any]] = values.items() if isinstance(values, dict) else enumerate(values)
    for key, value in items:
        if isinstance(value, torch.Tensor):
            yield str(key), value
        elif depth and isinstance(value, (dict, list, tuple)):
            yield from ((f"{key}.{name}", tensor) for name, tensor in _tensors(value, depth - 1))


def as_number(value: Any) -> float | None:
    """A logged value as a number, or None where it is none."""
    if isinstance(value, torch.Tensor):
        return float(value) if value.numel() == 1 and not hasattr(value, "full_tensor") else None
    if isinstance(value, str) or not hasattr(value, "__float__"):
        try:
            return float(value) if isinstance(value, str) else None
        except ValueError:
            return None
    try:
        return float(value)
    except (TypeError, ValueError):
        return None


def peak_rss() -> int:
    """The process's peak memory, in bytes."""
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
