"""Collectives of the runtime's own: small verdicts, which say which rank is missing when they cannot end.

Every rank must call each of them at the same place. A rank that stops with an exception leaves a note in the process
group's store; the others find it while they wait and stop, too, with its name, instead of waiting for the time-out.
"""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from .errors import LeanError

_PATIENCE = 1.0  # seconds between two looks at the notes
_calls = 0
_place = ""  # where this rank is, in words of the script


def world_size() -> int:
    """How many ranks there are; 1 without a process group."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """This process's rank; 0 without a process group."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def device() -> torch.device:
    """Where tensors of a collective must be: NCCL takes CUDA tensors only."""
    on_cuda = dist.get_backend() == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if on_cuda else torch.device("cpu")


def minimum(value: int) -> int:
    """The smallest `value` of all ranks."""
    return minima([value])[0]


def minima(values: Sequence[int]) -> list[int]:
    """The smallest value of all ranks, place by place. As many on every rank, each below 2**63 in size."""
    return _reduced(list(values), dist.ReduceOp.MIN) if world_size() > 1 else list(values)


def anyones(flags: Sequence[bool]) -> list[bool]:
    """Which flags are set on any rank. As many flags on every rank."""
    return [bool(flag) for flag in _reduced([int(flag) for flag in flags], dist.ReduceOp.MAX)] if flags else []


def everyones(value: Any) -> list[Any]:
    """`value` of each rank, in order of ranks."""
    values: list[Any] = [None] * world_size()
    _enter()
    try:
        dist.all_gather_object(values, value)
    except RuntimeError as error:
        raise _lost(error) from error
    return values


@contextmanager
def at(place: str) -> Iterator[None]:
    """What is agreed on within is agreed on in `place`, a call of the script's that each rank has to make."""
    global _place
    before, _place = _place, place
    try:
        yield
    finally:
        _place = before


def tell_on_failure(explained: Callable[[BaseException], BaseException] = lambda error: error) -> None:
    """From now on an exception that ends this process is noted for the other ranks, and shown with its cause.

    Args:
        explained: what is to be shown for an exception.
    """
    original = sys.excepthook

    def hook(kind: Any, error: Any, trace: Any) -> None:
        shown = explained(error)
        note(f"{type(shown).__name__}: {shown}")
        original(type(shown), shown, trace if shown is error else None)

    sys.excepthook = hook


def note(text: str) -> None:
    """Leaves a note that this rank stops."""
    store = _store()
    if store is not None:
        try:
            store.set(f"leangrpo/stopped/{rank()}", text.splitlines()[0][:300] if text else "")
        except RuntimeError:
            return  # the store went with the rank that held it


def _reduced(values: list[int], op: Any) -> list[int]:
    verdict = torch.tensor(values, dtype=torch.int64, device=device())
    _enter()
    try:
        _wait(dist.all_reduce(verdict, op=op, async_op=True))
    except RuntimeError as error:
        raise error if isinstance(error, LeanError) else _lost(error) from error
    return verdict.tolist()


def _wait(work: Any) -> None:
    pause, looked = 0.0, time.monotonic()
    while not work.is_completed():
        time.sleep(pause)
        pause = min(pause + 1e-4, 0.01)
        if time.monotonic() - looked > _PATIENCE:
            looked = time.monotonic()
            stopped = _stopped()
            if stopped:
                raise LeanError("LG611", f"{_waiting()}{stopped}", "see that rank's own output")
    work.wait()


def _enter() -> None:
    """Notes how far this rank has come, for the others."""
    global _calls
    _calls += 1
    store = _store()
    if store is not None:
        store.set(f"leangrpo/at/{rank()}", str(_calls))


def _lost(error: RuntimeError) -> LeanError:
    """The error of a collective that broke, with the ranks that did not come as far as this one."""
    time.sleep(2 * _PATIENCE)  # a rank that is about to stop may still leave its note
    behind = [str(other) for other in range(world_size()) if _came_to(other) < _calls]
    missed = f"rank {', '.join(behind)} did not come {f'to {_place}' if _place else 'here'}"
    what = _stopped() or (missed if behind else "a collective broke")
    return LeanError("LG611", f"{_waiting()}{what} ({str(error).splitlines()[0]})", "see that rank's own output")


def _waiting() -> str:
    return f"this rank waited for the others in {_place}: " if _place else ""


def _stopped() -> str:
    """What ranks that stopped have noted; nothing if none did."""
    found = [(other, _read(f"leangrpo/stopped/{other}")) for other in range(world_size())]
    return "; ".join(f"rank {other} stopped: {text}" for other, text in found if text is not None)


def _came_to(other: int) -> int:
    return int(_read(f"leangrpo/at/{other}") or 0)


def _read(key: str) -> str | None:
    store = _store()
    try:
        return store.get(key).decode() if store is not None and store.check([key]) else None
    except RuntimeError:
        return None


def _store() -> Any:
    """The process group's key-value store; None where torch does not hand it out."""
    try:
        return dist.distributed_c10d._get_default_store()
    except (AttributeError, ValueError, RuntimeError):
        return None
