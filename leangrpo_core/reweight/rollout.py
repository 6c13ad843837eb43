"""LEANGRPO_SCHEDULE=reweight, the rollout's side: each kept call is walked at once with the log-prob's own gradient.

Its graph is freed then. What stays is the sample's gradient, in a buffer, and the provisional cotangents, each as large
as an output. The update's side (`update.py`) finds out by what the buffer has to be multiplied, if by anything.

Where the wrapper communicates in a backward, a trajectory's graphs are held up to its end and walked there: ranks
select different steps, but equally many per trajectory.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .. import agree, memory, sync
from ..capture import OVER_BUDGET, Capture
from ..errors import LeanError
from ..host import HostMemory
from ..kept import Kept
from ..rows import copies_in, join
from ..window import Key, Window
from . import grads, locally, possible
from .buffers import Buffers, add
from .scored import Scored, Scoring
from .spread import SpreadBuffers


@dataclass
class Part:
    """One row of one call of a sample: its provisional cotangent, per output."""

    key: Key
    call: Kept
    place: int
    provisional: list[Tensor]

    @property
    def trained(self) -> bool:
        """Whether the update has asked for it."""
        return self.place in self.call.taken

    def cotangents(self) -> list[Tensor]:
        """What the loss left, per output."""
        leaves = [column[self.place] for column in self.call.leaves]
        return [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]


class Reweight:
    """One window.

    Args:
        window: the open one.
        steps: steps of a trajectory that can be trained.
        buffers: for this window.
        team: how many ranks share a prompt.
        without: (step, site) of steps that are not kept.
        once: says something to the user once.
    """

    def __init__(
        self, window: Window, steps: int, buffers: Buffers, team: int, without: set[tuple[int, str]],
        once: Callable[[str], None],
    ) -> None:  # fmt: skip
        self.window, self.steps, self.buffers, self.without = window, steps, buffers, without
        self._team = team
        self.net: nn.Module | None = None
        self.wrapper: sync.Wrapper | None = None
        self.parts: dict[Key, Part] = {}
        self.scoring = Scoring()
        self.per_sample: dict[int, grads.PerSample] = {}  # by id of a call that waits
        self.by_sample: str | None = None  # why a batched backward gives no gradients per sample; None before the look
        self.samples: dict[str, int] = {}  # how many were recomputed for which reason, or for none
        self.other_inputs: set[tuple[int, str]] = set()  # (step, site): the update has other inputs than the rollout
        self._once = once
        self._admitted: dict[int, bool] = {}
        self._held: list[Scored] = []  # graphs of the trajectory, where they are walked at its end
        self._rows: set[int] = set()  # of the trajectory that is open
        self._latest: set[int] = set()  # of the latest call
        self._room = math.inf
        self.gradient_bytes = 0
        self._own: list[Any] = []  # the weights that gradients in a buffer belong to

    def why_not(self, net: nn.Module, wrapper: sync.Wrapper, rows: int, args: Any, kwargs: Any) -> str:
        """At the first call of a window: why its calls cannot be walked before the loss is known, or nothing."""
        self.net, self.wrapper = net, wrapper
        return possible.why_not(net, wrapper, rows, args, kwargs)

    def set_room(self, budget: float) -> None:
        """At the first call: how many gradients there is room for, and whether sums of them are spread over ranks."""
        assert self.net is not None and self.wrapper is not None
        size = possible.gradient_bytes(self.net, self.wrapper)
        self._room, self.gradient_bytes = budget / max(size, 1), size
        if self.wrapper.collective and math.isfinite(self._room):
            self._room = agree.minimum(int(self._room))
        if self.wrapper.collective and self._team > 1 and self.buffers.affine:
            self.buffers = SpreadBuffers(self.buffers.group, self.buffers.base, self._team, self._weights())

    def admits(self, row: int) -> bool:
        """Whether this sample gets a gradient: as long as there is room for one more."""
        if row not in self._admitted:
            self._admitted[row] = self.buffers.live + 1 <= self._room
            if self._admitted[row]:
                self.buffers.of(row, len(self._weights()))
        return self._admitted[row]

    def _weights(self) -> list[Any]:
        assert self.net is not None and self.wrapper is not None
        if not self._own:  # once per window: looking for them takes as long as a small layer
            self._own = locally.flat(self.net) if self.wrapper.collective else locally.weights(self.net)
        return self._own

    def capture(
        self, window: Window, wrapper: sync.Wrapper, net: nn.Module, budget: float, host: HostMemory,
        sizes: memory.Sizes, measure: bool,
    ) -> Capture:  # fmt: skip
        """How a call is kept."""
        return _Capture(window, wrapper, net, budget, HostMemory(0.0), sizes, measure)

    def before_call(self, keys: Sequence[Key]) -> None:
        """Before each network call of the rollout."""
        self.scoring.turn_off()
        at = {key[:2] for key in keys}
        if any(key[:2] not in at for item in self.scoring.waiting for key in item.keys):
            self._no_step()
        rows = {row for row, _ in at}
        if rows != self._rows or any(step >= self.steps for _, step in at):
            self.end_trajectory()
        if self._latest and rows != self._latest:
            self.buffers.exchange()
        self._rows = self._latest = rows

    def _no_step(self) -> None:
        """What the rollout goes on with would have a graph."""
        if self.scoring.give_up():
            what = "a network call of the rollout was followed by no lean.scored(...)"
            raise LeanError("LG610", what, "the tree was edited: apply the patch again, or train with retain")

    def _drop(self, call: Kept, keys: Any, reason: str) -> None:
        held = [key for key in keys if key in self.window.held]
        for key in held:
            self.window.let_go(key)
            self.window.kept -= 1
        self.window.pass_by(held, reason)
        self._free(call)

    def _free(self, call: Kept) -> None:
        call.release()
        call.held, call.graph_bytes = None, 0
        self.per_sample.pop(id(call), None)

    def scored(self, step: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Upstream's step function, after the network calls of the step."""
        waiting = list(self.scoring.waiting)
        result, found, reason = self.scoring.run(step, args, kwargs)
        for item in waiting if reason else []:
            self._drop(item.call, item.keys, reason)
        for item in found:
            self._take(item)
        return result

    def _take(self, item: Scored) -> None:
        keys = {key: place for key, place in item.keys.items() if key in self.window.held}
        if not keys:
            self._free(item.call)
            return
        for key, place in keys.items():
            self.parts[key] = Part(key, item.call, place, [column[place] for column in item.gradients])
        assert self.wrapper is not None
        if self.wrapper.collective:
            self._held.append(Scored(item.call, keys, item.gradients))
        else:
            self._walk(Scored(item.call, keys, item.gradients))

    def tell_apart(self, reason: str) -> None:
        """Says how samples of one call are told apart."""
        self._once(f"{reason}: each sample's steps are rolled out in calls of their own")

    def _cotangents(self, item: Scored) -> list[Tensor]:
        wanted = set(item.keys.values())
        return [
            join([grad if place in wanted else torch.zeros_like(grad) for place, grad in enumerate(column)])
            for column in item.gradients
        ]

    def _walk(self, item: Scored) -> None:
        """Into the buffers of the call's samples."""
        assert self.net is not None
        weights = len(self._weights())
        batched = self.per_sample.get(id(item.call))
        if batched is None:
            ((row, _, _),) = item.keys
            locally.walk(self._own, self.buffers.of(row, weights), item.call.release(), self._cotangents(item))
            self._free(item.call)
            return
        around: list[Tensor | None] = [None] * weights
        with batched.recording():
            locally.walk(self._own, around, item.call.release(), self._cotangents(item))
        if any(grad is not None for grad in around):
            batched.refusal = "a weight is used outside of its layer"
        if batched.refusal:
            self.by_sample = batched.refusal
            self._drop(item.call, item.keys, batched.refusal)
            for key in item.keys:
                del self.parts[key]
        else:
            for (row, _, _), place in item.keys.items():
                add(self.buffers.of(row, weights), batched.of(place))
        self._free(item.call)

    def end_trajectory(self) -> None:
        """No further call of these samples will be kept. Under FSDP1 their graphs are walked here, on all ranks."""
        if self.wrapper is not None and self.wrapper.collective and self._rows:
            self._walk_held()
        self.buffers.complete(self._rows & set(self._admitted))
        self._rows = set()

    def _walk_held(self) -> None:
        held, self._held = self._held, []
        assert self.net is not None
        # Upstream may have turned to other weights since the trajectory's last call: a walk would gather those.
        other = bool(self.window.others(self.net, wholly=False))
        fewest, most, unchanged = agree.minima([len(held), -len(held), int(not other)])
        if fewest != -most or not unchanged:
            what = "another rank holds other steps of the trajectory"
            for item in held:
                self._drop(item.call, item.keys, what if unchanged else "weights were others at a trajectory's end")
                for key in item.keys:
                    del self.parts[key]
        elif held:
            ((row, _, _),) = held[0].keys
            calls = [(item.call, self._cotangents(item)) for item in held]
            locally.walk_sharded(self.net, self.buffers.of(row, len(self._weights())), calls)
            for item in held:
                self._free(item.call)

    def rewarded(self, rows: Sequence[int], rewards: Sequence[float]) -> None:
        """Rewards of samples whose trajectories are over."""
        if self._rows & set(rows):
            self.end_trajectory()
        for row, reward in zip(rows, rewards, strict=True):
            self.buffers.reward(row, reward)

    def end_rollout(self) -> None:
        """Nothing more comes."""
        self._no_step()
        self.end_trajectory()
        self.buffers.exchange()
        if self.buffers.waited:
            self._once("a sample's reward comes after the next sample has begun: one gradient is kept per sample")


