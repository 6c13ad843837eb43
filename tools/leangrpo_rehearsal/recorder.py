"""What one rank's process writes down while upstream's script runs: gradients, weights, counts, times."""

from __future__ import annotations

import functools
import importlib
import json
import os
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from leangrpo_rehearsal.beside import LIMIT, NORM
from leangrpo_rehearsal.interleave import Turns
from leangrpo_rehearsal.witness import Witness, as_number, of_the_runtime, peak_rss
from leangrpo_rehearsal.wrappers import local

COLLECTIVES = {
    "all_reduce": "all_reduce", "all_gather": "all_gather", "all_gather_into_tensor": "all_gather",
    "all_gather_single": "all_gather", "all_gather_object": "all_gather_object", "reduce_scatter": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter", "reduce_scatter_single": "reduce_scatter", "broadcast": "broadcast",
    "broadcast_object_list": "broadcast_object_list", "all_to_all": "all_to_all", "all_to_all_single": "all_to_all",
    "barrier": "barrier", "gather": "gather", "scatter": "scatter", "reduce": "reduce",
}  # fmt: skip
"""Functions of `torch.distributed` that are counted, and as what. Names differ between torch versions."""


class StopRehearsal(BaseException):
    """Ends a script that has made all the updates the rehearsal asked for."""


