"""The state of one process: its settings, what it has learnt about the network, and the open window."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from . import agree, memory, misuse, sync
from .auto import Auto
from .budget import Budget
from .errors import LeanError
from .host import HostMemory
from .order import Orders
from .reductions import Reductions
from .report import Report
from .reweight.fallback import Reweighting
from .settings import Settings, load
from .settle import Settling
from .turns import Turns
from .unlike import Unlike
from .window import Window

VERSION = "0.1.0"


class Run:
    """What the calls of a patched tree share; `runtime.py` has the calls.

    Attributes:
        window: the open one; None outside a rollout and the first update after it.
        orders: the order in which the last rollout is trained.
        sizes, budget, host: what graphs weigh, and what room there is for them.
        last_rows: ids of the last rollout's rows.
        turns: which policy call is the last of an update.
        auto: the choice of how windows run, where it is left to the run.
        audited: networks that an audit has found exact.
        useless: networks whose rollouts never had the inputs of the update.
        unlike: whether the network changes more than its result.
        called: the network that the update has called under grad since the last flush.
        without_grad: it has called one under no_grad since then.
    """

    def __init__(self) -> None:
        self.report = Report()
        self.window: Window | None = None
        self.orders = Orders(self.report.once)
        self.last_rows = torch.arange(0)
        self.sizes, self.budget, self.host = memory.Sizes(), Budget(None), HostMemory(0.0)
        self.turns = Turns()
        self.reductions = Reductions(self.report)
        self.settling = Settling(self.reductions.late)
        self.auto = Auto(Settings(), self.budget, self.reductions, self.report.say)
        self.reweighting = Reweighting(self.report.once)
        self.audited: WeakSet[nn.Module] = WeakSet()
        self.useless: WeakSet[nn.Module] = WeakSet()
        self.unlike = Unlike()
        self.called: nn.Module | None = None
        self.without_grad = False
        self._settings: Settings | None = None
        self._windows = 0
        self._rows = 0  # ids given out so far
        self._measuring: str | None = None  # why the windows of this rollout keep nothing; None before the first

    @property
    def settings(self) -> Settings:
        """Settings of the run; the first look compares them across ranks and says what was found.

        Raises:
            LeanError: LG601 and LG602 for settings that are wrong or differ between ranks.
        """
        if self._settings is None:
            chosen = load()
            sync.same_settings(chosen.text())
            agree.tell_on_failure(lambda error: misuse.explained(error, self.called is not None, self.without_grad))
            self._settings, self.reductions.setting = chosen, chosen.sync
            limit = chosen.budget_bytes
            if chosen.schedule == "auto" and limit is None:
                limit = math.inf  # it measures its first window itself
            self.budget, self.host = Budget(limit), HostMemory(chosen.offload_gb * 1e9)
            self.report.start(chosen, VERSION)
            self.auto = Auto(
                chosen, self.budget, self.reductions, self.report.say, self.host.limit, self.reweighting
            )  # fmt: skip
            if chosen.schedule != "recompute" or chosen.sync != "upstream":
                register_optimizer_step_pre_hook(self._before_step)
        return self._settings

    @property
    def schedule(self) -> str:
        """How the window runs that is about to open: `recompute` opens none."""
        return self.auto.way.schedule

    def carry_over(self) -> None:
        """An update that takes several rollouts: what it has replayed is walked before the next one begins.

        With LEANGRPO_SYNC=late, FSDP1 then reduces with the last of them.
        """
        window, net = self.window, self.reductions.net
        if window is not None and window.updating and window.consumed and net is not None:
            wrapper = self.reductions.classify(net)
            once = wrapper.flush == "joint" and wrapper.known and self.reductions.setting == "late"
            audited = once and self.audits(window, net)
            self.settling.settle(window, wrapper, net, last=True, reduce=not once or audited)
            self.reweighting.learn(window, wrapper)
            self.leave_window(None, wrapper.flush)

    def begin(self, rows: int, continues: bool = False) -> int:
        """A rollout of so many rows begins; returns the id of the first one.

        Args:
            continues: its first rows are trained in an update that is open.
        """
        assert self.settings
        self.leave_window(None if continues else "a new rollout began")
        if not continues:
            self.reductions.new_rollout()
        self._measuring = self._measuring if continues else None
        if not continues:
            self.auto.begin()
        self.orders.forget()
        base, self._rows = self._rows, self._rows + rows
        self.last_rows = torch.arange(base, self._rows)
        return base

    def holds_all(self, rows: int, trained: int, best_of: int, window: int) -> bool:
        """Whether the graphs of all rows are to be held, of which upstream trains `best_of`; says it once."""
        held, needed = rows * trained, min(window, best_of) * trained
        what = f"{best_of} of {rows} samples are trained, chosen by their rewards: to replay {needed} calls"
        if self.schedule == "reweight":
            self.report.once(
                f"{what}, those of all {held} would be walked. Nothing is kept, training runs as upstream's"
            )
            return False
        if self.settings.order == "upstream":
            self.report.once(f"{what}, the graphs of all {held} are held")
            return True
        self.report.once(
            f"{what}, the graphs of all {held} would have to be held. Nothing is kept, training runs as upstream's "
            "(LEANGRPO_ORDER=upstream holds them)"
        )
        return False

    def open(
        self, base: int, positions: dict[tuple[int, int], int], model: nn.Module | None = None, whole: bool = False
    ) -> None:
        """Opens a window for the steps at `positions`, if kept graphs can be used through the wrapper of `model`."""
        if model is not None and not self.keeps_through(model):
            return  # no window: the order of the samples is upstream's own, too
        self._windows += 1
        self.window = Window(self._windows, base, positions, whole=whole)
        self.window.rounding_allowed = self.settings.inputs == "rounded"
        if self._measuring is None:
            self._measuring = self.budget.begin_window(self.report.say)
        self.window.refusal = self._measuring

    def keeps_through(self, model: nn.Module) -> bool:
        """Whether kept graphs can be used through the wrapper of `model`; says it once if not."""
        refusal = self.reductions.classify(model).refusal
        if refusal:
            self.report.once(f"{refusal}: nothing is kept, training runs as upstream's")
        return not refusal

    @contextmanager
    def rolling_out(self, last: bool) -> Iterator[None]:
        """Around a rollout, or one batch of it; after the last one the kept graphs are there to be used."""
        mode = torch.is_grad_enabled()
        try:
            with self.auto.clock.rolling_out():
                yield
        except BaseException:
            self.window = None
            raise
        if last:
            self.orders.drawer = "the network" if self.unlike.draws else ""
            self.auto.rollout_over()
        if last and self.window is not None:
            if self.window.reweight is not None:
                self.window.reweight.end_rollout()
                torch.set_grad_enabled(mode)  # upstream's no_grad may have ended between a network call and its step
            self.window.end_rollout()
            if self.reductions.wrapper is not None and self.reductions.wrapper.collective:
                self.agree_on_prefix(self.window)

    def agree_on_prefix(self, window: Window) -> None:
        """All ranks hold the same number of leading steps from here on."""
        window.agreed = agree.minimum(window.prefix())
        window.keep_prefix(window.agreed, "beyond what every rank holds")

    def audits(self, window: Window, net: nn.Module) -> bool:
        """Whether what is replayed in this window is compared with a native recomputation."""
        return self.settings.audits(window.number, sync.bare(net) in self.audited)

    def native(self, net: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], due: bool) -> Any:
        """A native call of the update; gradients are due after it if `due`."""
        window = self.window
        apart = window is not None and window.updating and sync.apart(net)
        audited = window is not None and self.audits(window, net)
        reduced = partial(self.reductions.native, due=due, apart=apart, audited=audited)
        return self.auto.clock.native_call(lambda: reduced(net, args, kwargs))

    def _before_step(self, optimizer: Optimizer, *_: Any) -> None:
        self.settling.before_step(self.window, self.reductions.net, optimizer)

    def leave_window(self, reason: str | None, flush: str = "") -> None:
        """The window is over. With a `reason`, raises LG610 if that leaves an update without its gradients."""
        window, self.window = self.window, None
        self.settling.forget()
        left = self.settling.left(window)
        if left and reason:
            fix = "an update must end with lean.flush(model, optimizer) before the next rollout"
            raise LeanError("LG610", f"{reason} with {left}", fix)
        if window is None:
            return
        if window.consumed:
            steps = sum(len(call.taken) for call in window.consumed)
            window.count("replayed, but no gradient came back", steps)
        if window.held:
            window.drop(list(window.held), reason or "held, not used by the first update")
        if window.net is not None and window.kept and window.turned_away and not window.replayed:
            self.useless.add(window.net)
        if window.net is not None and any(map(math.isfinite, window.audits)):
            self.audited.add(window.net)
        self.unlike.learn(window)
        self.auto.saw(window)
        self.report.window(window, flush)
