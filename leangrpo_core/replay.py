"""The update's side: which rows of a policy call are answered by kept calls, and the walk through the graphs."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from . import agree, sync
from .audit import Call
from .cutting import Cuts
from .errors import LeanError
from .kept import Kept, Row, autocast_state, result_of
from .layermajor import walk_layer_major
from .rows import OTHER_ARGUMENTS, ROUNDED, compare, merge, take
from .values import as_tuple, hidden, leaves, named, needs_grad, rebuildable
from .window import Key, Window


def find(
    window: Window,
    net: nn.Module,
    keys: Sequence[Key],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    whole: bool = False,
) -> tuple[dict[Key, Row], dict[Key, str]]:
    """The rows of a policy call that are held as the same evaluation, and why the others must be recomputed.

    Args:
        whole: the call must be one of the rollout, with all its rows in their order, or none of them is taken.
    """
    held = {key: window.held[key] for key in keys if key in window.held}
    reasons = {key: "not held" for key in keys if key not in held}
    if len(set(keys)) < len(keys):
        return {}, dict.fromkeys(keys, "a sample twice in one call")
    if held:
        reason = _why_not(window, net, keys, list(held.values()), args, kwargs)
        if reason:
            return {}, reasons | dict.fromkeys(held, reason)
        differs = _differing(net, keys, held, args, kwargs)
        rounded = {key: why for key, why in differs.items() if why.startswith(ROUNDED)}
        window.note_rounding(rounded.values())
        if window.rounding_allowed:
            differs = {key: why for key, why in differs.items() if key not in rounded}
        window.turned_away += len(differs)
        for key in differs:
            window.let_go(key)
        reasons |= differs
        if len(reasons) < len(keys) and reasons and not rebuildable((args, kwargs)):
            return {}, reasons | dict.fromkeys(set(keys) - set(reasons), "an argument cannot be split into rows")
        if whole and not (reasons or _one_call([held[key] for key in keys])):
            return {}, dict.fromkeys(keys, "not a batch as it was drawn")
    return {key: row for key, row in held.items() if key not in reasons}, reasons


def _one_call(rows: Sequence[Row]) -> bool:
    call = rows[0].call
    return all(row.call is call for row in rows) and [row.place for row in rows] == list(range(call.rows))


def _why_not(
    window: Window,
    net: nn.Module,
    keys: Sequence[Key],
    rows: Sequence[Row],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> str | None:
    """Why no row of a policy call can be replayed on this rank, whatever their inputs, or None."""
    if sync.bare(net) is not window.net:
        return "another network than in the rollout"
    reason = _why_changed(window, net, frozenset(key[0] for key in keys))
    if reason:
        return reason
    if needs_grad(args, kwargs):
        return "a gradient must flow into the arguments"
    if any(row.call.autocast != autocast_state(row.call.leaves[0][0].device) for row in rows):
        return "autocast differs from the rollout's"
    if any(row.call.copies != rows[0].call.copies for row in rows):
        return "calls of the rollout with and without guidance in one call"
    return None


def _why_changed(window: Window, net: nn.Module, rows: frozenset[int]) -> str:
    """What changed in the network since the rollout, or nothing. All is looked at before the first replay.

    After it at a glance, for each other sample: what is changed for a while would be back at the flush.
    """
    if window.replayed and rows == window.glanced:
        return window.other
    first, window.glanced, window.other = not window.replayed, rows, ""
    other = window.others(net, wholly=first)
    if other:
        window.other = f"{' and '.join(other)} changed since the rollout"
    elif first and window.written(net):
        window.other = "weights were written in place since the rollout"
    if first and window.other:
        window.drop(list(window.held), window.other)
    return window.other


def _differing(
    net: nn.Module, keys: Sequence[Key], held: dict[Key, Row], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[Key, str]:
    """Rows whose inputs are not the rollout's, and why."""
    copies = next(iter(held.values())).call.copies
    arguments = named(sync.innermost(net), args, kwargs)
    places = {place: held[key] for place, key in enumerate(keys) if key in held}
    autocast = autocast_state(next(iter(held.values())).call.leaves[0][0].device)[0]
    casts = sync.casts_inputs(net)
    found = compare(places, arguments, rows=len(keys), copies=copies, promote=autocast, cast=casts)
    other = "inputs differ from the rollout's: "
    why = hidden(sync.innermost(net)) if any(why.startswith(OTHER_ARGUMENTS) for why in found.values()) else ""
    found = {place: f"{text} ({why})" if why else text for place, text in found.items()}
    return {keys[place]: why if why.startswith(ROUNDED) else other + why for place, why in found.items()}