class Recorder:
    """Hooks clipping, optimizer steps, policy forwards and collectives; one file per update under `out`.

    With `follow`, another run's records of the same rank, every update starts from that run's weights: where gradients
    may differ by rounding, the difference of one update must not become another rollout in the next.

    With `average`, gradients are averaged over the ranks before they are clipped, unless a wrapper has done so.
    """

    def __init__(self, out: Path, updates: int, follow: Path | None = None) -> None:
        self.out = out
        self.updates = updates
        self.follow = follow
        self.average = False
        self.clock = time.perf_counter
        """Seconds; `time.process_time` where other processes are busy on the machine."""
        self.done = 0
        self.forwards: Counter[str] = Counter()
        self.rows: Counter[str] = Counter()
        """The same, counting the samples of each."""
        self.witness = Witness()
        self.collectives: Counter[str] = Counter()
        self.spent: defaultdict[str, float] = defaultdict(float)
        self.notes: dict[str, list[torch.Tensor]] = {}
        self._modules: list[torch.nn.Module] = []
        self._grads: dict[str, torch.Tensor | None] | None = None
        self._depth = 0
        self._clipping = False
        self._backward = False
        self._started: float | None = None
        self._ended = 0.0
        self._last = self._cpu = 0.0
        self.turns: Turns | None = None
        """Where this run takes turns with others."""
        self.per_turn = 1
        """Updates."""
        out.mkdir(parents=True, exist_ok=True)
        self._progress = os.open(out / "progress", os.O_CREAT | os.O_WRONLY)

    def install(self, policy: Iterable[str]) -> None:
        """Installs every hook. `policy` names the classes whose forwards are counted."""
        for name in policy:
            module, _, attribute = name.partition(":")
            self._count_forwards(getattr(importlib.import_module(module), attribute))
        self._count_collectives()
        self._time_backward()
        self._watch_clipping()
        self.witness.install()
        # torch.optim deletes its attribute `optimizer`, the module can only be imported.
        hooks: Any = importlib.import_module("torch.optim.optimizer")
        hooks.register_optimizer_step_pre_hook(self._before_step)
        hooks.register_optimizer_step_post_hook(self._after_step)

    @property
    def networks(self) -> list[torch.nn.Module]:
        """Those whose calls were counted."""
        return self._modules

    def note(self, name: str, value: torch.Tensor) -> None:
        """Records a tensor that has to agree between the runs, such as a reward, in the order of the calls."""
        self.notes.setdefault(name, []).append(value.detach().to("cpu", copy=True))

    def finish(self) -> dict[str, Any]:
        """Writes the summary and returns it."""
        summary = {
            "updates": self.done,
            "grad": self.forwards["grad"],
            "no_grad": self.forwards["no_grad"],
            "collectives": dict(sorted(self.collectives.items())),
            "seconds": self._ended - self._started if self._started is not None else 0.0,
            "peak_rss_bytes": peak_rss(),
        }
        (self.out / "summary.json").write_text(json.dumps(summary))
        told, averages = self.witness.cut()
        (self.out / "end.json").write_text(json.dumps({"told": told}))
        torch.save({"averages": averages}, self.out / "end.pt")
        if self.turns is not None:
            self.turns.over()
        return summary

    def beat(self, what: str) -> None:
        """Says that there is progress."""
        # The watchdog looks at this file's time; its text tells where a rank was when it hung.
        os.pwrite(self._progress, f"{what} (update {self.done}, forward {self.forwards.total()})".ljust(80).encode(), 0)

    def _count_forwards(self, cls: type) -> None:
        original: Any = cls.forward  # type: ignore[attr-defined]

        @functools.wraps(original)
        def forward(module: Any, *args: Any, **kwargs: Any) -> Any:
            if self._depth == 0:
                self._enter_forward(module, (*args, *kwargs.values()))
            self._depth += 1
            kind, began = "grad" if torch.is_grad_enabled() else "no_grad", self.clock()
            try:
                return original(module, *args, **kwargs)
            finally:
                self._depth -= 1
                if self._depth == 0 and not self._backward:  # checkpointing calls no whole network in a backward
                    self.spent[kind] += self.clock() - began

        cls.forward = forward  # type: ignore[attr-defined]

    def _enter_forward(self, module: torch.nn.Module, inputs: Iterable[Any]) -> None:
        if self.done >= self.updates:
            raise StopRehearsal
        if self._started is None:
            self._started = self._last = self.clock()
            self._cpu = time.process_time()
        if not any(module is known for known in self._modules):
            self._modules.append(module)
        kind = "grad" if torch.is_grad_enabled() else "no_grad"
        self.forwards[kind] += 1
        self.beat("policy forward")
        if of_the_runtime():
            return
        self.rows[kind] += next((len(item) for item in inputs if isinstance(item, torch.Tensor) and item.ndim), 1)
        self.witness.forward()

    def _time_backward(self) -> None:
        original: Any = torch.autograd.backward

        @functools.wraps(original)
        def backward(*args: Any, **kwargs: Any) -> Any:
            self._backward, outer, began = True, self._backward, self.clock()
            try:
                return original(*args, **kwargs)
            finally:
                self._backward = outer
                if not outer:
                    self.spent["backward"] += self.clock() - began

        torch.autograd.backward = backward  # type: ignore[assignment]

    def _count_collectives(self) -> None:
        nested = False

        def counting(kind: str, original: Any) -> Any:
            @functools.wraps(original)
            def call(*args: Any, **kwargs: Any) -> Any:
                nonlocal nested
                if not nested and self._started is not None and self.done < self.updates:
                    self.collectives[kind] += 1
                nested, outer = True, nested
                try:
                    return original(*args, **kwargs)
                finally:
                    nested = outer

            return call

        for name, kind in COLLECTIVES.items():
            if hasattr(dist, name):
                wrapped = counting(kind, getattr(dist, name))
                setattr(dist, name, wrapped)
                setattr(dist.distributed_c10d, name, wrapped)

    def _watch_clipping(self) -> None:
        from torch.distributed.fsdp import FullyShardedDataParallel

        def watching(original: Any, method: bool) -> Any:
            @functools.wraps(original)
            def clip(target: Any, *args: Any, **kwargs: Any) -> Any:
                if not self._clipping:  # FSDP's method may call the function
                    if not method:
                        target = [target] if isinstance(target, torch.Tensor) else list(target)
                    self._capture(target.parameters() if method else target)
                self._clipping, outer = True, self._clipping
                try:
                    found = original(target, *args, **kwargs)
                finally:
                    self._clipping = outer
                limit, norm = as_number(kwargs.get("max_norm", args[0] if args else None)), as_number(found)
                if not outer and limit is not None and norm is not None:
                    self.witness.tell(NORM, norm)
                    self.witness.tell(LIMIT, limit)
                return found

            return clip

        FullyShardedDataParallel.clip_grad_norm_ = watching(FullyShardedDataParallel.clip_grad_norm_, True)
        clip = watching(torch.nn.utils.clip_grad_norm_, False)
        torch.nn.utils.clip_grad_norm_ = clip
        torch.nn.utils.clip_grad.clip_grad_norm_ = clip

    def _capture(self, parameters: Iterable[torch.Tensor]) -> None:
        parameters = list(parameters)
        if self.average and not self.collectives["reduce_scatter"]:
            _average(parameters)
        self._grads = {}
        for name, parameter in self._named(parameters):
            grad = parameter.grad
            for part, span in _parts(name, parameter):
                self._grads[part] = None if grad is None else local(grad.detach()).reshape(-1)[span].clone()

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self._grads is None:  # a trainer that does not clip
            self._capture(p for group in optimizer.param_groups for p in group["params"])
        self.witness.step(optimizer)

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self.done >= self.updates:
            return
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        weights = {
            part: local(parameter.detach()).reshape(-1)[span].clone()
            for name, parameter in self._named(parameters)
            for part, span in _parts(name, parameter)
        }
        now = self.clock()
        told, averages = self.witness.cut()
        figures = {
            "seconds": now - self._last, "cpu": time.process_time() - self._cpu, "forwards": dict(self.forwards),
            "collectives": dict(self.collectives), "spent": dict(self.spent), "rows": dict(self.rows), "told": told,
        }  # fmt: skip
        # Apart from the tensors, so that a process without torch can read them.
        (self.out / f"update{self.done}.json").write_text(json.dumps(figures))
        tensors = {"grads": self._grads, "weights": weights, "notes": self.notes, "averages": averages}
        torch.save(tensors, self.out / f"update{self.done}.pt")
        if self.follow is not None:
            self._adopt(parameters, torch.load(self.follow / f"update{self.done}.pt", weights_only=True)["weights"])
        self._grads, self.notes, self._ended = None, {}, now
        self.done += 1
        self.beat("optimizer step")
        if self.turns is not None and self.done % self.per_turn == 0 and self.turns.left:
            self.turns.over()
            if not self.turns.wait(self.beat):
                raise StopRehearsal
        self._last, self._cpu = self.clock(), time.process_time()

    @torch.no_grad()
    def _adopt(self, parameters: Iterable[torch.Tensor], weights: dict[str, torch.Tensor]) -> None:
        for name, parameter in self._named(parameters):
            for part, span in _parts(name, parameter):
                target = local(parameter) if span == slice(None) else parameter[span]
                target.copy_(weights[part].view_as(target))

    def _named(self, parameters: Iterable[torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        names = {id(p): name for module in self._modules for name, p in module.named_parameters()}
        for index, parameter in enumerate(parameters):
            yield names.get(id(parameter), f"parameter {index}"), parameter


def _parts(name: str, parameter: Any) -> Iterator[tuple[str, slice]]:
    """The original parameters inside an FSDP1 flat parameter's local shard, by name; otherwise the whole."""
    name = name.replace("_fsdp_wrapped_module.", "").replace("_checkpoint_wrapped_module.", "")
    infos = getattr(parameter, "_shard_param_infos", None)
    names = getattr(parameter, "_fqns", None)
    if not infos or not names:
        yield name, slice(None)
        return
    prefix = name.removesuffix("_flat_param")
    for part, info in zip(names, infos, strict=True):
        if info.in_shard:
            yield prefix + part, slice(info.offset_in_shard, info.offset_in_shard + info.numel_in_shard)


@torch.no_grad()
def _average(parameters: Iterable[torch.Tensor]) -> None:
    """The mean over the ranks of each gradient, which every rank must have."""
    for parameter in parameters:
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
