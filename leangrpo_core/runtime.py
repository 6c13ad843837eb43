"""The calls that a patched tree makes. One `Lean` serves a process; outside a rollout window each call is inert."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from . import agree, capture, guard, keep, memory, replay, settings, sync
from .budget import Budget
from .errors import LeanError
from .host import HostMemory
from .kept import Row
from .order import Device, Orders, held_first
from .reductions import Reductions
from .report import Report
from .settle import Settling
from .turns import Turns
from .window import Key, Window, keys_of

VERSION = "0.1.0"


class Lean:
    """State of one process: its settings, the open window and the order in which the last rollout is trained.

    Attributes:
        rows, steps: what :meth:`at` named last; None outside a training rollout and the update after it.
    """

    def __init__(self) -> None:
        self.rows: Any = None
        self.steps: Any = None
        self._settings: settings.Settings | None = None
        self._report = Report()
        self._window: Window | None = None
        self._windows = 0
        self._rows = 0  # ids given out so far
        self._orders = Orders(self._report.once)
        self._sizes, self._budget, self._host = memory.Sizes(), Budget(None), HostMemory(0.0)
        self._turns = Turns()
        self._reductions = Reductions(self._report)
        self._settling = Settling(self._reductions.late)
        self._audited: WeakSet[nn.Module] = WeakSet()
        self._useless: WeakSet[nn.Module] = WeakSet()

    @contextmanager
    def rollout(
        self, *, rows: int, steps: int, trained: int, window: int, batch: int = 1, group: int | None = None,
        shuffled: bool = False, device: Device = None,
    ) -> Iterator[None]:  # fmt: skip
        """Opens a window: network calls of the selected steps in this block are kept.

        Args:
            rows: samples of this rollout on this rank.
            steps: trajectory steps that can be trained, numbered from 0.
            trained: how many of them are trained per row; which ones is drawn here, before the rollout.
            window: how many rows, from the first that is trained, the first optimizer update consumes.
            batch: rows per network call of the update.
            group: how many rows, one after the other in the order of training, share a prompt; None is the window.
            shuffled: upstream trains the rows in a random order, which is drawn here, too.
            device: whose generator upstream draws these orders from; None is the CPU's.

        Raises:
            LeanError: LG601 and LG602 for settings that are wrong or differ between ranks.
        """
        base = self._begin(rows)
        self._turns = Turns(trained, batch, window, group or window, by_group=self._start().sync == "group")
        if self._start().schedule != "recompute":
            order = self._orders.draw(base, rows, steps, shuffled=shuffled, device=device)
            self._open(base, order.positions(window, trained, batch))
        with self._rolling_out(last=True):
            yield

    @contextmanager
    def rollout_batch(
        self, batch: int, *, batches: int, rows: int, steps: int, window: int, model: nn.Module
    ) -> Iterator[None]:
        """The rollout of one batch out of several that are then trained together; the first one opens a window.

        Their samples are collated, perhaps some of them left out, perhaps shuffled (:meth:`row_order`), and trained in
        as many batches again, each from the first step to the last.

        Args:
            batch, batches: which batch this is, from 0, and how many there are.
            rows: samples per batch.
            steps: trajectory steps that are trained.
            window: how many batches the first optimizer update consumes.
            model: the network as upstream trains it, which need not be how the rollout calls it.

        Raises:
            LeanError: LG601 and LG602 for settings that are wrong or differ between ranks.
        """
        if batch == 0:
            self._carry_over()
            base, chosen = self._begin(batches * rows), self._start()
            self._turns = Turns(steps, rows, window * rows, window * rows)
            order = self._orders.draw(base, batches * rows, steps, in_order=True)
            if chosen.schedule != "recompute":
                first = batches if chosen.order == "upstream" else min(window, batches)
                self._open(base, order.positions(first * rows, steps, rows), model)
        self.rows = range(batch * rows, (batch + 1) * rows)
        with self._rolling_out(last=batch == batches - 1):
            yield

    def row_order(self, rows: int, device: Device = None, ids: Tensor | None = None) -> Tensor:
        """The order in which rows are trained, in place of upstream's draw: [rows] long, on `device`.

        Args:
            ids: `lean_row` of the samples now, where upstream shuffles what :meth:`rollout_batch` drew. Those that the
                first update may train come first then: all of them, if LEANGRPO_ORDER is `upstream`.
        """
        drawn, window = self._orders.of_rows(rows, device), self._window
        if ids is None or window is None or window.replayed or window.recomputed:
            return drawn
        return held_first(drawn, ids, {row for row, _ in window.positions})

    def step_order(self, rows: int, steps: int, device: Device = None) -> Tensor:
        """The order in which each row's steps are trained, in place of upstream's draw: [rows, steps] long."""
        return self._orders.of_steps(rows, steps, device)

    def identity(self, device: Device = None) -> dict[str, Tensor]:
        """Which row and which trajectory steps each sample is: `lean_row` [B], `lean_step` [B, T], long.

        They ride in upstream's sample dict, after its permutations, through whatever it does next. On the CPU, so that
        reading them costs no synchronisation, unless upstream will index them on another device.

        Raises:
            LeanError: LG610 before :meth:`step_order`.
        """
        return self._orders.identity(device)

    def at(self, rows: Any, steps: Any = None, turn: int | None = None) -> None:
        """Names the rows, and in the update their steps, that the next network calls evaluate.

        Args:
            rows: in the rollout counted from 0, in the update `lean_row`; None where a sample carries no ids.
            steps: `lean_step`.
            turn: which column of it is trained now.
        """
        known = self._window is not None and rows is not None
        self.rows = rows if known else None
        self.steps = steps[:, turn] if known and turn is not None else (steps if known else None)

    def rollout_call(
        self, net: nn.Module, rows: Any, step: Any, /, *args: Any, site: str = "cond", **kwargs: Any
    ) -> Any:
        """`net(*args, **kwargs)` in the rollout. Selected steps run under grad and their graph is kept.

        Where only some rows of a batch are selected, the others run in a second call, without a graph.

        Args:
            rows: which rows of the rollout these are, from 0; None where the caller is no training rollout.
            step: the trajectory step.
            site: which network call of the step.

        Returns:
            What the network returns, without a graph.
        """
        window = self._window
        if window is None or window.updating or rows is None:
            return net(*args, **kwargs)
        wrapper, chosen = self._reductions.classify(net, rollout=True), self._start()
        if not wrapper.refusal:
            net, args, kwargs = sync.around_ddp(net, args, kwargs)
        if not window.probed and wrapper.kind == "fsdp2" and wrapper.collective:
            # Looking at weights makes FSDP2 give up gathered ones. Ranks keep calls of other steps, but must gather
            # again in the same one.
            window.see(net)
        if not window.looked_at and sync.bare(net) in self._useless:
            window.refusal = "no step of an earlier window had the inputs of the update"
        if not window.probed and wrapper.flush == "joint" and not wrapper.notice:
            wrapper = self._reductions.with_room(net, wrapper, capture.where(args, kwargs))
        if not window.probed and not wrapper.refusal and chosen.audits(window.number, sync.bare(net) in self._audited):
            capture.probe(window, wrapper, net, args, kwargs)
        window.probed = True
        keys = [(window.base + row, at, site) for row, at, _ in keys_of(rows, step, site)]
        return keep.rollout_call(
            window, wrapper, net, keys, args, kwargs,
            budget=self._budget.bytes, host=self._host, sizes=self._sizes, measure=self._report.follows(window),
        )  # fmt: skip

    def policy_call(
        self, net: nn.Module, rows: Any, steps: Any, /, *args: Any, site: str = "cond", **kwargs: Any
    ) -> Any:
        """`net(*args, **kwargs)` in the update. Where the same evaluation is held, its cut takes the forward's place.

        Args:
            rows, steps: `lean_row` and `lean_step` of the samples, [B] each; None where the caller has none.
            site: which network call of the step.

        Returns:
            What the network returns; its gradient goes to the cut, or, for rows that are not held, through the network.
        """
        window = self._window
        if rows is None or not torch.is_grad_enabled():
            return net(*args, **kwargs)
        over, due = self._turns.next()
        if window is None or not window.updating:
            return self._native(net, args, kwargs, due)
        wrapper = self._reductions.classify(net)
        if over and self._start().sync == "group":
            self._settling.after_group(window, wrapper, net)
        if wrapper.collective and window.agreed is None:
            self._agree(window)
        keys = keys_of(rows, steps, site)
        held: dict[Key, Row] = {}
        if not (window.native_only or (wrapper.collective and window.replayed + len(keys) > window.agreed_calls)):
            if wrapper.kind == "fsdp2":
                guard.parameters_of(net)  # gathered ones are given up on every rank, whatever each holds
            held, reasons = replay.find(window, net, keys, args, kwargs)
            if wrapper.collective and agree.minimum(int(not reasons)) == 0:
                reasons |= dict.fromkeys(held, f"another {'row of the call' if reasons else 'rank'} recomputes")
                held, window.native_only = {}, wrapper.alone
            for key in keys:
                if key in reasons and key not in window.passed_by:
                    window.count(reasons[key])
        if len(held) < len(keys):
            self._settling.before_native(window, wrapper, net)
            window.recomputed += len(keys) - len(held)
        if not held:
            return self._native(net, args, kwargs, due)
        replayed = replay.Replay(net, keys, held, args, kwargs)
        result = replayed.run(window, partial(self._native, due=due))
        if self._start().audits(window.number, sync.bare(net) in self._audited):
            self._settling.audit(replayed.for_audit())
        return result

    def flush(self, model: nn.Module, optimizer: Any) -> None:
        """Walks the kept graphs, first thing in upstream's boundary block: unscaling, clipping and the step follow.

        Args:
            model: the network as upstream trains it; under DDP the gradients of all its weights are averaged.
            optimizer: upstream's.

        Raises:
            LeanError: LG604, LG607, LG609, LG612 if the gradient could not be trusted; the optimizer has not stepped
                then.
        """
        window, flush = self._window, ""
        if window is not None and window.updating:
            # Ranks under DDP replay and recompute each on its own, but all of them average.
            net = self._reductions.net
            flush = "flat" if sync.apart(model) or (net is not None and sync.apart(net)) else ""
            if window.replayed and net is not None:
                wrapper = self._reductions.classify(net)
                flush = wrapper.flush
                self._settling.settle(window, wrapper, net, last=True)
        self._turns.update_over()
        self._reductions.finish(model, flush)
        if window is not None and window.updating:
            self._leave_window(None, flush)

    # -- inside ---------------------------------------------------------------------------------------------------

    def _start(self) -> settings.Settings:
        """Settings of the run; the first call compares them across ranks and says what was found."""
        if self._settings is None:
            chosen = settings.load()
            sync.same_settings(chosen.text())
            agree.tell_on_failure()
            self._settings, self._reductions.setting = chosen, chosen.sync
            self._budget, self._host = Budget(chosen.budget_bytes), HostMemory(chosen.offload_gb * 1e9)
            self._report.start(chosen, VERSION)
            if chosen.schedule != "recompute" or chosen.sync != "upstream":
                register_optimizer_step_pre_hook(self._before_step)
        return self._settings

    def _carry_over(self) -> None:
        """An update that takes several rollouts: what it has replayed is walked before the next one begins."""
        window, net = self._window, self._reductions.net
        if window is not None and window.updating and window.consumed and net is not None:
            wrapper = self._reductions.classify(net)
            self._settling.settle(window, wrapper, net, last=True)
            self._leave_window(None, wrapper.flush)

    def _begin(self, rows: int) -> int:
        """A rollout of so many rows begins; returns the id of the first one."""
        self._start()
        self._leave_window("a new rollout began")
        self._orders.forget()
        base, self._rows = self._rows, self._rows + rows
        return base

    def _open(self, base: int, positions: dict[tuple[int, int], int], model: nn.Module | None = None) -> None:
        refusal = self._reductions.classify(model).refusal if model is not None else ""
        if refusal:  # no window: the order of the samples is upstream's own, too
            self._report.once(f"{refusal}: nothing is kept, training runs as upstream's")
            return
        self._windows += 1
        self._window = Window(self._windows, base, positions)
        self._window.rounding_allowed = self._start().inputs == "rounded"
        self._window.refusal = self._budget.begin_window(self._report.say)

    @contextmanager
    def _rolling_out(self, last: bool) -> Iterator[None]:
        """Around a rollout, or one batch of it; after the last one the kept graphs are there to be used."""
        try:
            yield
        except BaseException:
            self._window = None
            raise
        finally:
            self.rows = None
        if last and self._window is not None:
            self._window.end_rollout()
            if self._reductions.wrapper is not None and self._reductions.wrapper.collective:
                self._agree(self._window)

    def _agree(self, window: Window) -> None:
        """All ranks hold the same number of leading steps from here on."""
        window.agreed = agree.minimum(window.prefix())
        window.keep_prefix(window.agreed, "beyond what every rank holds")

    def _native(self, net: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], due: bool) -> Any:
        window = self._window
        apart = window is not None and window.updating and sync.apart(net)
        audited = window is not None and self._start().audits(window.number, sync.bare(net) in self._audited)
        return self._reductions.native(net, args, kwargs, due=due, apart=apart, audited=audited)

    def _before_step(self, optimizer: Optimizer, *_: Any) -> None:
        self._settling.before_step(self._window, self._reductions.net, optimizer)

    def _leave_window(self, reason: str | None, flush: str = "") -> None:
        window, self._window = self._window, None
        self._settling.forget()
        left = self._settling.left(window)
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
            self._useless.add(window.net)
        if window.net is not None and any(map(math.isfinite, window.audits)):
            self._audited.add(window.net)
        self._report.window(window, flush)


lean = Lean()
