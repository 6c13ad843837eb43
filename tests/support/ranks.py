"""Runs a function on several ranks (gloo, forked processes) and stops all of them when one hangs."""

import contextlib
import faulthandler
import functools
import gc
import multiprocessing
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from . import fsdp2

OLD = tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 7)  # some of it fails without the runtime


class NativelyFails(Exception):
    """What failed is not the runtime's."""


@contextlib.contextmanager
def natively() -> Iterator[None]:
    """A native training on a rank. If an old torch cannot make it, the test is skipped with torch's own words."""
    try:
        yield
    except Exception as error:
        raise NativelyFails(f"{type(error).__name__}: {error}") from error


class RankFailed(Exception):
    """A rank raised; `errors` has the text of each rank that did."""

    def __init__(self, errors: dict[int, str]) -> None:
        self.errors = errors
        super().__init__("\n".join(f"rank {rank}: {text}" for rank, text in sorted(errors.items())))


def _main(rank: int, world: int, folder: str, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
    torch.set_num_threads(1)
    gc.freeze()  # a collection would copy every page that holds an object of the process this one was forked from
    faulthandler.register(signal.SIGUSR1, Path(f"{folder}/{rank}.stack").open("w"))  # noqa: SIM115 (open until it ends)
    code = 0
    try:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
        torch.save(function(rank, world, *args), f"{folder}/{rank}.pt")
        dist.barrier()
    except BaseException:
        Path(f"{folder}/{rank}.error").write_text(traceback.format_exc())
        code = 1
    os._exit(code)  # no clean-up that could wait for a dead rank


def _stack(pid: int | None, file: Path) -> str:
    """Where a rank hangs."""
    assert pid is not None
    os.kill(pid, signal.SIGUSR1)
    time.sleep(0.5)
    return file.read_text() if file.exists() else ""


@functools.cache
def _preload() -> None:
    """What an optimizer's first use imports costs each rank more than a small training; forked ranks find it there."""
    torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))]).zero_grad()


def _skip_what_fails_natively(text: str) -> None:
    marked = f"{NativelyFails.__name__}: "
    refusal = text.split(marked)[1].splitlines()[0] if marked in text else fsdp2.refusal()
    if refusal and refusal in text:
        pytest.skip(f"torch {torch.__version__} fails without the runtime, too: {refusal}")


def patience() -> float:
    """How many times longer than alone a process takes on a machine that is as busy as this one now."""
    return max(1.0, os.getloadavg()[0] / len(os.sched_getaffinity(0)))


def run(function: Callable[..., Any], world: int, *args: Any, seconds: float = 60) -> list[Any]:
    """`function(rank, world, *args)` on each rank; returns what each returned. A hang is an error, not a wait.

    Args:
        seconds: after which a rank hangs, on a quiet machine.
    """
    _preload()
    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.get_context("fork")
        processes = [context.Process(target=_main, args=(r, world, folder, function, args)) for r in range(world)]
        for process in processes:
            process.start()
        began, allowed = time.monotonic(), seconds
        while any(p.is_alive() for p in processes) and time.monotonic() - began < allowed * patience():
            time.sleep(0.01)
            if any(p.exitcode for p in processes) and allowed == seconds:
                # One failed: give the others a moment, then stop them.
                allowed = min(seconds, (time.monotonic() - began) / patience() + 5)
        hung = [rank for rank, process in enumerate(processes) if process.is_alive()]
        stacks = {rank: _stack(processes[rank].pid, Path(f"{folder}/{rank}.stack")) for rank in hung}
        for rank in hung:
            processes[rank].kill()
        for process in processes:
            process.join()
        written = {rank: Path(f"{folder}/{rank}.error") for rank in range(world)}
        errors = {rank: path.read_text() for rank, path in written.items() if path.exists()}
        for rank, process in enumerate(processes):
            if process.exitcode not in (0, 1) and rank not in hung:
                errors[rank] = f"died with exit code {process.exitcode}"
        if errors:
            if OLD:
                _skip_what_fails_natively(str(RankFailed(errors)))
            raise RankFailed(errors)
        if hung:
            raise RankFailed({rank: f"hung for {seconds} s\n{stacks[rank]}" for rank in hung})
        return [torch.load(f"{folder}/{rank}.pt", weights_only=False) for rank in range(world)]
