"""Rows of batched network calls: a batch of an update is put together from rows of several kept calls.

A network call of `rows` rows works on tensors whose first dimension is `copies` times that, copy by copy: guidance runs
all rows without the prompt and then all rows with it (2 copies), most networks have 1. A tensor with another first
dimension is shared by all rows.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .values import Uncuttable, in_tensors_of, leaves, map_tensors

BY_UP_TO = " by up to "
OTHER_ARGUMENTS = "other arguments: "
ROUNDED = "inputs are the rollout's but for rounding: "
LOW = (torch.bfloat16, torch.float16)


def split(tensor: Tensor, rows: int) -> list[Tensor] | None:
    """Each row's part of an output, [copies, ...]; None if the first dimension is no multiple of `rows`.

    One row is the whole tensor, whatever its shape. The parts are views.
    """
    if rows == 1:
        return [tensor]
    if tensor.dim() == 0 or tensor.shape[0] % rows:
        return None
    return list(tensor.unflatten(0, (-1, rows)).unbind(1))


def join(parts: Sequence[Tensor]) -> Tensor:
    """The tensor of a call with these rows; the inverse of :func:`split`. A single part is returned as it is."""
    return parts[0] if len(parts) == 1 else torch.stack(list(parts), dim=1).flatten(0, 1)


def copies_in(args: tuple[Any, ...], kwargs: dict[str, Any], rows: int) -> int | None:
    """How many copies of `rows` rows a call works on, judged by its first tensor with two dimensions or more."""
    for _, item in leaves((args, kwargs)):
        if isinstance(item, Tensor) and item.dim() >= 2:
            return item.shape[0] // rows if item.shape[0] % rows == 0 else None
    return None


def take(
    args: tuple[Any, ...], kwargs: dict[str, Any], rows: int, copies: int, places: Sequence[int]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of the same call with the rows at `places` only.

    Raises:
        Uncuttable: an argument that cannot be rebuilt.
    """

    def some(tensor: Tensor) -> Tensor:
        if tensor.dim() == 0 or tensor.shape[0] != copies * rows:
            return tensor
        parts = tensor.unflatten(0, (copies, rows))
        return parts[:, list(places)].flatten(0, 1)

    return map_tensors((args, kwargs), some)


def merge(parts: Sequence[tuple[Sequence[int], Any]], container: Any) -> Any:
    """One result from the results of a call's parts.

    Args:
        parts: (places of the rows, result of the call with these rows); all places together are 0 .. rows - 1.
        container: the result among them whose containers are to be used.
    """
    columns: list[list[Tensor]] = []
    for places, result in parts:
        tensors: list[Tensor] = []
        map_tensors(result, _collector(tensors))
        if any(tensor.dim() == 0 or tensor.shape[0] % len(places) for tensor in tensors):
            raise Uncuttable(f"the result of {len(places)} rows is not made of rows")
        columns.append([tensor.unflatten(0, (-1, len(places))) for tensor in tensors])
    order = [place for places, _ in parts for place in places]
    back = sorted(range(len(order)), key=order.__getitem__)
    merged = iter([torch.cat(group, dim=1)[:, back].flatten(0, 1) for group in zip(*columns, strict=True)])
    return map_tensors(container, lambda tensor: next(merged))


def _collector(into: list[Tensor]) -> Callable[[Tensor], Tensor]:
    def collect(tensor: Tensor) -> Tensor:
        into.append(tensor)
        return tensor

    return collect


def compare(
    kept: Mapping[int, tuple[Any, int]],
    named: dict[str, Any],
    rows: int,
    copies: int,
    promote: bool,
    cast: bool = False,
) -> dict[int, str]:
    """Which rows of a call are not the kept ones, by their place in the call, and why.

    Tensors are compared by value, NaN differs from everything. A tensor of one element, such as a timestep, stands for
    all rows; integers that came in a list may come in a tensor now. One device synchronisation in all, where nothing
    differs. Where the values differ by no more than what bringing them to a lower precision between rollout and update
    explains, the reason begins with `ROUNDED`.

    Args:
        kept: by place in the call: the kept call, with its `inputs` and `rows`, and the row's place in that.
        named: the arguments now, by name.
        rows: how many rows the call has now.
        copies: see the module.
        promote: equal floating-point values of another dtype are the same, if a row has more than one of them (under
            autocast the network casts them anyway). A mask of booleans is never the same as one of numbers.
        cast: all equal floating-point values are, since the wrapper casts them before the network sees them.
    """
    now = list(leaves(named))
    calls = list({id(call): call for call, _ in kept.values()}.values())
    before = {id(call): in_tensors_of(call.inputs, now) for call in calls}
    for call in calls:
        if [path for path, _ in before[id(call)]] != [path for path, _ in now]:
            return dict.fromkeys(kept, _names(call.inputs, now))
    pairs: list[Pair] = []
    for index, (path, new) in enumerate(now):
        for call in calls:
            reason = _other_kind(path, before[id(call)][index][1], new)
            if reason:
                return dict.fromkeys(kept, reason)
        if not isinstance(new, Tensor):
            continue
        olds = [before[id(call)][index][1] for call, _ in kept.values()]
        if any(
            not _alike(old, call.rows, new, rows, copies) for old, (call, _) in zip(olds, kept.values(), strict=True)
        ):
            return dict.fromkeys(kept, f"{path} has shape {tuple(new.shape)}, had {tuple(olds[0].shape)}")
        old = [_row(old, call.rows, copies, place) for old, (call, place) in zip(olds, kept.values(), strict=True)]
        parts = [_row(new.detach(), rows, copies, place) for place in kept]
        shape = max((part.shape for part in (*old, *parts)), key=lambda shape: (shape.numel(), len(shape)))
        wide = torch.promote_types(old[0].dtype, new.dtype)
        both = [torch.stack([part.to(wide).expand(shape) for part in side]) for side in (old, parts)]
        kinds = {item.dtype for item in (*olds, new)}
        # What is one number per row, such as a timestep, a network may compute with before anything casts it.
        same = cast or (promote and max(part.numel() for part in parts) > copies)
        lowest = None if same or len(kinds) == 1 else max(kinds, key=lambda kind: torch.finfo(kind).eps)
        pairs.append(Pair(path, both[0], both[1], lowest))
    return _differences(pairs, list(kept))