class _Capture(Capture):
    """A call that is kept up to its log-prob."""

    @property
    def _reweight(self) -> Reweight:
        assert self.window.reweight is not None
        return self.window.reweight

    def set_limits(self) -> None:
        """Graphs are freed at once: what needs room are gradients."""

    def beyond(self, wanted: dict[Key, int]) -> list[Key]:
        self.over_budget = OVER_BUDGET
        other = [key for key in wanted if key[1:] in self._reweight.without]
        self.window.pass_by(other, "the update had other inputs for this step before")
        for key in other:  # one step that is not replayed would cost its sample the others
            del wanted[key]
        return [key for key in wanted if not self._reweight.admits(key[0])]

    def parts(self, wanted: dict[Key, int]) -> list[dict[Key, int]]:
        """All in one call if its backward can tell samples apart, else each alone."""
        rows, ours = len(wanted), self._reweight
        if rows == 1 or self.wrapper.collective:
            return [wanted]
        if ours.by_sample is None:
            ours.by_sample = grads.why_not(self.net)
        if not ours.by_sample:
            return [wanted]
        ours.tell_apart(ours.by_sample)
        return [{key: place} for key, place in wanted.items()]

    def keep(self, wanted: dict[Key, int], rows: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        ours = self._reweight
        if rows == 1 or self.wrapper.collective:
            return super().keep(wanted, rows, args, kwargs)
        copies = copies_in(args, kwargs, rows)
        if ours.by_sample or copies is None:
            self.window.pass_by(wanted, f"several samples in one call, which cannot be split: {ours.by_sample}")
            return self.net(*args, **kwargs)
        self._batched = grads.PerSample(self.net, locally.weights(self.net), rows, copies)
        with self._batched.recording():
            return super().keep(wanted, rows, args, kwargs)

    def hold(self, call: Kept, wanted: dict[Key, int]) -> Any:
        self.window.hold(call, wanted)
        if call.rows > 1 and not self.wrapper.collective:
            self._reweight.per_sample[id(call)] = self._batched
        return self._reweight.scoring.wait(call, wanted)
