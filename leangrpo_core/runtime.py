"""The calls that a patched tree makes. One `Lean` serves a process; outside a rollout window each call is inert."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from . import audit, keep, memory, replay, settings, sync
from .errors import LeanError
from .report import Report
from .tape import Window

VERSION = "0.1.0"


def draw_order(rows: int, steps: int) -> Tensor:
    """A random order of the steps for each row: [rows, steps] long, from the CPU generator as upstream draws it."""
    orders = [torch.randperm(steps) for _ in range(rows)]
    return torch.stack(orders) if orders else torch.empty(0, steps, dtype=torch.long)


def _ids(value: Any) -> list[int]:
    if isinstance(value, Tensor):
        return [int(item) for item in value.reshape(-1).tolist()]
    return [int(item) for item in value] if isinstance(value, (list, tuple)) else [int(value)]


class Lean:
    """State of one process: its settings, the open window and the order of steps of the last rollout."""

    def __init__(self) -> None:
        self._settings: settings.Settings | None = None
        self._report = Report()
        self._window: Window | None = None
        self._windows = 0
        self._rows = 0  # ids given out so far
        self._base = 0  # id of the first row of the last rollout
        self._order: Tensor | None = None
        self._generator_state: Tensor | None = None
        self._sizes = memory.Sizes()
        self._calls: list[audit.Call] = []
        self._audited = False
        self._wrapper: sync.Wrapper | None = None
        self._net: nn.Module | None = None

    @contextmanager
    def rollout(self, *, rows: int, steps: int, trained: int, window: int) -> Iterator[None]:
        """Opens a window: network calls of the selected steps in this block are kept.

        Args:
            rows: samples of this rollout on this rank.
            steps: trajectory steps that can be trained, numbered from 0.
            trained: how many of them are trained per row; which ones is drawn here, before the rollout.
            window: how many rows, from the first, the first optimizer update consumes.

        Raises:
            LeanError: LG601 and LG602 for settings that are wrong or differ between ranks.
        """
        chosen = self._start()
        self._leave_window("a new rollout began")
        self._base, self._rows = self._rows, self._rows + rows
        self._order = None
        if chosen.schedule == "recompute":
            yield
            return
        self._order = draw_order(rows, steps)
        self._generator_state = torch.get_rng_state()
        self._windows += 1
        self._window = Window(self._windows, self._base, self._order, trained, min(window, rows))
        try:
            yield
        except BaseException:
            self._window = None
            raise
        self._window.end_rollout()
        if self._wrapper is not None and self._wrapper.collective:
            self._agree(self._window)

    def step_order(self, rows: int, steps: int) -> Tensor:
        """The order in which each row's steps are trained, in place of upstream's draw: [rows, steps] long, CPU."""
        drawn = self._order
        if drawn is not None and tuple(drawn.shape) == (rows, steps):
            if self._generator_state is not None and not torch.equal(self._generator_state, torch.get_rng_state()):
                self._report.once(
                    "something in the rollout (a reward, perhaps) draws from the CPU generator, so its numbers come in "
                    "another order than without the patch: training is as valid, but not equal number for number"
                )
            return drawn.clone()
        if drawn is not None:
            self._report.once(f"upstream trains {rows} x {steps} steps, the rollout announced {tuple(drawn.shape)}")
        self._order = draw_order(rows, steps)
        return self._order.clone()

    def identity(self) -> dict[str, Tensor]:
        """Which row and which trajectory steps each sample is: `lean_row` [B], `lean_step` [B, T], long, on the CPU.

        They ride in upstream's sample dict, after its permutation of the steps, through whatever it does next.
        """
        if self._order is None:
            raise LeanError("LG610", "identity() before step_order()", "the tree was edited: apply the patch again")
        return {"lean_row": self._base + torch.arange(len(self._order)), "lean_step": self._order.clone()}

    def rollout_call(
        self, net: nn.Module, rows: Any, step: Any, /, *args: Any, site: str = "cond", **kwargs: Any
    ) -> Any:
        """`net(*args, **kwargs)` in the rollout. A selected step runs under grad and its graph is kept.

        Args:
            rows: which row of the rollout this is, from 0; None where the caller is no training rollout.
            step: the trajectory step.
            site: which network call of the step.

        Returns:
            What the network returns, without a graph.
        """
        window = self._window
        if window is None or window.updating or rows is None:
            return net(*args, **kwargs)
        wrapper, chosen = self._classify(net), self._start()
        if not window.probed and not wrapper.refusal and chosen.audits(window.number, self._audited):
            keep.probe(window, net, args, kwargs)
        window.probed = True
        ids = _ids(rows)
        key = (window.base + ids[0], _ids(step)[0], site)
        if len(ids) != 1 or key[:2] not in window.positions:
            if len(ids) != 1:
                window.count("several samples in one call of the rollout")
            return net(*args, **kwargs)
        reason = keep.why_not(window, wrapper, net, key, args, kwargs)
        if reason:
            window.pass_by(key, reason)
            return net(*args, **kwargs)
        measure = self._report.follows(window)
        return keep.keep(window, net, key, args, kwargs, budget=chosen.budget_bytes, sizes=self._sizes, measure=measure)

    def policy_call(
        self, net: nn.Module, rows: Any, steps: Any, /, *args: Any, site: str = "cond", **kwargs: Any
    ) -> Any:
        """`net(*args, **kwargs)` in the update. Where the same evaluation is held, its cut takes the forward's place.

        Args:
            rows, steps: `lean_row` and `lean_step` of the sample, [1] each; None where the caller has none.
            site: which network call of the step.

        Returns:
            What the network returns; its gradient goes to the cut, or, if nothing is held, through the network.
        """
        window = self._window
        if window is None or not window.updating or rows is None or not torch.is_grad_enabled():
            return net(*args, **kwargs)
        wrapper = self._classify(net)
        if wrapper.collective and window.agreed is None:
            self._agree(window)
        over = window.native_only or (wrapper.collective and window.replayed >= (window.agreed or 0))
        if not over:
            ids, at = _ids(rows), _ids(steps)
            key = (ids[0], at[0], site) if len(ids) == len(at) == 1 else None
            reason = replay.why_not(window, net, key, args, kwargs)
            if wrapper.collective and sync.minimum(int(reason is None)) == 0:
                reason = reason or "another rank recomputes"
                window.native_only = True
            if reason is None and key is not None:
                return self._replay(window, net, key, args, kwargs)
            if key not in window.passed_by:
                window.count(reason or "not held")
        self._before_native(window, wrapper, net)
        window.recomputed += 1
        return net(*args, **kwargs)

    def flush(self, model: nn.Module, optimizer: Any) -> None:
        """Walks the kept graphs, first thing in upstream's boundary block: unscaling, clipping and the step follow.

        Args:
            model: the network as upstream clips it; under DDP the gradients of all its weights are averaged.
            optimizer: upstream's.

        Raises:
            LeanError: LG604, LG607, LG609 if the gradient could not be trusted; the optimizer has not stepped then.
        """
        window = self._window
        if window is None or not window.updating:
            return
        flush = ""
        if window.replayed and self._net is not None:
            wrapper = self._classify(self._net)
            flush = wrapper.flush
            self._settle(window, wrapper, self._net)
            if window.consumed:
                window.count("replayed, but no gradient came back", len(window.consumed))
            if flush == "flat":
                parameters = [p for p in model.parameters() if p.requires_grad]
                sync.flat_mean(parameters)
                if window.number == 1:
                    sync.same_gradients(parameters)
        self._leave_window(None, flush)

    # -- inside ---------------------------------------------------------------------------------------------------

    def _start(self) -> settings.Settings:
        """Settings of the run; the first call compares them across ranks and says what was found."""
        if self._settings is None:
            chosen = settings.load()
            if sync.world_size() > 1:
                texts = sync.everyones(chosen.text())
                if len(set(texts)) > 1:
                    listed = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(texts))
                    raise LeanError("LG602", listed, "export the same LEANGRPO_* variables on every node")
            self._settings = chosen
            self._report.start(chosen, VERSION)
            if chosen.schedule != "recompute":
                register_optimizer_step_pre_hook(self._before_step)
        return self._settings

    def _classify(self, net: nn.Module) -> sync.Wrapper:
        if self._net is not net or self._wrapper is None:
            self._net, self._wrapper = net, sync.classify(net)
            if self._wrapper.kind == "none" and not self._wrapper.refusal and sync.world_size() > 1:
                self._report.once("the network has no wrapper: as upstream, no gradient is shared between ranks")
        return self._wrapper

    def _agree(self, window: Window) -> None:
        """All ranks hold the same number of leading calls from here on."""
        window.agreed = sync.minimum(window.prefix())
        window.keep_prefix(window.agreed, "beyond what every rank holds")

    def _replay(self, window: Window, net: nn.Module, key: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        call = window.held.pop(key)
        window.consumed.append((key, call))
        window.replayed += 1
        if self._start().audits(window.number, self._audited):
            self._calls.append(audit.Call(net, args, kwargs, call))
        return call.for_update()

    def _before_native(self, window: Window, wrapper: sync.Wrapper, net: nn.Module) -> None:
        """Walks what was replayed so far, so that gradients add up in upstream's order, before a native call.

        Under FSDP1 a native backward beside held graphs is a segmentation fault, so the rest is let go there.
        """
        if window.consumed:
            if wrapper.flush == "joint" and any(call.cotangents() is None for _, call in window.consumed):
                raise LeanError(
                    "LG606",
                    "a step was replayed, its loss not yet walked, when another call of it must be recomputed",
                    "run with LEANGRPO_SCHEDULE=recompute under this wrapper",
                )
            self._settle(window, wrapper, net)
        if wrapper.collective and window.held:
            window.drop(list(window.held), "let go before a native call")

    def _settle(self, window: Window, wrapper: sync.Wrapper, net: nn.Module) -> None:
        """Walks what was consumed, and compares it with a native recomputation if an audit is due."""
        calls = [call for call in self._calls if call.kept.cotangents() is not None]
        self._calls = [call for call in self._calls if call.kept.cotangents() is None]
        parameters = [p for p in net.parameters() if p.requires_grad]
        before = audit.gradients(parameters) if calls else []
        replay.walk(window, wrapper, net)
        if calls:
            if wrapper.collective and window.held:
                window.drop(list(window.held), "let go before a native call")
            window.audits.append(audit.audit(parameters, before, calls, together=wrapper.collective))

    def _before_step(self, optimizer: Optimizer, *_: Any) -> None:
        """Weights are about to change: nothing may be waiting for its flush."""
        window = self._window
        if window is None or self._net is None or not (window.held or window.consumed):
            return
        ours = {id(parameter) for parameter in self._net.parameters()}
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
        if window.held:
            window.drop(list(window.held), reason or "held, not used by the first update")
        self._audited |= any(map(math.isfinite, window.audits))
        self._report.window(window, flush)


lean = Lean()
