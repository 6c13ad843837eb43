"""LEANGRPO_LAYOUT and LEANGRPO_UPDATES: upstream's training step, called once for each part of a rollout.

A part (`parts.py`) is one prompt per team of ranks: its rollout, rewards, advantages and its share of the update are
done, and its graphs freed, before the next part. Gradients add up over the parts of an update; upstream's own boundary
block ends it.
"""

import copy
import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import agree
from ..errors import LeanError
from ..run import Run
from ..sync import Wrapper
from ..turns import Turns
from ..values import map_tensors
from .parts import Cut, Part
from .teams import Team


class _Rollout:
    """Where one rollout stands."""

    def __init__(self, cut: Cut, team: Team) -> None:
        self.cut, self.team = cut, team
        self.parts = cut.parts
        self.part: Part = self.parts[0]
        self.trained = 0  # rows of the update that is open
        self.stepped = False  # in this part
        self.waiting: dict[int, list[Any]] = {}  # by update: rows of it, drawn and not yet trained
        self.rewards: list[Tensor] = []  # by part: [ranks, slots]
        self.noise: list[Tensor] = []  # by member
        self.turns: Turns | None = None

    @property
    def last(self) -> bool:
        return self.part is self.parts[-1]

    def in_native_order(self) -> Tensor:
        """Rewards of all ranks as upstream gathers them: by rank, prompt, generation."""
        cut, (ranks, slots) = self.cut, self.rewards[0].shape
        found = self.rewards[0].new_empty(ranks, cut.prompts, cut.group)
        for part, rewards in zip(self.parts, self.rewards, strict=True):
            by_generation = rewards.view(ranks // cut.team, cut.team, slots).transpose(1, 2).reshape(-1, cut.group)
            found[part.owner :: cut.team, part.slot] = by_generation
        return found.reshape(-1)


class Layout:
    """What a patched tree calls. Where both settings are upstream's, each call does what upstream's own text did."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._rollout: _Rollout | None = None
        self._team: Team | None = None

    # -- around the training step ---------------------------------------------------------------------------------

    def train(
        self, step: Callable[..., Any], prompts: Sequence[str], group: tuple[Any, str] | None, update: int, /,
        *args: Any, **kwargs: Any,
    ) -> Any:  # fmt: skip
        """`step(*args, **kwargs)`: a rollout and its updates, in one call or one for each part.

        Args:
            step: upstream's function; returns its loss and its gradient norm.
            prompts: names of its parameters that bring the prompts: tensors and lists with an entry for each, or an
                iterator over tuples of such. None of them if it reads more than that, and cannot be called in parts.
            group: the object, among the arguments, and its attribute that holds the number of generations per prompt;
                None if advantages are not made per prompt.
            update: rows per rank and optimizer update.

        Returns:
            The losses' sum and the last norm.

        Raises:
            LeanError: LG613 where the settings cannot be followed, with the numbers that would do.
        """
        chosen = self._run.settings
        if chosen.layout == "native" and chosen.updates == "faithful":
            return step(*args, **kwargs)
        if not prompts:
            self.require(batches=False)
        if group is None:
            what = f"LEANGRPO_LAYOUT={chosen.layout} LEANGRPO_UPDATES={chosen.updates} with advantages over all samples"
            raise LeanError("LG613", what, "make advantages per prompt (DanceGRPO's --use_group), or unset them")
        bound = inspect.signature(step).bind(*args, **kwargs)
        fed = {name: bound.arguments[name] for name in prompts}
        batch = {name: next(value) if hasattr(value, "__next__") else value for name, value in fed.items()}
        holder, attribute = group
        cut = self._cut(_count(batch), getattr(holder, attribute), update)
        assert self._team is not None
        everyones = self._team.everyones(batch)
        # Of the object with upstream's settings, a copy with this rank's share of the generations.
        ours = copy.copy(holder)
        setattr(ours, attribute, cut.slots)
        rollout = self._rollout = _Rollout(cut, self._team)
        results = []
        try:
            for part in rollout.parts:
                rollout.part, rollout.stepped = part, False
                given = {name: ours if value is holder else value for name, value in bound.arguments.items()}
                for name, value in fed.items():
                    one = _prompt(everyones[part.owner][name], part.slot, cut.prompts)
                    given[name] = iter([one]) if hasattr(value, "__next__") else one
                called = inspect.BoundArguments(bound.signature, given)  # type: ignore[arg-type]
                results.append(step(*called.args, **called.kwargs))
        finally:
            self._rollout = None
        return sum(loss for loss, _ in results), next((n for _, n in reversed(results) if not math.isnan(n)), math.nan)

    def _cut(self, prompts: int, group: int, update: int) -> Cut:
        chosen = self._run.settings
        shared = chosen.layout == "shared"
        sizes = agree.everyones((prompts, group, update)) if agree.world_size() > 1 else []
        if any(other != sizes[0] for other in sizes):
            raise LeanError("LG613", f"ranks have other numbers of prompts: {sizes}", "set LEANGRPO_LAYOUT=native")
        cut = Cut(prompts, group, update, agree.world_size(), shared, chosen.updates == "on-policy")
        if self._team is None or self._team.size != cut.team:
            self._team = Team(cut.team)
            how = f"{cut.team} ranks share a prompt, {cut.slots} samples each" if shared else "prompts by rank"
            self._run.report.say(f"layout: {how}; {len(cut.parts)} parts per rollout, {cut.updates} updates")
            if cut.on_policy:
                what = "each update's samples are drawn by the policy as it is then"
                self._run.report.say(f"LEANGRPO_UPDATES=on-policy changes the algorithm: {what}")
        return cut

    # -- inside the training step ---------------------------------------------------------------------------------

    def zero_grad(self, optimizer: Any) -> None:
        """In place of `optimizer.zero_grad()`: not in the middle of an update."""
        if self._rollout is None or not self._rollout.trained:
            optimizer.zero_grad()

    def initial_noise(self, noise: Tensor, same: bool) -> Tensor:
        """The latent a sample starts from; where all of a rank have the `same`, that of the prompt's own rank."""
        rollout = self._rollout
        if rollout is None or not same:
            return noise
        if not rollout.noise:
            rollout.noise = rollout.team.everyones(noise)
        return rollout.noise[rollout.part.owner].clone()

    def all_rewards(self, gather: Callable[[Tensor], Tensor], rewards: Tensor) -> Tensor:
        """`gather(rewards)`: those of all ranks; in the last part of a rollout those of the whole rollout."""
        gathered, rollout = gather(rewards), self._rollout
        if rollout is None:
            return gathered
        rollout.rewards.append(gathered.view(agree.world_size(), -1))
        return rollout.in_native_order() if rollout.last else gathered

    def reports(self, wanted: bool) -> bool:
        """Whether statistics of the rollout are written now: once per rollout."""
        return wanted and (self._rollout is None or self._rollout.last)

    def group(self, rewards: Tensor) -> Tensor:
        """Rewards of the whole prompt group, by generation, that these are this rank's share of: [M]."""
        rollout = self._rollout
        if rollout is None:
            return rewards
        team = rollout.team
        shares = rollout.rewards[-1][team.first : team.first + team.size]
        if not torch.equal(shares[team.member], rewards):
            what = "rewards of a group are not those that were gathered"
            raise LeanError("LG610", what, "the tree was edited: apply the patch again, or LEANGRPO_LAYOUT=native")
        return shares.T.reshape(-1)

    def rows(self, samples: Sequence[Any]) -> Any:
        """In place of `list(enumerate(samples))`: the rows to train now."""
        return list(enumerate(samples)) if self._rollout is None else self._rows(self._rollout, samples)

    def _rows(self, rollout: _Rollout, samples: Sequence[Any]) -> Iterator[tuple[int, Any]]:
        cut, part = rollout.cut, rollout.part
        first = cut.first(part)
        for slot, sample in enumerate(samples):
            if slot < first:
                rollout.trained += 1
                yield slot, sample
            else:
                rollout.waiting.setdefault(cut.update_of(part, slot), []).append((slot, sample))
        if rollout.trained:
            self._run.carry_over()  # walks the graphs of this part
        if rollout.last:
            for update in sorted(rollout.waiting):
                for slot, sample in rollout.waiting.pop(update):
                    rollout.trained += 1
                    yield slot, sample

    def ends_update(self, row: int, update: int) -> bool:
        """In place of `(row + 1) % update == 0`: the optimizer is to step after this row."""
        rollout = self._rollout
        if rollout is None:
            return (row + 1) % update == 0
        if rollout.trained < update:
            return False
        rollout.trained, rollout.stepped = 0, True
        return True

    def norm(self, value: Callable[[], float]) -> float:
        """In place of `value()`, the norm of an update's gradient: NaN in a part in which none ended."""
        return value() if self._rollout is None or self._rollout.stepped else math.nan

    # -- for the runtime ------------------------------------------------------------------------------------------

    @property
    def continues(self) -> bool:
        """Whether the next rollout belongs to an earlier one's update."""
        return self._rollout is not None and self._rollout.part is not self._rollout.parts[0]

    @property
    def team(self) -> int:
        """How many ranks share a prompt now."""
        return 1 if self._rollout is None else self._rollout.cut.team

    def require(self, batches: bool) -> None:
        """Raises LG613 in a rollout outside of :meth:`train` for settings that cannot be followed there.

        Args:
            batches: of a trainer that samples prompts in batches spread over the ranks.
        """
        chosen = self._run.settings
        if self._rollout is not None or (chosen.layout == "native" and chosen.updates == "faithful"):
            return
        spread = "; its sampler spreads each prompt's samples over the ranks already" if batches else ""
        found = (("LAYOUT", chosen.layout, "native"), ("UPDATES", chosen.updates, "faithful"))
        given = [(f"LEANGRPO_{name}", value) for name, value, usual in found if value != usual]
        what = f"{' '.join('='.join(item) for item in given)}: this script's rollout cannot be cut by prompt{spread}"
        fix = f"unset {' '.join(name for name, _ in given)}; `leangrpo support` names the scripts with shared prompts"
        raise LeanError("LG613", what, fix)

    def window(self, rows: int) -> int:
        """How many leading rows of a rollout the first update trains, of which upstream says `rows`."""
        return rows if self._rollout is None else self._rollout.cut.first(self._rollout.part)

    def turns(self, trained: int, by_group: bool) -> Turns | None:
        """The policy calls of all parts of a rollout, counted as one; None without parts."""
        rollout = self._rollout
        if rollout is None:
            return None
        if rollout.turns is None:
            first = max(map(rollout.cut.first, rollout.parts))
            rollout.turns = Turns(trained, 1, rollout.cut.update, first, by_group)
        return rollout.turns

    def check(self, wrapper: Wrapper) -> None:
        """Raises LG613 where ranks would share prompts but not gradients."""
        alone = wrapper.kind == "none" and self._run.settings.sync == "upstream"
        if alone and self._rollout is not None and self._rollout.cut.team > 1:
            raise LeanError(
                "LG613",
                "LEANGRPO_LAYOUT=shared, but no gradient is shared between ranks: each would train parts of prompts",
                "set LEANGRPO_SYNC=late, which averages gradients, or LEANGRPO_LAYOUT=native",
            )


def _count(batch: dict[str, Any]) -> int:
    """How many prompts a batch holds."""
    sizes: list[int] = []

    def note(tensor: Tensor) -> Tensor:
        sizes.append(tensor.shape[0] if tensor.dim() else 0)
        return tensor

    map_tensors(batch, note)
    if not sizes or set(sizes) != {sizes[0]}:
        raise LeanError("LG613", f"prompts come in tensors of {sizes} entries", "set LEANGRPO_LAYOUT=native")
    return sizes[0]


def _prompt(value: Any, slot: int, prompts: int) -> Any:
    """Prompt number `slot` of what brings `prompts` of them, as a batch of one."""
    if isinstance(value, Tensor):
        return value[slot : slot + 1]
    if isinstance(value, str) and prompts == 1:
        return value
    if isinstance(value, (list, tuple)) and all(isinstance(item, str) for item in value) and len(value) >= prompts:
        return value[slot : slot + 1]
    if isinstance(value, (list, tuple)):
        return type(value)(_prompt(item, slot, prompts) for item in value)
    if value is None:
        return value
    raise LeanError("LG613", f"a {type(value).__name__} cannot be cut into prompts", "set LEANGRPO_LAYOUT=native")
