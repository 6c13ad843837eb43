"""Rehearses one script in two trees: floor, patched run, negative control, verdict."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from leangrpo_rehearsal.base import Bound, Branch, Config, Script
from leangrpo_rehearsal.beside import decided, moved, repeated
from leangrpo_rehearsal.outcome import Update
from leangrpo_tools.errors import KitError
from leangrpo_tools.rehearsal import floor, records, secondlook
from leangrpo_tools.rehearsal.records import Records
from leangrpo_tools.rehearsal.report import NOT_TESTED, Counts, Report
from leangrpo_tools.rehearsal.runs import TIMEOUT_S, Injection, Stage
from leangrpo_tools.rehearsal.session import Native, Session

SCRIPTS = "leangrpo_rehearsal.scripts"


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
    file: str = "",
    thorough: bool = False,
    control: bool = True,
) -> Report:
    """Runs `SCRIPT` of a module under `scripts` in both trees and compares. Neither tree is written to.

    `say` is told what happens, for a progress line. `file` is the script's own name in the user's tree. `thorough`
    rehearses the script's other branches, too; without `control` no negative control is run. Raises LG401
    when upstream's own script does not run, LG403 for a configuration the script does not have.
    """
    module = full_name(module)
    script = find_script(module)
    check(script, config)
    reason = script.incomparable(config)
    if reason:
        raise KitError("LG403", f"{script.name}: {reason}", cause="both trees must train the same samples",
                       fix="bench-patch times it; see verify-patch --help")  # fmt: skip
    say("importing torch and diffusers")
    session.server.preload(script.preload)
    stage = Stage(session.server, script, module, config, session.folder(), inject, timeout_s)
    before = floor.native_runs(stage, native, session, say)

    bound, notes = floor.bound(stage, before, native, say)
    say("patched run")
    if not bound.bitwise:
        notes.append("each update of the patched run starts from native's weights, so that rounding does not add up")
    notes += script.notes(config)
    if script.nothing_to_replay(config):
        notes.append(f"nothing is to be replayed: {script.nothing_to_replay(config)}")
    averaged = script.averaged(config) and not before.first.summaries[0]["collectives"].get("reduce_scatter")
    if averaged:
        notes.append(
            "upstream shares no gradient between ranks: the native runs average them before clipping, by a stand-in"
        )
    if config.schedule != "recompute":
        notes.append("the patched run's seconds include measuring the bytes of every kept graph")
    exits = stage.run("patched", patched, config.updates, None if bound.bitwise else before.out, note=True)
    stage.sound("patched", exits)
    failures = [] if all(item.code == 0 for item in exits) else [
        f"the patched script ended badly: {stage.explain('patched', exits)}"
    ]  # fmt: skip
    after = Records(stage.out("patched"), [], []) if failures else records.read(stage.out("patched"), config.ranks)
    looked = secondlook.Look(before.first, after, bound)
    if not failures:
        looked = secondlook.look(stage, before, (native, patched), after, bound, say)
        after, bound = looked.after, looked.bound
        notes += looked.notes
    flipped: list[Update] = []
    if not failures and control:
        say("negative control")
        exits = stage.run("control", patched, 1)
        if all(item.code == 0 for item in exits):
            found = records.read(stage.out("control"), config.ranks)
            flipped = records.compare(stage.server, before.first, found, script.across_ranks(config))
        else:
            failures.append(f"the negative control ended badly: {stage.explain('control', exits)}")
    report = _report(stage, upstream, before, after, bound)
    report.updates = records.compare(stage.server, looked.reference, after, script.across_ranks(config))
    unsteady = {item.name for update in report.floor for item in update.beside}
    for update in report.updates:
        update.beside = [item for item in update.beside if script.logs_alike(config) and item.name not in unsteady]
    report.tested = _tested(script, config, file)
    replaced = sorted({name for names in records.written(before.out, "stand_ins") for name in names})
    if replaced:
        notes.append(f"bitsandbytes needs a GPU: torch's own optimizer took the place of {', '.join(replaced)}")
        report.not_tested.append(f"{', '.join(replaced)} of bitsandbytes: its rounding and its state")
    report.control, report.failures, report.notes, report.controlled = flipped, failures, notes, control
    report.second_look = looked.figures
    if (averaged or (script.replicated and config.ranks > 1)) and not failures:
        report.replicas = records.replicas(stage.server, after)
    done = []
    for branch in script.branches(config) if thorough else ():
        other = branch.of(script, config)
        if other is None:
            continue
        done.append(branch.words)
        try:
            further = rehearse(
                module, native, patched, other, session=session, upstream=upstream, inject=inject,
                timeout_s=timeout_s, file=file, control=False, say=partial(_say, say, branch.words),
            )  # fmt: skip
        except KitError as error:  # the verdict on the rest is not lost
            report.not_tested.append(f"{branch.words}: could not be rehearsed ({error.code}: {error.what})")
        else:
            report.further.append((branch.words, further))
    report.not_tested += _branches(script, config, done)
    return report


def _say(say: Callable[[str], None], words: str, text: str) -> None:
    say(f"{words}: {text}")


def _branches(script: Script, config: Config, done: Sequence[str]) -> list[str]:
    """What the script has and this command line does not enter, in words."""
    left = [branch for branch in script.branches(config) if branch.words not in done]
    if config.ranks == 1:
        left.append(Branch("what ranks exchange: sums and means over them (--ranks 2)"))
    thorough = [branch.words for branch in left if branch.of(script, config) is not None]
    others = [branch.words for branch in left if branch.words not in thorough]
    kinds = (("branches that --thorough rehearses", thorough), ("branches not entered", others))
    return [f"{kind}: {', '.join(words)}" for kind, words in kinds if words]


def find_script(module: str) -> Script:
    """The rehearsal that a recipe names. Raises LG403 if there is none."""
    module = full_name(module)
    try:
        return importlib.import_module(module).SCRIPT
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
        raise KitError("LG403", f"there is no rehearsal {module.rpartition('.')[2]!r}",
                       cause="the recipe names one that the kit lacks", fix="leangrpo list") from error  # fmt: skip


def configured(module: str, chosen: dict[str, Any]) -> Config:
    """The configuration of a script's rehearsal. Raises LG403 for one that it does not have."""
    script = find_script(module)
    config = script.configure(**chosen)
    check(script, config)
    return config


