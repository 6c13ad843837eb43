"""What one kept call costs: made beside a call of a rollout, measured, replayed for trial, and thrown away."""

import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from .. import agree, guard, memory, replay, sync
from ..capture import Capture, where
from ..host import HostMemory
from ..kept import result_of
from ..reweight import possible
from ..seen import see
from ..turns import Turns
from ..unlike import unchanged
from ..window import Key, Window
from . import choice
from .clock import now
from .stopwatch import Stopwatch

TIMES = 3


class Probe(NamedTuple):
    """Seconds and bytes of a row of a network call, seconds of the `checks` of a window.

    Attributes:
        forward: without a graph, as the rollout makes it.
        extra: what a kept call takes beyond that.
        replay: what the update spends on it.
        verdict: of that, what ranks need to agree on a call, however many rows it has.
        graph: bytes.
        rows: of the call.
        gradient: bytes of one that is kept in place of graphs; infinite where none can be.
        scaling: seconds that scaling it takes.
        sharded: it has to be reduced by a call that adds nothing else, and a trajectory's graphs are walked together.
    """

    forward: float
    extra: float
    replay: float
    verdict: float
    checks: float
    graph: float
    rows: int = 1
    gradient: float = math.inf
    scaling: float = 0.0
    sharded: bool = False


def why_not(window: Window, net: nn.Module) -> str:
    """Why no call of this rollout can be kept, as far as it can be seen before; the same on all ranks, or nothing."""
    reason = window.refusal or guard.why_unlike_training(net)
    if torch.is_inference_mode_enabled():
        reason = reason or "inference mode: no graph can be kept"
    if agree.minimum(int(not reason)) == 1:
        return ""
    return reason or "another rank can keep nothing"


def probe(
    window: Window, wrapper: sync.Wrapper, net: nn.Module, keys: Sequence[Key], args: tuple[Any, ...],
    kwargs: dict[str, Any], sizes: memory.Sizes, budget: float, gradients: bool = False,
) -> tuple[Probe | None, str]:  # fmt: skip
    """Measures a call of the rollout, which is still to be made, in every way. All ranks probe at the same call.

    Graphs are held together, as many as the budget has room for: memory that was just freed would come back faster
    than a window's. Nothing stays but the bytes in `sizes`. Returns None and the reason where this rank cannot keep
    the call. With `gradients`, scaling one is measured, too.
    """
    device, rows, sites = where(args, kwargs), len(keys), {key[2] for key in keys}
    seen = window.see(net)

    def keep() -> Window:
        scratch = Window(0, window.base, {key[:2]: place for place, key in enumerate(keys)}, net=window.net, seen=seen)
        call = Capture(scratch, wrapper, net, math.inf, HostMemory(0.0), sizes, measure=False)
        call.keep({key: place for place, key in enumerate(keys)}, rows, args, kwargs)
        return scratch

    def seconds(work: Callable[[], Any]) -> float:
        began = now(device)
        work()
        return now(device) - began

    times: list[tuple[float, float, float]] = []
    with unchanged(net, device):
        for _ in range(2):  # the bytes are measured twice, which takes its time
            kept = [keep()]
        if not kept[0].held:
            return None, kept[0].refusal or next(iter(kept[0].told()), "")
        room = budget / max(kept[0].held_bytes(), 1)
        for _ in range(TIMES):
            forward = seconds(lambda: net(*args, **kwargs))
            if len(kept) + 1 > room:
                kept.clear()
            began = now(device)
            kept.append(keep())
            keeping = now(device) - began
            times.append((forward, keeping, seconds(lambda: _replay(kept[-1], net, keys, args, kwargs))))
        kept.clear()
        verdict = min(seconds(lambda: agree.minimum(1)) for _ in range(TIMES)) if wrapper.collective else 0.0
        scaling = min(seconds(lambda: possible.scale(net)) for _ in range(TIMES)) if gradients else 0.0
    checks = seconds(lambda: see(net))
    bytes_ = sum(sizes.rows[site].graph for site in sites)
    extra = statistics.median(keeping - forward for forward, keeping, _ in times)
    forward, replayed = (statistics.median(column) for column in list(zip(*times, strict=True))[::2])
    # Looked at when the first call is kept, when the first one is replayed, and when graphs are walked.
    return Probe(
        forward / rows, extra / rows, replayed / rows, verdict, 3 * checks, bytes_, rows,
        possible.gradient_bytes(net, wrapper) if gradients else math.inf,
        scaling * (wrapper.shards if wrapper.collective else 1), wrapper.collective,
    ), ""  # fmt: skip


def figures(
    found: Probe, clock: Stopwatch, turns: Turns, window: Window, budget: float, host: float, in_time: bool = False,
    team: int = 1,
) -> choice.Figures:  # fmt: skip
    """What this rank has measured, per step: the network calls of all sites that the native window has made.

    Args:
        clock: of the native window.
        turns: how the updates take the rows.
        window: this one, whose selected steps may be kept.
        budget, host: bytes for their graphs on the device and in host memory.
        in_time: rewards come early enough for sums per prompt group: two, and what is added to them.
        team: how many ranks share a prompt, over which its sums are spread where weights are.
    """
    sites, selected = max(len(clock.sites), 1), len(window.positions)
    samples = max(len({row for row, _ in window.positions}), 1)
    groups, spread = math.ceil(samples / turns.group), team if found.sharded else 1
    update, backward = (clock.median(kind) / turns.batch * sites for kind in ("update", "backward"))
    return choice.Figures(
        window=clock.native, rollout=found.forward * sites, update=update, backward=backward,
        extra=found.extra * sites, replay=(found.replay + found.verdict / turns.batch) * sites, checks=found.checks,
        graph=found.graph * sites, budget=budget, selected=selected,
        share=min(turns.trained * turns.window / selected, 1.0) if selected else 1.0,
        host=host / (found.graph * sites) if host and found.graph else 0.0,
        gradient=found.gradient, samples=samples, affine=2 * groups / spread + found.rows if in_time else math.inf,
        scaling=found.scaling + (update + backward) / samples * found.sharded,
        live=selected / samples if found.sharded else found.rows,
    )  # fmt: skip


def _replay(kept: Window, net: nn.Module, keys: Sequence[Key], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    kept.replayed = 1  # what the network depends on is looked at once per window
    held, _ = replay.find(kept, net, keys, args, kwargs)
    if held:
        result_of(list(held.values()))
