"""The calls that a patched tree makes. One `Lean` serves a process; outside a rollout window each call is inert."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from . import agree, capture, guard, keep, misuse, replay, sync
from .errors import LeanError
from .kept import Row
from .layout import Layout
from .order import Device, held_first
from .run import Run
from .turns import Turns
from .window import Key, keys_of, numbers


class Lean:
    """What a patched tree calls.

    Attributes:
        rows, steps: what :meth:`at` named last; None outside a training rollout and the update after it.
        layout: the calls around a rollout that is drawn and trained in parts.
    """

    def __init__(self) -> None:
        self.rows: Any = None
        self.steps: Any = None
        self._run = Run()
        self.layout = Layout(self._run)

    @contextmanager
    def rollout(
        self, *, rows: int, steps: int, trained: int, window: int, batch: int = 1, group: int | None = None,
        shuffled: bool = False, device: Device = None, chosen: Sequence[int] | None = None, moved: bool = False,
        best_of: int | None = None,
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
            chosen: the steps that are trained, `trained` of them, in this order, where upstream knows them beforehand
                and draws no order of steps.
            moved: upstream may train the rows in another order, known only with their rewards. Then those of the first
                update that are among the first `window` are held, or, if LEANGRPO_ORDER is `upstream`, all are.
            best_of: how many of the rows are trained, where upstream chooses them by their rewards. Any of them may be,
                so nothing is kept unless LEANGRPO_ORDER is `upstream`, which holds the graphs of all.

        Raises:
            LeanError: LG601 and LG602 for settings that are wrong or differ between ranks.
        """
        run = self._run
        self.layout.require(batches=False)
        base, by_group = run.begin(rows, self.layout.continues), run.settings.sync == "group"
        parts = self.layout.turns(trained, by_group)
        grouped = window if group is None or best_of is not None else group
        run.turns = parts or Turns(trained, batch, window, grouped, by_group, best_of or rows)
        window = self.layout.window(window)
        keeps = run.schedule != "recompute"
        run.auto.noticed.best_of, run.auto.noticed.team = best_of is not None, self.layout.team
        if keeps and best_of is not None:
            keeps, window = run.holds_all(rows, trained, best_of, window), rows
        if keeps or chosen is not None:
            how = {"shuffled": shuffled, "device": device, "in_order": chosen is not None, "best_of": best_of}
            order = run.orders.draw(base, rows, steps, **how)
            if window and keeps:
                held = rows if moved and run.settings.order == "upstream" else window
                run.open(base, order.positions(held, chosen or range(trained), batch))
                run.reweighting.begin(run.window, run.auto.way, steps, group or rows, self.layout.team)
        with run.rolling_out(last=True):
            yield

    @contextmanager
    def rollout_batch(
        self, batch: int, *, batches: int, rows: int, steps: int, window: int, model: nn.Module,
        of: int | None = None, device: Device = None, shuffled: bool = False, batch_rows: int | None = None,
        calls: nn.Module | None = None, whole: bool = False,
    ) -> Iterator[None]:  # fmt: skip
        """The rollout of one batch out of several that are then trained together; the first one opens a window.

        Their samples are collated, perhaps some of them left out, perhaps shuffled (:meth:`row_order`), and trained in
        batches again, each from the first step to the last or in the order that :meth:`step_order` draws.

        Args:
            batch, batches: which batch this is, from 0, and how many there are.
            rows: samples per batch.
            steps: trajectory steps that are trained.
            window: how many batches the first optimizer update consumes.
            model: the network as upstream trains it, which need not be how the rollout calls it.
            of: how many trajectory steps upstream draws them from, for each row, from the generator of `device`; None
                where it draws no order of steps.
            shuffled: upstream draws an order of all rows, too, before that of their steps, and from the same generator.
            batch_rows: samples per batch of the update, where they are others than those of the rollout.
            calls: the network that the rollout calls, where `model` holds some of its weights only and hands its own
                calls on to it.
            whole: each batch is trained as it was drawn: no sample is left out or trained in another batch. Then ranks
                walk equally many graphs, which FSDP needs where calls have several rows.

        Raises:
            LeanError: LG601 and LG602 for settings that are wrong or differ between ranks.
        """
        run = self._run
        if batch == 0:
            self.layout.require(batches=True)
            run.carry_over()
            base, chosen, all_rows = run.begin(batches * rows), run.settings, batches * rows
            trained_in = batch_rows or rows
            first = min(window * trained_in, all_rows)
            run.turns = Turns(steps, trained_in, window * trained_in, window * trained_in, rows=all_rows)
            if calls is not None:
                sync.hands_on(model, calls)
            keeps = run.schedule != "recompute"
            if of is None:
                order = run.orders.draw(base, all_rows, steps, in_order=True)
                first = all_rows if chosen.order == "upstream" else first
            else:
                keeps = keeps and run.keeps_through(model)
                order = run.orders.draw(base, all_rows, of, shuffled=shuffled, device=device) if keeps else None
            if keeps and order is not None:
                run.open(base, order.positions(first, range(steps), trained_in), model, whole)
                run.reweighting.begin(run.window, run.auto.way, of or steps, all_rows)
        self.rows = range(batch * rows, (batch + 1) * rows)
        try:
            with run.rolling_out(last=batch == batches - 1):
                yield
        finally:
            self.rows = None

    def row_order(self, rows: int, device: Device = None, ids: Tensor | None = None) -> Tensor:
        """The order in which rows are trained, in place of upstream's draw: [rows] long, on `device`.

        Args:
            ids: `lean_row` of the samples now, where upstream shuffles what :meth:`rollout_batch` drew. Those that the
                first update may train come first then: all of them, if LEANGRPO_ORDER is `upstream`.
        """
        drawn, window = self._run.orders.of_rows(rows, device), self._run.window
        if ids is None or window is None or window.replayed or window.recomputed:
            return drawn
        return held_first(drawn, ids, {row for row, _ in window.positions})

    def step_order(self, rows: int, steps: int, device: Device = None, ids: Tensor | None = None) -> Tensor:
        """The order in which each row's steps are trained, in place of upstream's draw: [rows, steps] long.

        Args:
            ids: `lean_row` of the samples now, where upstream has chosen them (`best_of`).
        """
        return self._run.orders.of_steps(rows, steps, device, ids)

    def drawn(self, device: Device = None) -> dict[str, Tensor]:
        """`lean_row` [B] of the samples as they were drawn, long, where upstream is about to choose among them."""
        return {"lean_row": self._run.last_rows.to(device)}

    def identity(self, device: Device = None) -> dict[str, Tensor]:
        """Which row and which trajectory steps each sample is: `lean_row` [B], `lean_step` [B, T], long.

        They ride in upstream's sample dict, after its permutations, through whatever it does next. On the CPU, so that
        reading them costs no synchronisation, unless upstream will index them on another device.

        Raises:
            LeanError: LG610 before :meth:`step_order`.
        """
        return self._run.orders.identity(device)

    def at(self, rows: Any, steps: Any = None, turn: int | None = None) -> None:
        """Names the rows, and in the update their steps, that the next network calls evaluate.

        Args:
            rows: in the rollout counted from 0, in the update `lean_row`; None where a sample carries no ids.
            steps: `lean_step`.
            turn: which column of it is trained now.
        """
        self._run.auto.rolls(rows)
        known = self._run.window is not None and rows is not None
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
        run, window = self._run, self._run.window
        if window is None or window.updating or rows is None:
            run.auto.rolls(rows)
            return run.auto.clock.rollout_call(lambda: net(*args, **kwargs), site)
        if window.reweight is None:
            misuse.graph_in_rollout(args, kwargs)
        wrapper = run.reductions.classify(net, rollout=True)
        self.layout.check(wrapper)
        if not wrapper.refusal:
            net, args, kwargs = sync.around_ddp(net, args, kwargs)
        if not window.looked_at and sync.bare(net) in run.useless:
            window.refusal = "no step of an earlier window had the inputs of the update"
        if not window.probed and wrapper.flush == "joint" and not wrapper.notice:
            wrapper = run.reductions.with_room(net, wrapper, capture.where(args, kwargs))
        if not window.probed and not wrapper.refusal and run.audits(window, net):
            capture.probe(window, wrapper, net, args, kwargs)
        window.probed = True
        keys = [(window.base + row, at, site) for row, at, _ in keys_of(rows, step, site)]
        window.glance(net, keys, wrapper)
        if run.auto.probing and not wrapper.refusal:
            run.auto.probe(window, wrapper, net, keys, args, kwargs, run.sizes, run.turns)
        run.reweighting.before_call(window, wrapper, net, keys, args, kwargs, run.auto.room)
        before = run.unlike.before(window, net, capture.where(args, kwargs))
        try:
            result = keep.rollout_call(
                window, wrapper, net, keys, args, kwargs,
                budget=run.budget.bytes, host=run.host, sizes=run.sizes, measure=run.report.follows(window),
            )  # fmt: skip
        except LeanError as error:
            if not run.auto.survives(error, window, wrapper):
                raise
        else:
            result = run.unlike.after(window, wrapper, net, before, args, kwargs, result)
            if window.reweight is not None:
                window.reweight.scoring.turn_on()
            return result
        return net(*args, **kwargs)  # only here the failed call's memory is free again

    def scored(self, step: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """`step(*args, **kwargs)`: upstream's step function in the rollout, which gives the log-prob of the sample.

        With LEANGRPO_SCHEDULE=reweight the graphs of the step's network calls are walked here.

        Returns:
            What the step function returns, without a graph.
        """
        window = self._run.window
        self._run.auto.noticed.scored = True
        if window is not None and not window.updating and window.reweight is None:
            misuse.graph_in_rollout(args, kwargs)
        if window is None or window.reweight is None or not window.reweight.scoring.waiting:
            return step(*args, **kwargs)
        return window.reweight.scored(step, args, kwargs)

    def rewarded(self, keep: Callable[[Tensor], Any], rows: Any, rewards: Tensor, /) -> Any:
        """`keep(rewards)`: upstream keeps the rewards of these rows of the rollout, right after their trajectories.

        With LEANGRPO_BUFFERS=affine their gradients then go into their group's sums.
        """
        window = self._run.window
        self._run.auto.noticed.rewarded()
        if window is not None and window.reweight is not None and not window.updating:
            ids, values = numbers(rows), rewards.detach().reshape(-1).tolist()
            if len(ids) == len(values):
                window.reweight.rewarded([window.base + row for row in ids], values)
        return keep(rewards)

    def policy_call(
        self, net: nn.Module, rows: Any, steps: Any, /, *args: Any, site: str = "cond", **kwargs: Any
    ) -> Any:
        """`net(*args, **kwargs)` in the update. Where the same evaluation is held, its cut takes the forward's place.

        Args:
            rows, steps: `lean_row` and `lean_step` of the samples, [B] each; None where the caller has none.
            site: which network call of the step.

        Returns:
            What the network returns; its gradient goes to the cut, or, for rows that are not held, through the network.

        Raises:
            LeanError: LG610 for a module inside the FSDP-wrapped network that the rollout called.
        """
        run, window = self._run, self._run.window
        if not torch.is_grad_enabled():
            run.auto.noticed.reference = run.without_grad = True
            return net(*args, **kwargs)
        run.auto.update_call()
        if rows is None:
            return run.auto.clock.native_call(lambda: net(*args, **kwargs))
        misuse.inside_fsdp(net, run.reductions.net)
        run.called = net
        run.settling.calls += 1
        over, due = run.turns.next()
        if window is None or not window.updating:
            return run.native(net, args, kwargs, due)
        wrapper = run.reductions.classify(net)
        if over and run.settings.sync == "group":
            run.settling.after_group(window, wrapper, net)
        if wrapper.collective and window.agreed is None:
            run.agree_on_prefix(window)
        keys = keys_of(rows, steps, site)
        held: dict[Key, Row] = {}
        if not (window.native_only or (wrapper.collective and window.replayed + len(keys) > window.agreed_calls)):
            if wrapper.kind == "fsdp2":
                guard.parameters_of(net)  # gathered ones are given up on every rank, whatever each holds
            held, reasons = replay.find(window, net, keys, args, kwargs, window.calls_whole(wrapper))
            if wrapper.collective and agree.minimum(int(not reasons)) == 0:
                reasons |= dict.fromkeys(held, f"another {'row of the call' if reasons else 'rank'} recomputes")
                held, window.native_only = {}, wrapper.alone
            for key in keys:
                if key in reasons and key not in window.passed_by:
                    window.count(reasons[key])
        if len(held) < len(keys):
            run.settling.before_native(window, wrapper, net)
            window.recomputed += len(keys) - len(held)
        if not held:
            return run.native(net, args, kwargs, due)
        replayed = replay.Replay(net, keys, held, args, kwargs)
        result = replayed.run(window, partial(run.native, due=due))
        if run.audits(window, net):
            run.settling.audit(replayed.for_audit())
        if window.reweight is not None:
            run.settling.note(replayed)
        return result

    def flush(self, model: nn.Module, optimizer: Any) -> None:
        """Walks the kept graphs, first thing in upstream's boundary block: unscaling, clipping and the step follow.

        Args:
            model: the network as upstream trains it; under DDP the gradients of all its weights are averaged.
            optimizer: upstream's.

        Raises:
            LeanError: LG604, LG607, LG609, LG612 if the gradient could not be trusted, LG610 if the update evaluated
                another network than is trained; the optimizer has not stepped then.
        """
        run = self._run
        called, run.called, run.without_grad, run.settling.calls = run.called, None, False, 0
        misuse.untrained(called, model, optimizer)
        with agree.at("lean.flush"):
            self._flush(model)

    def _flush(self, model: nn.Module) -> None:
        run, window, flush = self._run, self._run.window, ""
        if window is not None and window.updating:
            # Ranks under DDP replay and recompute each on its own, but all of them average.
            net = run.reductions.net
            flush = "flat" if sync.apart(model) or (net is not None and sync.apart(net)) else ""
            if window.replayed and net is not None:
                wrapper = run.reductions.classify(net)
                flush = wrapper.flush
                run.settling.settle(window, wrapper, net, last=True)
                run.reweighting.learn(window, wrapper)
        run.turns.update_over()
        run.reductions.finish(model, flush)
        run.auto.update_over()
        if window is not None and window.updating:
            run.leave_window(None, flush)


lean = Lean()