class Pair(NamedTuple):
    """An argument in the rollout and now, one row each along the first dimension.

    Attributes:
        lowest: the lower precision of the two, if they had different ones and the network does not see to that.
    """

    path: str
    old: Tensor
    new: Tensor
    lowest: torch.dtype | None


def _names(before: list[tuple[str, Any]], now: list[tuple[str, Any]]) -> str:
    """Other arguments than before, by name: in words."""
    old, new = {path for path, _ in before}, {path for path, _ in now}
    return f"{OTHER_ARGUMENTS}{', '.join(sorted(old ^ new)) or 'in another order'}"


def _in_rows(tensor: Tensor, rows: int, copies: int) -> bool:
    """Whether a tensor of a call has an entry for each row, or else one for all of them."""
    return tensor.dim() > 0 and tensor.shape[0] == copies * rows


def _alike(old: Tensor, old_rows: int, new: Tensor, new_rows: int, copies: int) -> bool:
    """Whether two arguments can be compared row by row, by their shapes."""
    single = any(tensor.dim() < 2 and tensor.numel() == 1 for tensor in (old, new))
    if _in_rows(old, old_rows, copies) != _in_rows(new, new_rows, copies):
        return single
    if not _in_rows(old, old_rows, copies):
        return single or old.shape == new.shape
    return old.shape[1:] == new.shape[1:]


def _row(tensor: Tensor, rows: int, copies: int, place: int) -> Tensor:
    """One row's part, [copies, ...], or the whole of what all rows share."""
    if not _in_rows(tensor, rows, copies):
        return tensor
    return tensor.unflatten(0, (copies, rows))[:, place]


def _other_kind(path: str, old: Any, new: Any) -> str | None:
    if isinstance(old, Tensor) != isinstance(new, Tensor):
        return f"{path} is no longer of the same kind"
    if not isinstance(old, Tensor):
        same = type(old) is type(new) and (old is new or old == new)
        return None if same else f"{path} is {new!r}, was {old!r}"
    if old.device != new.device and old.dim() and new.dim():
        return f"{path} is on {new.device}, was on {old.device}"
    floating = old.is_floating_point() and new.is_floating_point()
    if old.dtype != new.dtype and not floating:
        return f"{path} is {new.dtype}, was {old.dtype}"
    return None


def _differences(pairs: list[Pair], places: list[int]) -> dict[int, str]:
    if not pairs:
        return {}
    device = pairs[0].new.device
    flags = [(pair.old.to(pair.new.device) != pair.new).reshape(len(places), -1).any(1).to(device) for pair in pairs]
    found: dict[int, list[str]] = {}
    for pair, unequal in zip(pairs, torch.stack(flags).tolist(), strict=True):
        for index, bad in enumerate(unequal):
            if bad or pair.lowest:
                found.setdefault(places[index], []).append(_difference(pair, index))
    # A row is another one for any reason but rounding.
    return {place: min(reasons, key=lambda reason: reason.startswith(ROUNDED)) for place, reasons in found.items()}


def _difference(pair: Pair, index: int) -> str:
    # fp64, so that integers and booleans have a difference too
    old, new = pair.old[index].to(pair.new.device).double(), pair.new[index].double()
    off = (old - new).abs()
    low = [pair.lowest] if pair.lowest else [kind for kind in LOW if _fits(old, kind) or _fits(new, kind)]
    eps = max((torch.finfo(kind).eps for kind in low), default=0.0)
    rounded = pair.new.is_floating_point() and bool((off <= eps * torch.maximum(old.abs(), new.abs())).all())
    text = f"{pair.path} differs{BY_UP_TO}{off.max().item():.3g}"
    return ROUNDED + text if rounded else text


def _fits(values: Tensor, kind: torch.dtype) -> bool:
    """Whether all values are ones of the lower precision."""
    return bool((values.to(kind).double() == values).all())