class Replay:
    """A policy call of which some rows, or all, are answered by kept calls.

    Args:
        net: the network as the update calls it.
        held: the rows that are held, by key.
        keys: all rows of the call.
    """

    def __init__(
        self, net: nn.Module, keys: Sequence[Key], held: dict[Key, Row], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self._net, self._keys, self._args, self._kwargs = net, keys, args, kwargs
        self._places = [place for place, key in enumerate(keys) if key in held]
        self._copies = next(iter(held.values())).call.copies
        self.rows: list[Row] = []
        tensors = [item for _, item in leaves((args, kwargs)) if isinstance(item, Tensor) and not item.is_inference()]
        self._versions = [(item, item._version) for item in tensors]

    def check(self) -> None:
        """Before the call is made again. Raises LG614 if upstream has written into an argument since."""
        if any(tensor._version != version for tensor, version in self._versions):
            raise LeanError(
                "LG614",
                "an argument of a policy call was written in place before its update was over",
                "train with LEANGRPO_SCHEDULE=retain",
            )

    def run(self, window: Window, native: Callable[..., Any]) -> Any:
        """The call's result; rows that are not held come from one call of `native(net, args, kwargs)`."""
        others = sorted(set(range(len(self._keys))) - set(self._places))
        part = self._some(others) if others else None
        self.rows = window.take(self._keys[place] for place in self._places)
        replayed = as_tuple(result_of(self.rows), self._kwargs)
        if part is None:
            return replayed
        computed = native(self._net, *part)
        return merge([(self._places, replayed), (others, computed)], container=computed)

    def for_audit(self, rows: Sequence[int] | None = None) -> Call:
        """The call as it must be recomputed: with all rows that were replayed, or some of `self.rows` by number."""
        chosen = range(len(self.rows)) if rows is None else rows
        places = [self._places[n] for n in chosen]
        return Call(self._net, *self._some(places), [self.rows[n] for n in chosen])

    def _some(self, places: Sequence[int]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if list(places) == list(range(len(self._keys))):
            return self._args, self._kwargs
        return take(self._args, self._kwargs, len(self._keys), self._copies, places)


def changed(window: Window, net: nn.Module) -> list[str]:
    """What differs from what the kept calls saw, weights and buffers to the bit; in words."""
    return window.others(net, wholly=True) or ["weights, in place,"] * window.written(net)


def due(window: Window, wrapper: sync.Wrapper, last: bool) -> list[Kept]:
    """The kept calls to walk now, in the order of consumption.

    Before a native call (`last` false) only where no row is missing. As long as a batched one waits for rows, all do:
    the update's calls tie their rows together, and an audit compares them as a whole.

    At the boundary those of which some row has got a gradient; where a backward communicates, on any rank.
    """
    calls = window.consumed
    if last:
        flags = [call.has_gradients(every=False) for call in calls]
    elif any(call.rows > 1 and not call.complete for call in calls):
        flags = [False for _ in calls]
    else:
        flags = [call.complete for call in calls]
    if wrapper.communicates:
        if not _as_many_everywhere(calls):
            flags = [last for _ in calls]
        else:
            flags = agree.anyones(flags) if last else [not other for other in agree.anyones([not f for f in flags])]
    return [call for call, flag in zip(calls, flags, strict=True) if flag]


def _as_many_everywhere(calls: Sequence[Kept]) -> bool:
    """Whether every rank would make equally many backward passes. Rows in random order may come from more calls."""
    return agree.minimum(len(calls)) == -agree.minimum(-len(calls))


def begin_walk(window: Window, wrapper: sync.Wrapper, calls: Sequence[Kept], net: nn.Module) -> None:
    """The cotangents of `calls` are used from here on. Raises LG604 as :func:`walk` does."""
    other = changed(window, net)
    if wrapper.collective and agree.minimum(int(not other)) == 0:
        other = other or ["the network on another rank"]
    if other:
        raise LeanError(
            "LG604",
            f"{' and '.join(other)} changed while {len(window.consumed)} replayed calls waited for their flush",
            "move the change behind optimizer.step(), or run with LEANGRPO_SCHEDULE=recompute",
        )
    window.consumed = [call for call in window.consumed if all(call is not other for other in calls)]


def walk(window: Window, wrapper: sync.Wrapper, net: nn.Module, calls: Sequence[Kept]) -> None:
    """Runs the graphs of consumed calls backward and lets them go.

    In the order of consumption, the calls that one loss is made of in one backward, as natively: so gradients add up in
    upstream's order. All jointly where the wrapper demands it; unit by unit where that was asked for. A call without a
    gradient on this rank takes part with zeros.

    Raises:
        LeanError: LG604 if the network changed since the rollout, on every rank where the wrapper communicates; LG610
            if a rank has no graph where others have some and every rank must take part.
    """
    begin_walk(window, wrapper, calls, net)
    layer_major = wrapper.flush == "layer-major"
    if wrapper.late:
        _some_everywhere(calls)
    jointly = wrapper.flush == "joint" or (wrapper.communicates and not layer_major and not _as_many_everywhere(calls))
    if not calls:
        return
    if layer_major:
        walk_layer_major(net, [_with_cuts(call) for call in calls])
    elif jointly and wrapper.known and _reentrant(calls[0]):
        # Each nested backward would free the unit's weights and reduce, while other graphs still need them.
        if not _as_many_everywhere(calls):
            what = "reentrant activation checkpointing, and ranks have other numbers of graphs"
            raise LeanError("LG610", what, "train with LEANGRPO_SYNC=upstream")
        _one_by_one(net, calls, wrapper, local=True)
    elif jointly:
        _walk_jointly(net, calls)
    else:
        _one_by_one(net, calls, wrapper, local=False)


def _one_by_one(net: nn.Module, calls: Sequence[Kept], wrapper: sync.Wrapper, local: bool) -> None:
    """A backward per graph, or per loss where none communicates; with `local` FSDP1 reduces in the last one only."""
    waiting = list(reversed(calls))
    del calls
    while waiting:  # taken off one by one, so that each graph is freed before the next is walked
        same = [waiting.pop()]
        while not wrapper.communicates and waiting and waiting[-1].loss == same[0].loss:
            same.append(waiting.pop())
        with net.no_sync() if local and waiting else nullcontext():  # type: ignore[operator]
            _walk_jointly(net, same)
        del same


def _walk_jointly(net: nn.Module, calls: Sequence[Kept]) -> None:
    """All graphs in one backward, as autograd walks the calls that one loss is made of."""
    ready = [(call.cotangents(), call.release()) for call in calls]
    outs = [out for _, call_outs in ready for out in call_outs]
    if outs:
        with sync.walking(net, *(call.held for call in calls)):
            torch.autograd.backward(outs, [grad for grads, _ in ready for grad in grads])


def _reentrant(call: Kept) -> bool:
    """Whether a part of the graph is recomputed by a backward of its own."""
    seen, todo = set(), [out.grad_fn for out in call.outs]
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        if node.name().startswith("CheckpointFunction"):
            return True
        seen.add(node)
        todo += [parent for parent, _ in node.next_functions]
    return False


def _some_everywhere(calls: Sequence[Kept]) -> None:
    """Whether each rank has a graph to walk, or none has. Raises LG610 on every rank: to walk on would be a hang."""
    fewest, most = agree.minimum(len(calls)), -agree.minimum(-len(calls))
    if most and not fewest:
        raise LeanError(
            "LG610",
            f"{len(calls)} graphs to walk on this rank, up to {most} on others, none on some",
            "train with LEANGRPO_SYNC=upstream and report the start line",
        )


def _with_cuts(call: Kept) -> tuple[Cuts, list[Tensor], list[Tensor]]:
    """What to walk of a call, which lets go of it."""
    cuts, call.held = call.held, None
    assert isinstance(cuts, Cuts)
    return cuts, call.release(), call.cotangents()
