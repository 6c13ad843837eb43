"""The untouched script's runs, how far they are apart by themselves, and the bound that follows."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

from leangrpo_rehearsal.base import Bound
from leangrpo_tools.errors import KitError
from leangrpo_tools.rehearsal import records
from leangrpo_tools.rehearsal.runs import Stage
from leangrpo_tools.rehearsal.session import Native, Session, native_key

MARGIN = 3.0
"""The bound where regrouped native runs differ, as a multiple of their distance."""


def native_runs(stage: Stage, tree: Path, session: Session, say: Callable[[str], None]) -> Native:
    """Two runs of the unpatched tree, or those that an earlier rehearsal of the session made. LG401 if they fail."""
    key = native_key(stage.module, tree, stage.config, stage.script.stand_ins(stage.config))
    known = session.native.get(key)
    # Injections into native runs are rare, and their results belong to nobody else.
    private = any(not {"native", "native-again"}.isdisjoint(item.variants) for item in stage.injections)
    if known is not None and not private:
        stage.assets = known.assets
        return known
    say("tiny checkpoints and data")
    stage.prepare()
    runs = []
    for variant in ("native", "native-again"):
        say(f"{variant.replace('-', ' ')} run")
        stage.require(variant, stage.run(variant, tree, stage.config.updates))
        runs.append(records.read(stage.out(variant), stage.config.ranks))
    assert stage.assets is not None
    native = Native(stage.assets, stage.out("native"), *runs)
    if len(native.first.updates) < stage.config.updates:
        trained = any(summary["grad"] for summary in native.first.summaries)
        cause, fix = "the rehearsal's command line does not fit this version", "run fewer --updates"
        if trained and not native.first.updates:
            cause = "the network was trained, and no optimizer of torch's kind stepped: its steps cannot be followed"
            fix = "rehearse with an optimizer that is a torch.optim.Optimizer"
        raise KitError("LG401", f"could not rehearse: upstream's script made {len(native.first.updates)} updates, not "
                       f"{stage.config.updates}", cause=cause, fix=fix)  # fmt: skip
    if not private:
        session.native[key] = native
    return native


def bound(stage: Stage, native: Native, tree: Path, say: Callable[[str], None]) -> tuple[Bound, list[str]]:
    """What counts as a match, and a note where that is not what the script alone says."""
    script, config = stage.script, stage.config
    plain = script.bound_for_schedule(config)
    floor = records.compare(stage.server, native.first, native.again)
    exact = all(update.grad_bitwise and update.weights_bitwise for update in floor)
    if plain.bitwise and not exact:
        widest = max(update.grad_rel_l2 for update in floor)
        note = "two native runs differ here, so the bound is twice their distance instead of bitwise"
        return Bound(bitwise=False, rel_l2=max(1e-6, 2 * widest)), [note]
    if plain.bitwise or script.regrouped(config) is None:
        return plain, []
    return _regrouped(stage, native, tree, plain, say)


def _regrouped(
    stage: Stage, native: Native, tree: Path, plain: Bound, say: Callable[[str], None]
) -> tuple[Bound, list[str]]:
    found = stage.script.regrouped(stage.config)
    assert found is not None
    config, how = found
    if native.regrouped is None:
        say("native run in other batches")
        other, variant = dataclasses.replace(stage, config=config), "native-regrouped"
        other.require(variant, other.run(variant, tree, config.updates, follow=native.out))
        native.regrouped = records.read(other.out(variant), config.ranks)
    distances = records.compare(stage.server, native.first, native.regrouped)
    gradients = max(update.grad_rel_l2 for update in distances)
    weights = max(update.weights_rel_l2 for update in distances)
    note = (
        f"two native runs that train the same samples {how} differ by up to {gradients:.2e} (relative L2); "
        f"the bound is {MARGIN:g} times that"
    )
    widened = Bound(False, max(plain.rel_l2, MARGIN * gradients), max(plain.weights, MARGIN * weights))
    return widened, [note] if widened != plain else []
