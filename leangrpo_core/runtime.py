"""The calls that a patched tree makes. One `Lean` serves a process; outside a rollout window each call is inert."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from . import agree, audit, capture, guard, keep, memory, replay, settings, sync
from .budget import Budget
from .errors import LeanError
from .host import HostMemory
from .kept import Row
from .order import Device, Orders, held_first
from .report import Report
from .window import Key, Window, keys_of

VERSION = "0.1.0"

INPUTS_TOLD = {
    True: "they are replayed all the same (LEANGRPO_INPUTS=rounded)",
    False: "they are recomputed (LEANGRPO_INPUTS=rounded would replay them)",
}


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
        self._calls: list[audit.Call] = []
        self._compared = False
        self._audited: WeakSet[nn.Module] = WeakSet()
        self._useless: WeakSet[nn.Module] = WeakSet()
        self._wrapper: sync.Wrapper | None = None
        self._net: nn.Module | None = None

    @contextmanager
    def rollout(
        self, *, rows: int, steps: int, trained: int, window: int, batch: int = 1, shuffled: bool = False,
        device: Device = None,
    ) -> Iterator[None]:  # fmt: skip
        """Opens a window: network calls of the selected steps in this block are kept.

        Args:
            rows: samples of this rollout on this rank.
            steps: trajectory steps that can be trained, numbered from 0.
            trained: how many of them are trained per row; which ones is drawn here, before the rollout.
            window: how many rows, from the first that is trained, the first optimizer update consumes.
            batch: rows per network call of the update.
            shuffled: upstream trains the rows in a random order, which is drawn here, too.
            device: whose generator upstream draws these orders from; None is the CPU's.

        Raises:
            LeanError: LG601 and LG602 for settings that are wrong or differ between ranks.
        """
        base = self._begin(rows)
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
            base, chosen = self._begin(batches * rows), self._start()
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
                first update is to train come first then, unless LEANGRPO_ORDER is `upstream`.
        """
        drawn, window = self._orders.of_rows(rows, device), self._window
        if ids is None or window is None or window.replayed or window.recomputed or self._start().order == "upstream":
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
        wrapper, chosen = self._classify(net, rollout=True), self._start()
        if not wrapper.refusal:
            net, args, kwargs = sync.around_ddp(net, args, kwargs)
        if not window.probed and wrapper.kind == "fsdp2" and wrapper.collective:
            # Looking at weights makes FSDP2 give up gathered ones. Ranks keep calls of other steps, but must gather
            # again in the same one.
            window.see(net)
        if not window.looked_at and sync.bare(net) in self._useless:
            window.refusal = "no step of an earlier window had the inputs of the update"
        if not window.probed and wrapper.flush == "joint" and not wrapper.notice:
            wrapper = self._with_room(net, wrapper, capture.where(args, kwargs))
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
        if window is None or not window.updating:
            return self._native(net, args, kwargs)
        wrapper = self._classify(net)
        if wrapper.collective and window.agreed is None:
            self._agree(window)
        keys = keys_of(rows, steps, site)
        held: dict[Key, Row] = {}
        if not (window.native_only or (wrapper.collective and window.replayed + len(keys) > (window.agreed or 0))):
            if wrapper.kind == "fsdp2":
                guard.parameters_of(net)  # gathered ones are given up on every rank, whatever each holds
            held, reasons = replay.find(window, net, keys, args, kwargs)
            if wrapper.collective and agree.minimum(int(not reasons)) == 0:
                reasons |= dict.fromkeys(held, f"another {'row of the call' if reasons else 'rank'} recomputes")
                held, window.native_only = {}, wrapper.flush == "joint"
            for key in keys:
                if key in reasons and key not in window.passed_by:
                    window.count(reasons[key])
            if window.rounded:
                told = f"in the update {window.rounded}: {INPUTS_TOLD[window.rounding_allowed]}"
                self._report.once(told, about="rounded inputs")
        if len(held) < len(keys):
            self._before_native(window, wrapper, net)
            window.recomputed += len(keys) - len(held)
        if not held:
            return self._native(net, args, kwargs)
        replayed = replay.Replay(net, keys, held, args, kwargs)
        result = replayed.run(window, self._native)
        if self._start().audits(window.number, sync.bare(net) in self._audited):
            self._calls.append(replayed.for_audit())
        return result

    def flush(self, model: nn.Module, optimizer: Any) -> None:
        """Walks the kept graphs, first thing in upstream's boundary block: unscaling, clipping and the step follow.

        Args:
            model: the network as upstream trains it; under DDP the gradients of all its weights are averaged.
            optimizer: upstream's.

        Raises:
            LeanError: LG604, LG607, LG609 if the gradient could not be trusted; the optimizer has not stepped then.
        """
        window, flush = self._window, ""
        if window is not None and window.updating:
            # Ranks under DDP replay and recompute each on its own, but all of them average.
            if self._apart(model) or (self._net is not None and self._apart(self._net)):
                flush = "flat"
            if window.replayed and self._net is not None:
                wrapper = self._classify(self._net)
                flush = wrapper.flush
                self._settle(window, wrapper, self._net, last=True)
        self._average(model, flush)
        if window is not None and window.updating:
            self._leave_window(None, flush)

    # -- inside ---------------------------------------------------------------------------------------------------

    def _start(self) -> settings.Settings:
        """Settings of the run; the first call compares them across ranks and says what was found."""
        if self._settings is None:
            chosen = settings.load()
            sync.same_settings(chosen.text())
            agree.tell_on_failure()
            self._settings = chosen
            self._budget, self._host = Budget(chosen.budget_bytes), HostMemory(chosen.offload_gb * 1e9)
            self._report.start(chosen, VERSION)
            if chosen.schedule != "recompute":
                register_optimizer_step_pre_hook(self._before_step)
        return self._settings

    def _begin(self, rows: int) -> int:
        """A rollout of so many rows begins; returns the id of the first one."""
        self._start()
        self._leave_window("a new rollout began")
        self._orders.forget()
        base, self._rows = self._rows, self._rows + rows
        return base

    def _open(self, base: int, positions: dict[tuple[int, int], int], model: nn.Module | None = None) -> None:
        self._windows += 1
        self._window = Window(self._windows, base, positions)
        self._window.rounding_allowed = self._start().inputs == "rounded"
        self._window.refusal = self._budget.begin_window(self._report.say)
        if model is not None:
            self._window.refusal = self._classify(model).refusal or self._window.refusal

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
            if self._wrapper is not None and self._wrapper.collective:
                self._agree(self._window)

    def _classify(self, net: nn.Module, rollout: bool = False) -> sync.Wrapper:
        """How to treat `net`. A rollout may go around the wrapper; that is not what a user should be told about."""
        if self._net is not net or self._wrapper is None:
            late = self._start().sync == "late"
            around = rollout and self._net is not None and sync.bare(self._net) is sync.bare(net)
            self._net, self._wrapper = net, sync.classify(net, late)
            told = "" if around else self._wrapper.told(late)
            if told:
                self._report.once(told)
        return self._wrapper

    def _apart(self, net: nn.Module) -> bool:
        """Whether ranks go through this update each on its own, and average their gradients at its end."""
        if self._window is None or not self._window.updating:
            return False
        wrapper = sync.classify(net)
        return wrapper.flush == "flat" and not wrapper.refusal

    def _with_room(self, net: nn.Module, wrapper: sync.Wrapper, device: torch.device) -> sync.Wrapper:
        """One backward for all graphs only where every rank has room for it, else one after the other from here on."""
        reason = keep.no_room(wrapper, net, device)
        if agree.minimum(int(not reason)) == 1:
            return wrapper
        self._report.once(f"FSDP1: {reason or 'no room on another rank'}; gradients are reduced as upstream does")
        self._wrapper = sync.classify(net)
        return self._wrapper

    def _agree(self, window: Window) -> None:
        """All ranks hold the same number of leading steps from here on."""
        window.agreed = agree.minimum(window.prefix())
        window.keep_prefix(window.agreed, "beyond what every rank holds")

    def _native(self, net: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A native call of the update. DDP communicates in it only if every rank makes it, or will in its place."""
        late = self._settings is not None and self._settings.sync == "late"
        if late or self._apart(net):
            net, args, kwargs = sync.around_ddp(net, args, kwargs)
        return net(*args, **kwargs)

    def _before_native(self, window: Window, wrapper: sync.Wrapper, net: nn.Module) -> None:
        """Walks what was replayed so far, so that gradients add up in upstream's order, before a native call.

        Where FSDP1 walks all graphs in one backward, a native one beside held graphs is a segmentation fault: there the
        rest is let go.
        """
        if wrapper.flush == "joint" and window.held:
            window.drop(list(window.held), "let go before a native call")
        if not window.consumed:
            return
        if wrapper.flush == "joint" and not all(call.complete for call in window.consumed):
            raise LeanError(
                "LG606",
                "a step was replayed, its loss not yet walked, when another call of it must be recomputed",
                "run with LEANGRPO_SCHEDULE=recompute under this wrapper",
            )
        self._settle(window, wrapper, net, last=False)

    def _settle(self, window: Window, wrapper: sync.Wrapper, net: nn.Module, last: bool) -> None:
        """Walks what was consumed, and compares it with a native recomputation if an audit is due."""
        walked = replay.due(window, wrapper, last)
        ours = {id(call) for call in walked}
        calls = [call for call in self._calls if call.belongs_to(ours)]
        self._calls = [call for call in self._calls if not call.belongs_to(ours)]
        parameters = [p for p in guard.parameters_of(net) if p.requires_grad]
        before = audit.gradients(parameters) if calls else []
        replay.walk(window, wrapper, net, walked)
        if calls:
            if wrapper.flush == "joint" and window.held:
                window.drop(list(window.held), "let go before a native call")
            window.audits.append(audit.audit(parameters, before, calls, together=wrapper.collective))

    def _average(self, model: nn.Module, flush: str) -> None:
        """Averages gradients over the ranks where the flush, or the setting, asks for it."""
        late = self._start().sync == "late" and agree.world_size() > 1 and sync.classify(model).kind in ("none", "ddp")
        if flush != "flat" and not late:
            return
        parameters = [p for p in model.parameters() if p.requires_grad]
        sync.flat_mean(parameters)
        if not self._compared:
            self._compared = True
            sync.same_gradients(parameters)

    def _before_step(self, optimizer: Optimizer, *_: Any) -> None:
        """Weights are about to change: nothing may be waiting for its flush."""
        window = self._window
        if window is None or self._net is None or not (window.held or window.consumed):
            return
        ours = {id(parameter) for parameter in guard.parameters_of(self._net)}
        if not any(id(p) in ours for group in optimizer.param_groups for p in group["params"]):
            return
        if window.consumed:
            raise LeanError(
                "LG603",
                f"optimizer.step() with {len(window.consumed)} replayed calls not yet walked",
                "call lean.flush(model, optimizer) before clipping and stepping; `diff-patch` shows where it belongs",
            )
        window.drop(list(window.held), "the optimizer stepped before they were used")

    def _leave_window(self, reason: str | None, flush: str = "") -> None:
        window, self._window = self._window, None
        self._calls.clear()
        if window is None:
            return
        if window.consumed and reason:
            raise LeanError(
                "LG610",
                f"{reason} with {len(window.consumed)} replayed calls not yet walked",
                "an update must end with lean.flush(model, optimizer) before the next rollout",
            )
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
