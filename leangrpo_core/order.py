"""In which order rows and steps are trained: drawn before the rollout, so that it knows which steps to keep."""

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from .errors import LeanError

Device = torch.device | str | None


def draw_rows(rows: int, device: Device = None) -> Tensor:
    """A random order of the rows: [rows] long, from the generator of `device`, as upstream draws it."""
    return torch.randperm(rows, device=device)


def steps_in_order(rows: int, steps: int) -> Tensor:
    """Each row's steps from the first to the last: [rows, steps] long."""
    return torch.arange(steps).repeat(rows, 1)


def held_first(drawn: Tensor, ids: Tensor, first: Collection[int]) -> Tensor:
    """The order `drawn` with the rows of the first update at the front; the rows of each part stay in the drawn order.

    Args:
        drawn: a permutation, [B] long.
        ids: `lean_row` of the samples that it puts in order, [B].
        first: ids of the rows that the first update shall train.
    """
    early = torch.tensor([row in first for row in ids.tolist()], dtype=torch.bool)[drawn.cpu()].to(drawn.device)
    return torch.cat([drawn[early], drawn[~early]])


def draw_steps(rows: int, steps: int, device: Device = None) -> Tensor:
    """A random order of the steps for each row: [rows, steps] long, from the generator of `device`."""
    orders = [torch.randperm(steps, device=device) for _ in range(rows)]
    return torch.stack(orders) if orders else torch.empty(0, steps, dtype=torch.long, device=device)


class Order:
    """What is drawn for one rollout. Each part answers upstream's draw once; a later one is upstream's own.

    Args:
        base: id of the rollout's first row.
        rows, steps: samples of the rollout and steps of a trajectory.
        shuffled: whether upstream also puts the rows in a random order; it draws that first.
        device: whose generator upstream draws from; None is the CPU's.
        in_order: upstream draws neither before it has seen the rewards, and trains the steps from the first on.
        best_of: upstream trains some of the rows, which it chooses by their rewards, and then draws their steps.
    """

    def __init__(
        self, base: int, rows: int, steps: int, shuffled: bool = False, device: Device = None, in_order: bool = False,
        best_of: int | None = None,
    ) -> None:  # fmt: skip
        self._base = base
        self._best_of = best_of
        self.rows = draw_rows(rows, device) if shuffled else torch.arange(rows, device=device)
        self.steps = steps_in_order(rows, steps) if in_order else draw_steps(rows, steps, device)
        # None where upstream draws from the device: noise of the rollout comes from the same generator.
        self.generator_state = torch.get_rng_state() if device is None else None
        self._row_answers = 1 if shuffled else 0
        self._step_answers = 0 if in_order else 1

    def for_rows(self, rows: int) -> Tensor | None:
        """The order of the rows, at the first call for as many."""
        if not self._row_answers or rows != len(self.rows):
            return None
        self._row_answers -= 1
        return self.rows.clone()

    @property
    def announced(self) -> tuple[int, int]:
        """For how many rows and steps upstream will ask."""
        return self._best_of or len(self.steps), self.steps.shape[1]

    def for_steps(self, rows: int, steps: int, ids: Tensor | None = None) -> Tensor | None:
        """The order of each row's steps, at the first call for as many; of the rows with these ids only, if given."""
        if not self._step_answers or (rows, steps) != self.announced:
            return None
        self._step_answers -= 1
        return self.steps.clone() if ids is None else self.steps[ids.cpu() - self._base]

    def ids(self) -> dict[str, Tensor] | None:
        """Ids of the samples in the order in which they are trained (`Lean.identity`), once upstream has all of it."""
        if self._row_answers or self._step_answers:
            return None
        return {"lean_row": self.rows.cpu() + self._base, "lean_step": self.steps.cpu()}

    def positions(self, window: int, turns: Sequence[int], batch: int) -> dict[tuple[int, int], int]:
        """The place in the first update's order of consumption, by (row id, step).

        Args:
            window: how many rows the update consumes.
            turns: which of each row's steps, by their places in its order.
            batch: rows per network call of the update, which walks all steps of a batch before the next one.
        """
        found, trained = {}, len(turns)
        rows, steps = self.rows[:window].tolist(), self.steps[:window, list(turns)].tolist()
        for turn, (row, order) in enumerate(zip(rows, steps, strict=True)):
            first = turn // batch * batch  # rows of the batches before
            width = min(batch, len(rows) - first)
            for place, step in enumerate(order):
                found[(self._base + row, step)] = first * trained + place * width + turn - first
        return found


class Orders:
    """The order of the last rollout, and the ids of its samples in that order.

    Args:
        once: says something to the user once.

    Attributes:
        drawer: what draws random numbers in a rollout, if it is known.
    """

    def __init__(self, once: Callable[[str], None]) -> None:
        self._once = once
        self.drawer = ""
        self._order: Order | None = None
        self._ids: dict[str, Tensor] | None = None

    def forget(self) -> None:
        """Nothing is drawn before the next rollout: upstream's draws are its own."""
        self._order = self._ids = None

    def draw(self, base: int, rows: int, steps: int, **how: Any) -> Order:
        """Draws for a rollout; see :class:`Order`."""
        self._order = Order(base, rows, steps, **how)
        self._ids = self._order.ids()
        return self._order

    def of_rows(self, rows: int, device: Device) -> Tensor:
        """See `Lean.row_order`."""
        drawn = self._order.for_rows(rows) if self._order else None
        return draw_rows(rows, device) if drawn is None else drawn.to(device)

    def of_steps(self, rows: int, steps: int, device: Device, ids: Tensor | None = None) -> Tensor:
        """See `Lean.step_order`."""
        order = self._order
        drawn = order.for_steps(rows, steps, ids) if order else None
        if order is None or drawn is None:
            if order is not None and (rows, steps) != order.announced:
                announced = "{} x {}".format(*order.announced)
                self._once(f"upstream trains {rows} x {steps} steps, the rollout announced {announced}")
            drawn = draw_steps(rows, steps, device)
            # Trained in an order that no rollout knew: ids that name nothing.
            self._ids = {"lean_row": torch.full((rows,), -1), "lean_step": drawn.cpu()}
            return drawn
        self._ids = order.ids() or {"lean_row": torch.full((rows,), -1), "lean_step": drawn.cpu()}
        if ids is not None:
            self._ids = {"lean_row": ids.cpu(), "lean_step": drawn.cpu()}
        if order.generator_state is not None and not torch.equal(order.generator_state, torch.get_rng_state()):
            drawer = self.drawer or "something in the rollout (a reward, perhaps)"
            self._once(
                f"{drawer} draws from the CPU generator, so its numbers come in "
                "another order than without the patch: training is as valid, but not equal number for number"
            )
        return drawn.to(device)

    def identity(self, device: Device) -> dict[str, Tensor]:
        """See `Lean.identity`."""
        if self._ids is None:
            what = "identity() before step_order()"
            raise LeanError("LG610", what, "the tree was edited: apply the patch again")
        return {name: ids.to(device) if device is not None else ids.clone() for name, ids in self._ids.items()}
