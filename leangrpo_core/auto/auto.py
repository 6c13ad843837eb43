"""LEANGRPO_SCHEDULE=auto: the first window as upstream, one call of the second kept for trial, then the choice.

The choice is made of what was measured in this run (`choice.py`), is the same on all ranks, and made again when memory
proves short or windows take longer than the first one did (`watch.py`). What the user has set is left as it is.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from .. import agree, memory, sync
from ..budget import Budget
from ..errors import LeanError
from ..late import late_bytes
from ..reductions import Reductions
from ..reweight import possible
from ..reweight.fallback import Reweighting
from ..settings import Settings
from ..turns import Turns
from ..window import Key, Window
from . import choice
from .choice import Figures, Plan, Way
from .noticed import Noticed
from .peaks import Peaks
from .probing import figures, probe, why_not
from .stopwatch import Stopwatch
from .watch import Watch

_MOST = 1 << 62
SPARE = 0.8
"""After a call that ran out of memory the budget is this part of what was held then."""


class Auto:
    """The choice of one process. With another schedule set it does nothing.

    Args:
        chosen: the settings.
        budget: how many bytes of graphs may be held; set here from the second window on.
        reductions: how gradients are reduced; set here where LEANGRPO_SYNC was not.
        say: prints a line on rank 0.
        host: bytes of host memory for graphs.
        reweighting: how windows are reweighted, or why not.

    Attributes:
        way: how the window runs that is open.
        probing: a call of this window's rollout is to be kept for trial.
        noticed: the calls of the native window.
    """

    def __init__(
        self, chosen: Settings, budget: Budget, reductions: Reductions, say: Callable[[str], None],
        host: float = 0.0, reweighting: Reweighting | None = None,
    ) -> None:  # fmt: skip
        self.on = chosen.schedule == "auto"
        self.way = Way("recompute" if self.on else chosen.schedule, chosen.sync, chosen.buffers)
        self.noticed = Noticed()
        self._reweighting = reweighting or Reweighting(say)
        if self.on:
            self._reweighting.instead = "auto chooses again"
        self.probing, self._measuring = False, self.on
        self.clock = Stopwatch()
        self._set, self._budget, self._reductions, self._say, self._host = chosen, budget, reductions, say, host
        self._peaks = Peaks()
        self._measured_budget = self.on and chosen.budget_bytes is None
        self._figures: Figures | None = None
        self._watch: Watch | None = None
        self._short = False  # a call of this window ran out of memory
        self._held, self._audited = 0, False  # what the last window held at its peak; whether it was audited
        self._windows = self._probed = 0

    def begin(self) -> None:
        """A rollout begins. All ranks look together at what the window before has taken."""
        if not self.on:
            return
        self._windows += 1
        if self._watch is not None:
            self._review()
        elif self._windows > 1 and self._measuring:
            self._end_native()
        self.clock.begin(detailed=self._measuring)
        if self._measuring:
            self.noticed = Noticed()
        self._short, self._held, self._audited = False, 0, False
        if self._measuring:
            self._peaks.begin()
        else:
            self._peaks.watch()

    def _end_native(self) -> None:
        """A native window is over: a probe comes next, unless nothing may be kept anyway."""
        self._measuring = agree.minimum(int(self.clock.finish())) == 0
        if self._measuring:
            return
        self._peaks.end("step" if "update" in self._peaks.bytes else "update")
        if self._measured_budget:
            self._budget.bytes = self._peaks.room()
        (fewest,) = agree.minima([round(min(self._budget.bytes, _MOST))])
        self._budget.bytes = fewest if fewest < _MOST else math.inf
        self.probing = self._budget.bytes > 0 or self._host > 0
        self.way = self.way._replace(schedule="retain" if self.probing else "recompute")
        if not self.probing:
            self._settle_for_native("no room for kept graphs")

    def rolls(self, rows: Any) -> None:
        """The rollout goes on with these rows."""
        if self._measuring and self.clock.rolling and rows is not None:
            self.noticed.rolls(rows)

    def rollout_over(self) -> None:
        """The last call of the rollout was made."""
        if self._measuring:
            self._peaks.end("rollout")

    def update_call(self) -> None:
        """The update makes a call; at the first one rewards are done."""
        if self.on and self.clock.update_begins() and self._measuring:
            self._peaks.end("reward")

    def update_over(self) -> None:
        """Gradients are there, clipping and the step follow."""
        if not self.on:
            return
        first = self.clock.update_ends()
        if first and self._measuring:
            self._peaks.end("update")
        elif first:
            self._peaks.look()

    def probe(
        self, window: Window, wrapper: sync.Wrapper, net: nn.Module, keys: Sequence[Key], args: tuple[Any, ...],
        kwargs: dict[str, Any], sizes: memory.Sizes, turns: Turns,
    ) -> None:  # fmt: skip
        """Measures a call of the rollout and chooses, for this window and those to come. All ranks at the same call."""
        self.probing, self._probed = False, self._windows
        refusal = why_not(window, net)
        no_gradients = (
            self.noticed.why_not() or possible.why_not_together(net, len(keys))
            or possible.why_not(net, wrapper, len(keys), args, kwargs)
        )  # fmt: skip
        found, reason = (None, refusal) if refusal else probe(
            window, wrapper, net, keys, args, kwargs, sizes, self._budget.bytes, gradients=not no_gradients
        )  # fmt: skip
        if not refusal and agree.minimum(int(found is not None)) == 0:
            refusal = reason or "another rank can keep nothing"
        if refusal or found is None:
            window.refusal = window.refusal or refusal
            self._settle_for_native(refusal)
            return
        sums = self.noticed.in_time and not ("buffers" in self._set.given and self._set.buffers == "sample")
        mine = figures(found, self.clock, turns, window, self._budget.bytes, self._host, sums, self.noticed.team)
        self._figures = choice.unpack(agree.minima(choice.pack(mine)))
        best, *_ = plans = self._choose()
        if best.schedule == "recompute":
            window.refusal = "auto has chosen to recompute"
        native = Way("recompute", self.way.sync), self._figures.window
        untried = [self._run_as(plan) for plan in choice.close(plans, self._figures)]
        self._watch = Watch(self.way, native, untried + self._late(wrapper, net, best))

    def _choose(self) -> list[Plan]:
        """Chooses by the agreed figures, and says why."""
        assert self._figures is not None
        plans = choice.choose(self._figures)
        self.way = self._run_as(plans[0])
        self._say("auto: " + choice.reason(plans, self._figures) + self._peaks.told())
        return plans

    def _run_as(self, plan: Plan) -> Way:
        """The way of a plan; buffers that somebody has set are left as they are."""
        given = plan.schedule == "reweight" and "buffers" in self._set.given
        return Way(plan.schedule, self.way.sync, self._set.buffers if given else plan.buffers)

    @property
    def room(self) -> float:
        """Bytes for kept gradients: graphs that are there at a time need room besides."""
        graphs = self._figures.live * self._figures.graph if self._figures is not None else 0.0
        return max(self._budget.bytes - graphs, 0.0)

    def _settle_for_native(self, reason: str) -> None:
        self.way = Way("recompute", self.way.sync)
        self._watch = Watch(self.way, (self.way, math.nan), [])
        self._say(f"auto: recompute: {reason}")

    def _late(self, wrapper: sync.Wrapper, net: nn.Module, plan: Plan) -> list[Way]:
        """One reduction per update is tried where LEANGRPO_SYNC is not set, weights are sharded, and there is room."""
        if "sync" in self._set.given or not wrapper.communicates or plan.schedule == "reweight":
            return []
        assert self._figures is not None
        needed = late_bytes(net)
        fits = needed <= self._peaks.room() - plan.steps * self._figures.graph
        return [Way(plan.schedule, "late")] if agree.minimum(int(fits)) == 1 else []

    def saw(self, window: Window) -> None:
        """A window is over."""
        self._held = max(self._held, window.peak_held_bytes)
        self._audited = self._audited or bool(window.audits)

    def _review(self) -> None:
        """What the last window took, the worst rank's, and what follows."""
        assert self._watch is not None
        over = max(self._held - self._budget.bytes, self._peaks.over() if self._measured_budget else 0.0, 0.0)
        probed = self._probed == self._windows - 1
        seconds = math.nan if self._audited or probed else self.clock.seconds()
        nanoseconds = _MOST if math.isnan(seconds) else round(seconds * 1e9)
        slowest, short, over, fewest, refused, no_affine = agree.minima([
            -nanoseconds, -int(self._short), -round(over), round(min(self._budget.bytes, _MOST)),
            -int(self._reweighting.refused), -int(self._reweighting.no_affine),
        ])  # fmt: skip
        self._watch.add(self.way, math.nan if slowest == -(_MOST) else -slowest / 1e9)
        if self._figures is not None and (refused or no_affine):
            without = self._figures._replace(affine=math.inf)
            without = without._replace(gradient=math.inf) if refused else without
            if without != self._figures:
                self._figures = without
                self._say("auto: gradients were kept in vain: chooses again")
                self._choose()
                self._watch.choose_again(self.way)
        if self._figures is not None and (short or over):
            self._lower(fewest + over, "a call ran out of memory" if short else f"{-over / 1e9:.3g} GB over the budget")
            return
        way, why = self._watch.next()
        if why:
            self._say(f"auto: {why}")
        self._take(way)

    def _lower(self, budget: float, why: str) -> None:
        """Chooses again, with a smaller budget."""
        assert self._watch is not None and self._figures is not None
        self._budget.bytes = max(budget, 0.0)
        self._figures = self._figures._replace(budget=self._budget.bytes)
        self._say(f"auto: {why}: from here on {self._budget.bytes / 1e9:.3g} GB of kept graphs")
        self._choose()
        self._watch.choose_again(self.way)

    def _take(self, way: Way) -> None:
        if way.sync != self.way.sync:
            self._reductions.setting, self._reductions.wrapper = way.sync, None
        self.way = way

    def survives(self, error: LeanError, window: Window, wrapper: sync.Wrapper) -> bool:
        """Whether a call that could not be kept for want of memory can be made without its graph instead.

        Not where the wrapper communicates: the others wait in the middle of that call.
        """
        if not self.on or error.code != "LG608" or wrapper.collective:
            return False
        ours = window.reweight
        held = window.held_bytes() if ours is None else ours.buffers.live * ours.gradient_bytes
        self._budget.bytes, self._short = min(self._budget.bytes, SPARE * held), True
        window.refusal = "out of memory"
        places = sorted(window.positions[key[:2]] for key in window.held)
        if ours is None:
            window.keep_prefix(places[int(SPARE * len(places))] if places else 0, window.refusal)
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
        return True
