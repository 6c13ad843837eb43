"""A distance beyond its bound, looked at once more: whether rounding explains it, shown by runs.

Kernels round by the number of rows, and a sum by its order. Where the patched run's calls have other rows than the
native ones, or where DDP averages after each backward and the patched run once per update, bits may differ. Then the
untouched script runs once more, with calls cut like the patched run's and one average per update:

1. If the patched run is within the same bound of that run, it matches: no bound has grown.
2. Otherwise the bound may become `MARGIN` times the distance between the two native runs. In fp32 that is granted only
   if all three runs agree in fp64 up to `EXACT`: a fault is as large there as in fp32, rounding is not. A script that
   casts down by itself has no fp64; two native runs show that, too, and the report says it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from leangrpo_rehearsal.base import Bound
from leangrpo_rehearsal.outcome import Update
from leangrpo_tools.rehearsal import records
from leangrpo_tools.rehearsal.floor import MARGIN
from leangrpo_tools.rehearsal.records import Records
from leangrpo_tools.rehearsal.runs import DOUBLE, Stage
from leangrpo_tools.rehearsal.session import Native

EXACT = 1e-12
"""What gradients and weights of fp64 runs may differ by, as relative L2."""

ROUNDING = {"fp32": 1e-4, "bf16": 1e-1}
"""A distance between two native runs that is larger than this is no rounding, so nothing follows from it."""


@dataclasses.dataclass
class Look:
    """What counts after a second look: two runs to compare, the bound, and what was found."""

    reference: Records
    after: Records
    bound: Bound
    notes: list[str] = dataclasses.field(default_factory=list)
    figures: dict[str, float] = dataclasses.field(default_factory=dict)


def look(
    stage: Stage, native: Native, trees: tuple[Path, Path], after: Records, bound: Bound, say: Callable[[str], None]
) -> Look:
    """What counts for a patched run: as before, unless it is beyond the bound and rounding explains that.

    Args:
        trees: the untouched and the patched one.
    """
    return _Looking(stage, native, trees, Look(native.first, after, bound), say).look()


@dataclasses.dataclass
class _Looking:
    stage: Stage
    native: Native
    trees: tuple[Path, Path]
    found: Look
    say: Callable[[str], None]

    def look(self) -> Look:
        found, config = self.found, self.stage.config
        distances = self._compare(self.native.first, found.after)
        beyond = [update for update in distances if not update.matches(found.bound)]
        if found.bound.bitwise:
            beyond = beyond[:1]  # from there on weights differ, so rollouts do
        if not beyond or not all(update.finite and update.complete and update.rewards_equal for update in beyond):
            return found
        cut, once = self._how()
        if not cut and not once:
            return found
        self.say("native run with calls and averages like the patched run's")
        how: dict[str, Any] = {"shapes": self.stage.out("patched") if cut else None, "once": once}
        alike, failed = self._run("native-alike", self.trees[0], self.native.out, **how)
        if alike is None:
            found.notes.append(f"the untouched script could not be run like that: {failed}")
            return found
        gradients, weights = _widest(self._compare(self.native.first, alike))
        found.figures |= {"native": _widest(distances)[0], "alike": gradients}
        found.notes.append(
            f"run once more like that, the untouched script differs from itself by up to {gradients:.2e} (relative L2)"
        )
        if not gradients <= ROUNDING[config.precision]:
            found.notes.append("that is more than rounding, so nothing follows from it")
            return found
        after = found.after
        if found.bound.bitwise:
            self.say("patched run, each update from native's weights")
            again, failed = self._run("patched-again", self.trees[1], self.native.out)
            if again is None:
                found.notes.append(f"the patched run from native's weights ended badly: {failed}")
                return found
            after = again
        if all(update.matches(found.bound) for update in self._compare(alike, after)):
            found.reference, found.after = alike, after
            found.notes.append("the patched run is compared with that run, and has to be as near as without a cut")
            return found
        widened = Bound(False, max(found.bound.rel_l2, MARGIN * gradients), max(found.bound.weights, MARGIN * weights))
        distances = self._compare(self.native.first, after)
        if not all(update.matches(widened) for update in distances):
            found.notes.append(f"the patched run differs by more than {MARGIN:g} times that")
        elif config.precision != "fp32" or self._same_in_double(cut, once):
            found.after, found.bound = after, widened
            found.notes.append(f"the bound is {MARGIN:g} times that distance")
        return found

    def _how(self) -> tuple[bool, bool]:
        """Whether calls were cut, and whether gradients are averaged less often than natively; with a note if so."""
        config = self.stage.config
        wrapper = " and ".join(
            dict.fromkeys(name for names in records.written(self.native.out, "wrapper") for name in names)
        )
        noted = records.written(self.stage.out("patched"), "shapes")
        cut = any(call is not None for calls in noted for kind in calls.values() for call in kind)
        once = "DDP" in wrapper and config.ranks > 1 and config.schedule != "recompute"
        reasons = ["calls of the patched run have other numbers of rows than native ones"] * cut
        reasons += [f"{wrapper} averages after each backward, the patched run once per update"] * once
        if reasons:
            self.found.notes.append(f"bits may differ here: {'; '.join(reasons)}")
        return cut, once

    def _same_in_double(self, cut: bool, once: bool) -> bool:
        """Whether the runs agree in fp64, or fp64 cannot tell; with a note."""
        found, (untouched, patched_tree) = self.found, self.trees
        self.say("native and patched runs in fp64")
        first, failed = self._run(f"native{DOUBLE}", untouched, None, double=True)
        follow = self.stage.out(f"native{DOUBLE}")
        patched = alike = None
        if first is not None:
            patched, failed = self._run(f"patched{DOUBLE}", patched_tree, follow, double=True, note=True)
        if patched is not None:
            noted = self.stage.out(f"patched{DOUBLE}") if cut else None
            alike, failed = self._run(f"native-alike{DOUBLE}", untouched, follow, double=True, shapes=noted, once=once)
        if first is None or patched is None or alike is None:
            found.notes.append(f"fp64 says nothing here, the script does not run in it: {failed}")
            return True
        casts = max(_widest(self._compare(first, alike)))
        updates = self._compare(first, patched)
        found.figures |= {"fp64_alike": casts, "fp64": max(_widest(updates))}
        if not casts <= EXACT:
            found.notes.append(
                f"fp64 says nothing here: the script casts, and differs from itself by {casts:.2e} in it"
            )
            return True
        if all(update.finite and update.complete for update in updates) and found.figures["fp64"] <= EXACT:
            found.notes.append(
                f"in fp64 patched and untouched script agree up to {found.figures['fp64']:.2e}: rounding"
            )
            return True
        found.notes.append(
            f"in fp64 they differ by {found.figures['fp64']:.2e}, where rounding stays below {EXACT:g}: it is a fault"
        )
        return False

    def _compare(self, reference: Records, other: Records) -> list[Update]:
        across = self.stage.script.across_ranks(self.stage.config)
        found = records.compare(self.stage.server, reference, other, across)
        return [dataclasses.replace(update, beside=[]) for update in found]  # of tensors alone a bound follows

    def _run(self, variant: str, tree: Path, follow: Path | None, **how: Any) -> tuple[Records | None, str]:
        """A run that may fail: its records, or None and why."""
        stage = self.stage
        exits = stage.run(variant, tree, stage.config.updates, follow, **how)
        if any(item.code != 0 for item in exits):
            return None, stage.explain(variant, exits)
        run = records.read(stage.out(variant), stage.config.ranks)
        if len(run.updates) < stage.config.updates:
            return None, f"it made {len(run.updates)} of {stage.config.updates} updates"
        return run, ""


def _widest(updates: Sequence[Update]) -> tuple[float, float]:
    """The largest relative L2 of gradients and of weights; infinite where an update has none."""
    gradients, weights = (
        [value if value == value else float("inf") for value in values]
        for values in ([u.grad_rel_l2 for u in updates], [u.weights_rel_l2 for u in updates])
    )
    return max(gradients), max(weights)
