"""What a comparison of two runs says of each update: plain data, for a process without torch, too."""

from __future__ import annotations

import dataclasses
from typing import Any

from leangrpo_rehearsal.base import Bound
from leangrpo_rehearsal.beside import Beside


@dataclasses.dataclass
class Worst:
    """The tensor of one update that differs most."""

    tensor: str
    """gradient, weight, or the name of something else recorded, such as rewards."""
    parameter: str
    rank: int
    rel_l2: float
    max_abs: float
    why: str = ""


@dataclasses.dataclass
class Update:
    """How one optimizer update compares. Distances are over all parameters and ranks together."""

    index: int
    grad_rel_l2: float
    grad_max_abs: float
    grad_cosine: float
    grad_bitwise: bool
    weights_rel_l2: float
    weights_bitwise: bool
    rewards_equal: bool
    finite: bool
    complete: bool
    """Whether the same tensors are there, with the same shapes and dtypes. No gradient is not a gradient of zeros."""
    worst: Worst | None
    seconds: tuple[float, float]
    beside: list[Beside] = dataclasses.field(default_factory=list)
    """What else was noted since the update before, and differs: logged numbers, learning rates, averaged weights."""

    def off(self, bound: Bound) -> list[Beside]:
        """What of it rounding does not explain."""
        return [item for item in self.beside if not item.within(bound)]

    def matches(self, bound: Bound) -> bool:
        """Whether the update is within the bound. Anything not finite is not."""
        if not (self.finite and self.complete and self.rewards_equal) or self.off(bound):
            return False
        if bound.bitwise:
            return self.grad_bitwise and self.weights_bitwise
        return self.grad_rel_l2 <= bound.rel_l2 and self.weights_rel_l2 <= bound.weights

    @classmethod
    def of(cls, plain: dict[str, Any]) -> Update:
        """From the form that `dataclasses.asdict` and JSON give it."""
        worst = None if plain["worst"] is None else Worst(**plain["worst"])
        beside = [Beside(**item) for item in plain["beside"]]
        return cls(**(plain | {"worst": worst, "beside": beside, "seconds": tuple(plain["seconds"])}))
