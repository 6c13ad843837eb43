"""Which rows ran in one network call: noted while the patched script runs, repeated by the untouched one.

Kernels round by the number of rows that they work on. A patched rollout runs the rows whose graphs it keeps in calls of
their own, and an update that replays them has the gradients of those calls. So that a distance can be told from
rounding, the untouched script runs once more with its calls cut into the same numbers of rows.

Calls without grad (the rollout's, evaluations, references) are counted apart from those with (the update's). The n-th
of a kind is the same call in both trees.
"""

from __future__ import annotations

import functools
import importlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from leangrpo_rehearsal.importhook import after_import

Part = dict[str, Any]
"""`places`: the rows of the native call that one call has; `rows`: how many rows that one has in all."""

FILE = "shapes.json"


class Notes:
    """A patched process' calls. An entry is None for a call with all its rows, else (rows, copies, parts)."""

    def __init__(self) -> None:
        self.calls: dict[str, list[Any]] = {"rollout": [], "update": []}
        self._inside = 0
        self._parts: list[Part] = []
        self._size = (0, 0)

    def install(self, policy: Iterable[str]) -> None:
        """Follows the network's forward and the places where the runtime cuts a call into rows."""
        for name in policy:
            _around(name, self._forward)
        after_import("_leangrpo.keep", self._watch_keep)
        after_import("_leangrpo.replay", self._watch_replay)

    def write(self, out: Path) -> None:
        """`shapes.json` under `out`."""
        (out / FILE).write_text(json.dumps(self.calls))

    def _forward(self, original: Any, module: Any, args: Any, kwargs: Any) -> Any:
        if not self._inside:
            self.calls["update" if torch.is_grad_enabled() else "rollout"].append(None)
        self._inside += 1
        try:
            return original(module, *args, **kwargs)
        finally:
            self._inside -= 1

    def _watch_keep(self, keep: Any) -> None:
        rollout_call, take = keep.rollout_call, keep.take

        @functools.wraps(take)
        def taking(args: Any, kwargs: Any, rows: int, copies: int, places: Any) -> Any:
            self._size = rows, copies
            self._parts.append({"places": list(places), "rows": len(places)})
            return take(args, kwargs, rows, copies, places)

        @functools.wraps(rollout_call)
        def called(*args: Any, **kwargs: Any) -> Any:
            self._parts = []
            self._inside += 1
            try:
                return rollout_call(*args, **kwargs)
            finally:
                self._inside -= 1
                self.calls["rollout"].append((*self._size, self._parts) if len(self._parts) > 1 else None)

        keep.take, keep.rollout_call = taking, called

    def _watch_replay(self, replay: Any) -> None:
        run = replay.Replay.run

        @functools.wraps(run)
        def ran(call: Any, *args: Any, **kwargs: Any) -> Any:
            self._inside += 1
            try:
                return run(call, *args, **kwargs)
            finally:
                self._inside -= 1
                self.calls["update"].append(_replayed(call))

        replay.Replay.run = ran


def _replayed(call: Any) -> Any:
    """How the rows of a replayed policy call ran, each in a call of the rollout."""
    parts: dict[int, Part] = {}
    for place, row in zip(call._places, call.rows, strict=True):
        part = parts.setdefault(id(row.call), {"places": [], "rows": row.call.rows})
        part["places"].append(place)
    count = len(call._keys)
    others = sorted(set(range(count)) - set(call._places))
    found = [*parts.values(), *([{"places": others, "rows": len(others)}] if others else [])]
    same = len(found) == 1 and found[0]["rows"] == count
    return None if same else (count, call._copies, found)


class Repeated:
    """A native process whose calls are cut as a patched one's were."""

    def __init__(self, noted: Path) -> None:
        self._calls: dict[str, list[Any]] = json.loads(noted.read_text())
        self._done = dict.fromkeys(self._calls, 0)
        self._inside = False

    def install(self, policy: Iterable[str]) -> None:
        """Cuts calls of these classes."""
        for name in policy:
            _around(name, self._forward)

    def _forward(self, original: Any, module: Any, args: Any, kwargs: Any) -> Any:
        if self._inside:
            return original(module, *args, **kwargs)
        kind = "update" if torch.is_grad_enabled() else "rollout"
        index, self._done[kind] = self._done[kind], self._done[kind] + 1
        cut = self._calls[kind][index] if index < len(self._calls[kind]) else None
        self._inside = True
        try:
            return original(module, *args, **kwargs) if cut is None else _in_parts(original, module, args, kwargs, cut)
        finally:
            self._inside = False


def _in_parts(original: Any, module: Any, args: Any, kwargs: Any, cut: Any) -> Any:
    rows, copies, parts = cut
    results = []
    for part in parts:
        # A row that is not asked for gets no gradient; it is there for the number of rows.
        places = [*part["places"], *[part["places"][0]] * (part["rows"] - len(part["places"]))]
        some = pytree.tree_map(functools.partial(_rows, rows=rows, copies=copies, places=places), (args, kwargs))
        results.append(pytree.tree_flatten(original(module, *some[0], **some[1])))
    order = [place for part in parts for place in part["places"]]
    if sorted(order) != list(range(rows)):
        raise ValueError(f"the patched run's calls have other rows than the native one's: {order} of {rows}")
    back = sorted(range(rows), key=order.__getitem__)
    leaves = []
    for column in zip(*(leaves for leaves, _ in results), strict=True):
        if not isinstance(column[0], torch.Tensor):
            leaves.append(column[0])
            continue
        wanted = [
            tensor.unflatten(0, (-1, part["rows"]))[:, : len(part["places"])]
            for tensor, part in zip(column, parts, strict=True)
        ]
        leaves.append(torch.cat(wanted, dim=1)[:, back].flatten(0, 1))
    return pytree.tree_unflatten(leaves, results[0][1])


def _rows(item: Any, rows: int, copies: int, places: list[int]) -> Any:
    if not isinstance(item, torch.Tensor) or item.dim() == 0 or item.shape[0] != rows * copies:
        return item
    return item.unflatten(0, (copies, rows))[:, places].flatten(0, 1)


def _around(name: str, forward: Any) -> None:
    module, _, attribute = name.partition(":")
    cls = getattr(importlib.import_module(module), attribute)
    original = cls.forward

    @functools.wraps(original)
    def called(self: Any, *args: Any, **kwargs: Any) -> Any:
        return forward(original, self, args, kwargs)

    cls.forward = called