def full_name(module: str) -> str:
    """A recipe gives the last part only."""
    return module if "." in module else f"{SCRIPTS}.{module}"


def check(script: Script, config: Config) -> None:
    """Raises LG403 for what this script cannot be rehearsed with."""
    reason = script.supports(config)
    unknown = [name for name, _ in config.options if name not in script.options]
    if unknown:
        reason = f"unknown option {', '.join(unknown)}; this script has {', '.join(script.options) or 'none'}"
    if reason:
        raise KitError("LG403", f"{script.name}: {reason}", cause="this script cannot be rehearsed like that",
                       fix="choose other options; README says what each stands for")  # fmt: skip


def _report(stage: Stage, upstream: str, before: Native, after: Records, bound: Bound) -> Report:
    config, script = stage.config, stage.script
    windows = stage.windows("patched")
    held = [int(window["peak_held_bytes"]) for rank in windows for window in rank]
    runs = {"native": before.first, "patched": after}
    between = records.compare(stage.server, before.first, before.again)
    told = [ranks[0].get("told", {}) for ranks in before.first.updates]
    clipping, ends = decided(told), [end["told"] for end in records.written(before.out, "end")[:1]]
    still = config.ema and not moved([*told, *ends])
    return Report(
        upstream=upstream,
        script=script.name,
        config=config,
        bound=bound,
        updates=[],
        floor=between,
        repeated=repeated(before.first.updates, after.updates, script.updates_per_native_rollout(config)),
        known_reasons=script.known_reasons(config),
        clipping=clipping,
        control=[],
        forwards={name: _counts(run) for name, run in runs.items()},
        collectives={
            name: dict(run.summaries[0]["collectives"]) if run.summaries else {} for name, run in runs.items()
        },
        seconds={name: run.seconds for name, run in runs.items()},
        peak_held_bytes=max(held, default=0),
        gradients=max((float(window.get("gradients", 0)) for rank in windows for window in rank), default=0.0),
        gradient_bytes=max((int(window.get("gradient_bytes", 0)) for rank in windows for window in rank), default=0),
        peak_rss_bytes={
            name: max((int(summary["peak_rss_bytes"]) for summary in run.summaries), default=0)
            for name, run in runs.items()
        },
        windows=windows,
        nothing_to_replay=script.nothing_to_replay(config),
        not_tested=[*NOT_TESTED, *_undecided(clipping), *[STILL] * still, *script.not_tested(config)],
        logs=str(stage.root / "logs"),
    )


def _undecided(clipping: tuple[int, int]) -> list[str]:
    """What a script's clipping never did in this rehearsal: a fault in it would go unnoticed."""
    what = ("a clip range that holds back some ratios and not others", "a gradient norm that is cut")
    return [words for words, updates in zip(what, clipping, strict=True) if not updates]


STILL = "EMA: no average of the weights was seen to move"
COMPARED = (
    "gradients before clipping, weights after each step, rewards, learning rates and schedulers, gradient norms, clip "
    "ranges, logged numbers, {averages}autocast regions, on every rank"
)
BUFFERED = {"sample": "sample", "affine": "prompt group"}


def _counts(run: Records) -> Counts:
    return Counts(*([int(summary[kind]) for summary in run.summaries] for kind in ("grad", "no_grad")))


def _tested(script: Script, config: Config, file: str) -> list[str]:
    buffers = f" with a buffer per {BUFFERED[config.buffers]}" if config.schedule == "reweight" else ""
    details: list[Any] = [
        f"{file or script.path}, {config.ranks} rank{'s' if config.ranks > 1 else ''}, {config.updates} updates, "
        f"{config.updates_per_rollout} per rollout",
        f"{config.generations} generations, {config.steps} steps, fraction {config.fraction:g}",
        "fp32 (autocast off)" if config.precision == "fp32" else "bf16 autocast",
        f"gradient checkpointing {'on' if script.checkpoints(config) else 'off'}, EMA {'on' if config.ema else 'off'}",
        f"schedule {config.schedule}{buffers}, sync {config.sync}, budget {config.budget_gb}",
        *([", ".join(f"{name} {value}" for name, value in config.options)] if config.options else []),
        COMPARED.format(averages="averaged weights, " if config.ema else ""),
    ]
    return details
