"""Stand-ins that let a CUDA training script run on CPU. Installed in the rank's process, before the script starts."""

from __future__ import annotations

import contextlib
import datetime
import functools
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.amp import autocast_mode

from leangrpo_rehearsal import devicerng

CPU = torch.device("cpu")
_REGIONS: list[str] = []
"""The autocast regions that the script is in, as it asked for them, the innermost last."""


def wanted() -> str:
    """The autocast that the script has asked for where it is now, also where the rehearsal leaves it off."""
    return _REGIONS[-1] if _REGIONS else "off"


def install(precision: str, store: Path, timeout_s: float) -> None:
    """Installs all of them.

    `precision` "fp32" switches the script's autocast regions off, "bf16" keeps them. `store` is the file through which
    the ranks find each other. Collectives give up after `timeout_s`.
    """
    devicerng.install()
    _cuda()
    _autocast(enabled=precision == "bf16")
    _load()
    _process_group(store, timeout_s)
    _fsdp()
    _compile()
    _dataloader()


def _cuda() -> None:
    cuda: Any = torch.cuda
    cuda.set_device = lambda device=None: None
    # A device and not an index: whatever the script moves "to the current device" then stays on the CPU.
    cuda.current_device = lambda: CPU
    cuda.device_count = lambda: 1
    cuda.synchronize = lambda device=None: None
    cuda.empty_cache = lambda: None
    cuda.reset_peak_memory_stats = lambda device=None: None
    cuda.max_memory_allocated = lambda device=None: 0
    cuda.memory_allocated = lambda device=None: 0
    cuda.get_device_name = lambda device=None: "cpu (rehearsal)"


def _autocast(enabled: bool) -> None:
    base = autocast_mode.autocast

    class RehearsalAutocast(base):
        """autocast that sends "cuda" to "cpu" and is disabled when the rehearsal runs in fp32."""

        def __init__(self, device_type: str, dtype: Any = None, enabled_: bool = True, **kwargs: Any) -> None:
            wanted = kwargs.pop("enabled", enabled_)
            device = "cpu" if device_type == "cuda" else device_type
            super().__init__(device, dtype, enabled=wanted and enabled, **kwargs)
            self.region = str(dtype or "default") if wanted else "off"

        def __enter__(self) -> Any:
            _REGIONS.append(self.region)
            return super().__enter__()

        def __exit__(self, *args: Any) -> Any:
            _REGIONS.pop()
            return super().__exit__(*args)

    class CudaAutocast(RehearsalAutocast):
        """The older spelling, without a device type."""

        def __init__(self, enabled: bool = True, dtype: Any = None, cache_enabled: bool = True) -> None:
            super().__init__("cuda", dtype, enabled=enabled, cache_enabled=cache_enabled)

    torch.autocast = RehearsalAutocast  # type: ignore[misc]
    torch.amp.autocast = RehearsalAutocast  # type: ignore[misc]
    torch.cuda.amp.autocast = CudaAutocast  # type: ignore[misc]


def _load() -> None:
    original = torch.load

    def load(file: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        if isinstance(map_location, str) and map_location.startswith("cuda"):
            map_location = "cpu"
        return original(file, map_location, *args, **kwargs)

    torch.load = load


def _process_group(store: Path, timeout_s: float) -> None:
    original = dist.init_process_group
    original_reduce = dist.all_reduce

    def init_process_group(*args: Any, **kwargs: Any) -> None:
        # A file instead of a port: nothing else on this machine can take it between choosing and binding.
        original(
            "gloo",
            init_method=f"file://{store}",
            rank=int(os.environ["RANK"]),
            world_size=int(os.environ["WORLD_SIZE"]),
            timeout=datetime.timedelta(seconds=timeout_s),
        )

    def all_reduce(tensor: Any, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False) -> Any:
        if op != dist.ReduceOp.AVG:
            return original_reduce(tensor, op, group, async_op)
        work = original_reduce(tensor, dist.ReduceOp.SUM, group, False)
        tensor.div_(dist.get_world_size(group))
        return work

    modules: list[Any] = [dist, dist.distributed_c10d]
    for module in modules:
        module.init_process_group = init_process_group
        module.all_reduce = all_reduce


def _fsdp() -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel, _flat_param, _init_utils

    # Full state dicts offloaded to the CPU move the flat parameter there; it already is.
    _flat_param.FlatParamHandle.to_cpu = lambda self: contextlib.nullcontext()  # type: ignore[assignment, method-assign]
    # A number is the index of a GPU.
    init: Any = FullyShardedDataParallel.__init__

    @functools.wraps(init)
    def on_cpu(self: Any, *args: Any, **kwargs: Any) -> None:
        if isinstance(kwargs.get("device_id"), int):
            kwargs["device_id"] = CPU
        init(self, *args, **kwargs)

    FullyShardedDataParallel.__init__ = on_cpu  # type: ignore[method-assign]
    # sync_module_states insists on a GPU, though what it does afterwards, a broadcast, works with gloo.
    _init_utils._check_module_states_for_sync_module_states = lambda states: None  # type: ignore[assignment]


def _compile() -> None:
    # Compiled kernels for a CPU say nothing about those for a GPU and take minutes; reports list them as not tested.
    def compile_(model: Any = None, **kwargs: Any) -> Any:
        return (lambda function: function) if model is None else model

    torch.compile = compile_  # type: ignore[assignment]


def _dataloader() -> None:
    from torch.utils.data import DataLoader

    original: Any = DataLoader.__init__
    iterate: Any = DataLoader.__iter__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        if "num_workers" in kwargs:
            kwargs["num_workers"] = 0
        for name in ("persistent_workers", "prefetch_factor", "pin_memory"):
            kwargs.pop(name, None)
        original(self, *args, **kwargs)

    def as_lists(item: Any) -> Any:
        # Pinning memory turns tuples into lists on a GPU, and scripts rely on it.
        if isinstance(item, (tuple, list)) and not hasattr(item, "_fields"):
            return [as_lists(part) for part in item]
        return item

    def iter_(self: Any) -> Any:
        return (as_lists(item) for item in iterate(self))

    DataLoader.__init__ = init  # type: ignore[method-assign]
    DataLoader.__iter__ = iter_  # type: ignore[method-assign]
