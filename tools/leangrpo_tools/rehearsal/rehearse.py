"""Rehearses one script in two trees: floor, patched run, negative control, verdict."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from leangrpo_tools.errors import KitError
from leangrpo_tools.rehearsal import compare
from leangrpo_tools.rehearsal.base import SHARDED, Bound, Config, Script
from leangrpo_tools.rehearsal.report import NOT_TESTED, Counts, Report
from leangrpo_tools.rehearsal.runs import TIMEOUT_S, Injection, Stage
from leangrpo_tools.rehearsal.session import Native, Session, native_key

SCRIPTS = "leangrpo_tools.rehearsal.scripts"


def rehearse(
    module: str,
    native: Path,
    patched: Path,
    config: Config,
    *,
    session: Session,
    upstream: str = "",
    inject: Sequence[Injection] = (),
    timeout_s: float = TIMEOUT_S,
    say: Callable[[str], None] = lambda text: None,
) -> Report:
    """Runs `SCRIPT` of a module under `scripts` in both trees and compares. Neither tree is written to.

    `say` is told what happens, for a progress line. Raises LG401 when upstream's own script does not run, LG403 for
    a configuration the script does not have.
    """
    module = module if "." in module else f"{SCRIPTS}.{module}"
    script = _load(module, config)
    say("importing torch and diffusers")
    session.server.preload(script.preload)
    stage = Stage(session.server, script, module, config, session.folder(), inject, timeout_s)
    before = _native(stage, native, session, say)

    say("patched run")
    bound, notes = _bound(script, config, before)
    if not bound.bitwise:
        notes.append("each update of the patched run starts from native's weights, so that rounding does not add up")
    if config.schedule != "recompute":
        notes.append("the patched run's seconds include measuring the bytes of every kept graph")
    exits = stage.run("patched", patched, config.updates, None if bound.bitwise else before.out)
    failures = [] if all(item.code == 0 for item in exits) else [
        f"the patched script ended badly: {stage.explain('patched', exits)}"
    ]  # fmt: skip
    after = compare.Run([], []) if failures else compare.load(stage.out("patched"), config.ranks)
    control: list[compare.Update] = []
    if not failures:
        say("negative control")
        exits = stage.run("control", patched, 1)
        if all(item.code == 0 for item in exits):
            control = compare.compare(before.first, compare.load(stage.out("control"), config.ranks))
        else:
            failures.append(f"the negative control ended badly: {stage.explain('control', exits)}")
    report = _report(stage, upstream, before, after, bound)
    report.control, report.failures, report.notes = control, failures, notes
    return report


def _load(module: str, config: Config) -> Script:
    try:
        script: Script = importlib.import_module(module).SCRIPT
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
        raise KitError("LG403", f"there is no rehearsal {module.rpartition('.')[2]!r}",
                       cause="the recipe names one that the kit lacks", fix="leangrpo list") from error  # fmt: skip
    reason = script.supports(config)
    unknown = [name for name, _ in config.options if name not in script.options]
    if unknown:
        reason = f"unknown option {', '.join(unknown)}; known: {', '.join(script.options) or 'none'}"
    if reason:
        raise KitError("LG403", f"{script.name}: {reason}", cause="this script cannot be rehearsed like that",
                       fix="verify-patch --help")  # fmt: skip
    return script


def _native(stage: Stage, tree: Path, session: Session, say: Callable[[str], None]) -> Native:
    key = native_key(stage.module, tree, stage.config)
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
        runs.append(compare.load(stage.out(variant), stage.config.ranks))
    assert stage.assets is not None
    native = Native(stage.assets, stage.out("native"), *runs)
    if len(native.first.updates) < stage.config.updates:
        raise KitError("LG401", f"could not rehearse: upstream's script made {len(native.first.updates)} updates, not "
                       f"{stage.config.updates}", cause="the rehearsal's command line does not fit this version",
                       fix="run fewer --updates")  # fmt: skip
    if not private:
        session.native[key] = native
    return native


def _report(stage: Stage, upstream: str, before: Native, after: compare.Run, bound: Bound) -> Report:
    config, script = stage.config, stage.script
    windows = stage.windows("patched")
    held = [int(window["peak_held_bytes"]) for rank in windows for window in rank]
    runs = {"native": before.first, "patched": after}
    return Report(
        upstream=upstream,
        script=script.name,
        config=config,
        bound=bound,
        updates=compare.compare(before.first, after),
        floor=compare.compare(before.first, before.again),
        control=[],
        forwards={name: _counts(run) for name, run in runs.items()},
        collectives={
            name: dict(run.summaries[0]["collectives"]) if run.summaries else {} for name, run in runs.items()
        },
        seconds={name: run.seconds for name, run in runs.items()},
        peak_held_bytes=max(held, default=0),
        peak_rss_bytes={
            name: max((int(summary["peak_rss_bytes"]) for summary in run.summaries), default=0)
            for name, run in runs.items()
        },
        windows=windows,
        tested=_tested(script, config),
        not_tested=[*NOT_TESTED, *script.not_tested(config)],
        logs=str(stage.root / "logs"),
    )


def _bound(script: Script, config: Config, native: Native) -> tuple[Bound, list[str]]:
    bound = script.bound(config)
    reduces = native.first.summaries[0]["collectives"].get("reduce_scatter", 0) > 0
    if reduces and not script.synchronised and config.schedule != "recompute":
        # A fork that wraps a network which upstream leaves alone.
        note = "the network is sharded here, which it is not upstream: the bound is that of sharded scripts"
        return Bound(bitwise=False, rel_l2=SHARDED), [note]
    floor = compare.compare(native.first, native.again)
    exact = all(update.grad_bitwise and update.weights_bitwise for update in floor)
    if not bound.bitwise or exact:
        return bound, []
    widest = max(update.grad_rel_l2 for update in floor)
    note = "two native runs differ here, so the bound is twice their distance instead of bitwise"
    return Bound(bitwise=False, rel_l2=max(1e-6, 2 * widest)), [note]


def _counts(run: compare.Run) -> Counts:
    return Counts(*([int(summary[kind]) for summary in run.summaries] for kind in ("grad", "no_grad")))


def _tested(script: Script, config: Config) -> list[str]:
    details: list[Any] = [
        f"{script.path}, {config.ranks} rank{'s' if config.ranks > 1 else ''}, {config.updates} updates, "
        f"{config.updates_per_rollout} per rollout",
        f"{config.generations} generations, {config.steps} steps, fraction {config.fraction:g}",
        "fp32 (autocast off)" if config.precision == "fp32" else "bf16 autocast",
        f"gradient checkpointing {'on' if config.checkpointing else 'off'}, "
        f"EMA {'on (its own weights are not compared)' if config.ema else 'off'}",
        f"schedule {config.schedule}, budget {config.budget_gb}",
        "gradients before clipping, weights after each step, rewards, on every rank",
    ]
    return details
