"""From a network call of the rollout to upstream's step function, which gives the log-prob of the drawn sample.

Between the two upstream may combine calls (guidance). Grad mode is on there, and the calls' leaves are all that asks
for a gradient, so that the log-prob's gradient with respect to each is the provisional one. What the rollout goes on
with has no graph.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..kept import Kept
from ..values import Uncuttable, detach_all, map_tensors
from ..window import Key


@dataclass
class Waiting:
    """A call whose log-prob is not known yet, and the places of its rows that the update will ask for.

    Attributes:
        leaves: what the log-prob will be a function of: per output, per row.
    """

    call: Kept
    keys: Mapping[Key, int]
    leaves: list[list[Tensor]]


@dataclass
class Scored:
    """The same with the provisional gradient: per output, per row."""

    call: Kept
    keys: Mapping[Key, int]
    gradients: list[list[Tensor]]


class Scoring:
    """The calls of one step."""

    def __init__(self) -> None:
        self.waiting: list[Waiting] = []
        self._outside = False  # grad mode of upstream's own rollout

    def wait(self, call: Kept, keys: Mapping[Key, int]) -> Any:
        """What the network returned, with a graph."""
        with torch.enable_grad():
            result, leaves = call.for_log_prob()
        self.waiting.append(Waiting(call, dict(keys), leaves))
        return result

    def turn_off(self) -> None:
        """Back to the rollout's own grad mode."""
        if self.waiting:
            torch.set_grad_enabled(self._outside)

    def turn_on(self) -> None:
        """After a network call: grad mode stays on up to the step function."""
        if self.waiting:
            self._outside = torch.is_grad_enabled()
            torch.set_grad_enabled(True)

    def give_up(self) -> list[Waiting]:
        """No log-prob will come for these calls."""
        self.turn_off()
        waiting, self.waiting = self.waiting, []
        return waiting

    def run(self, step: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Any, list[Scored], str]:
        """Runs the step function.

        Returns:
            What it returns, without a graph; the calls with their provisional gradients; or why there are none.
        """
        try:
            with torch.enable_grad():  # upstream's no_grad may have begun and ended around the network call alone
                result = step(*args, **kwargs)
        finally:
            waiting = self.give_up()
        log_prob = _log_prob(result, rows=waiting[0].call.rows)
        if log_prob is None:
            return _detached(result), [], "no log-prob with a gradient is among what the step function returns"
        columns = [leaf for item in waiting for column in item.leaves for leaf in column]
        # The graph stays as long as upstream keeps something of it, which may be part of a loss.
        found = iter(torch.autograd.grad(log_prob, columns, torch.ones_like(log_prob), True, allow_unused=True))
        scored = []
        for item in waiting:
            gradients = [
                [torch.zeros_like(leaf) if grad is None else grad for leaf, grad in zip(column, found, strict=False)]
                for column in item.leaves
            ]
            scored.append(Scored(item.call, item.keys, gradients))
        return _detached(result), scored, ""


def _log_prob(result: Any, rows: int) -> Tensor | None:
    """The one tensor with a graph that has a number per row; calls made in parts have more rows in all."""
    try:
        tensors: list[Tensor] = []
        map_tensors(result, lambda tensor: tensors.append(tensor) or tensor)
    except Uncuttable:
        return None
    found = [t for t in tensors if t.requires_grad and t.dim() <= 1 and t.numel() >= rows]
    return found[0] if len(found) == 1 else None


def _detached(result: Any) -> Any:
    try:
        return map_tensors(result, lambda tensor: tensor.detach())
    except Uncuttable:
        detach_all(result)
        return result
