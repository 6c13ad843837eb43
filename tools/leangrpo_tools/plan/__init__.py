"""`leangrpo plan`: what a launch file or preset would gain, from its text alone, before anything is patched or run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from leangrpo_tools import lock, recipe
from leangrpo_tools.errors import KitError
from leangrpo_tools.plan import facts, frompreset, launch, options
from leangrpo_tools.plan.cost import Rollout, backward_cost
from leangrpo_tools.plan.memory import Memory
from leangrpo_tools.plan.report import Change, PlanReport

__all__ = ["PlanReport", "plan"]


def plan(
    name: str,
    launch_file: Path | None = None,
    ranks: int | None = None,
    gpu_gb: float = 80.0,
    other_gb: float = 0.0,
    *,
    preset: str | None = None,
    script: str | None = None,
    overrides: Sequence[str] = (),
) -> PlanReport:
    """Read upstream's launch file, or a preset of its config, and predict what the patch changes.

    Args:
        name: the upstream, in any case.
        launch_file: upstream's own launch script. It is read, never run.
        ranks: world size, where the file leaves it open, or to ask about another one.
        gpu_gb: memory of a GPU, in gigabytes (1e9 bytes).
        other_gb: what else stays on each GPU: VAE, text encoders, reward model.
        preset: `NAME`, or `FILE:NAME`, of the Python config that the upstream keeps its settings in, with or instead of
            a launch file; such a config is read as text, too.
        script: the script that trains it, where the preset is not one of upstream's.
        overrides: `ENTRY=VALUE` for entries of the preset.

    Raises:
        KitError: LG102 unknown upstream; LG501, LG502 the launch file; LG503 ranks not known; LG504 a flag's value;
            LG505 no update would ever be made, or upstream stops; LG506 not plannable; LG508, LG509 the preset.
    """
    upstream = lock.load().find(name)
    known = facts.load(upstream)
    if known.config is not None:
        asked = frompreset.Asked(launch_file, preset, script, list(overrides), ranks, gpu_gb, other_gb)
        return frompreset.plan(upstream, known, known.config, asked)
    if launch_file is None or preset or script or overrides:
        what = f"{upstream} keeps its settings in launch files, not in presets"
        raise KitError("LG501", what, fix="give --launch FILE, without --preset, --script and --set")
    return _from_flags(upstream, known, launch_file, ranks, (gpu_gb, other_gb))


def _from_flags(
    upstream: str, known: facts.Facts, launch_file: Path, ranks: int | None, gigabytes: tuple[float, float]
) -> PlanReport:
    training = launch.find_training(launch_file, {name: script.program for name, script in known.scripts.items()})
    script = known.scripts[training.script]
    if script.unreadable:
        what = f"{upstream} {training.script} cannot be planned from a launch file: {script.unreadable}"
        raise KitError("LG506", what, fix="plan one of the other scripts")
    if ranks is not None and ranks < 1:
        raise KitError("LG503", f"--ranks is {ranks}", fix="give the number of processes, 1 or more")
    world = ranks or launch.ranks(training)
    source = options.find_program(launch_file, script.program)
    declared = options.read_options(source.read_text(encoding="utf-8", errors="replace")) if source else None
    values = launch.FlagValues(training, declared, known.defaults)
    size, checkpointed = _size(script, known.flags_of(script), values)
    return PlanReport(
        upstream=upstream,
        script=training.script,
        launch=str(launch_file),
        line=training.line,
        patched=training.script in recipe.scripts_of(upstream),
        ranks=world,
        rollout=size,
        training=script.training,
        checkpointed=checkpointed,
        memory=_memory(script, known.flags_of(script), values, world, checkpointed, gigabytes),
        leftover=script.leftover,
        defaults=values.defaulted,
        defaults_from=str(source) if declared is not None else "the kit's table for the pinned commit",
        notes=_notes(script, training, values),
        changes=_changes(known.flags_of(script), size, script, checkpointed),
    )


def _size(script: facts.ScriptFacts, flags: facts.Flags, values: launch.FlagValues) -> tuple[Rollout, float]:
    """The rollout's size and the share of checkpointed blocks. Raises LG504, LG505."""
    prompts = values.whole(flags.prompts)
    grouped = flags.grouped is None or values.switch(flags.grouped)
    generations = values.whole(flags.generations) if grouped else 1
    samples = prompts * generations
    trained = min(values.whole(flags.selected), samples) if flags.selected else samples
    steps, fraction = values.whole(flags.steps), values.number(flags.fraction)
    trained_steps = int((steps - 1) * fraction)
    accumulation = values.whole(flags.accumulation)
    share = 1.0 if script.always_checkpointed or values.switch(flags.checkpointing) else 0.0
    if share and flags.checkpointed_share:
        share = min(max(values.number(flags.checkpointed_share), 0.0), 1.0)
    if not 0 < fraction <= 1 or trained_steps < 1:
        what = f"--{flags.fraction} {fraction:g} of {steps - 1} steps trains {trained_steps} steps"
        raise KitError("LG505", what, fix=f"use at least 2 steps and a --{flags.fraction} above 0, at most 1")
    if accumulation > trained:
        what = f"--{flags.accumulation} {accumulation} exceeds the {trained} samples of a rollout: no update is made"
        raise KitError("LG505", what, fix=f"use --{flags.accumulation} {trained} or less")
    if trained % accumulation and script.leftover == "refused":
        what = f"--{flags.accumulation} {accumulation} does not divide the {trained} samples of a rollout"
        raise KitError("LG505", what, cause="upstream refuses to start so", fix=f"use a divisor of {trained}")
    cost = backward_cost(script.training, share)
    return Rollout(samples, trained, steps, trained_steps, accumulation, cost, script.no_replay is None), share


def _memory(
    script: facts.ScriptFacts,
    flags: facts.Flags,
    values: launch.FlagValues,
    ranks: int,
    checkpointed: float,
    gigabytes: tuple[float, float],
) -> Memory | None:
    """Bytes by formula, where the model's sizes are known and every block is checkpointed."""
    if script.model is None or checkpointed < 1 or not flags.height or not flags.width:
        return None
    try:
        pixels = float(values.whole(flags.height) * values.whole(flags.width))
    except KitError:  # computed by the launch file, say: the rest of the plan stands without it
        return None
    gpu, other = (1e9 * number for number in gigabytes)
    return Memory(script.model, script.trained_parameters or script.model.parameters, ranks, pixels, gpu, other)


def _notes(script: facts.ScriptFacts, training: launch.Training, values: launch.FlagValues) -> list[str]:
    notes = [*training.notes, *script.notes]
    if script.no_replay:
        notes.append(f"nothing can be replayed: {script.no_replay}")
    if values.unresolved:
        notes.append(f"flags hidden in {', '.join(values.unresolved)} are not known and not counted")
    return notes


def _changes(flags: facts.Flags, size: Rollout, script: facts.ScriptFacts, checkpointed: float) -> list[Change]:
    """Upstream's flags that would change the ratio."""
    if not size.replayable:
        return []
    changes = []
    if size.accumulation != size.trained:
        meaning = (
            f"one update per rollout instead of {size.updates}, so all of it is free of recomputation and "
            f"{size.trained * size.trained_steps} graphs are held. This changes training: fewer and larger updates"
        )
        ratio = size.with_accumulation(size.trained).ratio
        changes.append(Change(f"--{flags.accumulation} {size.trained}", meaning, ratio))
    if checkpointed and flags.checkpointing and not script.always_checkpointed:
        meaning = "the same numbers and a cheaper backward, but every graph held keeps all its activations"
        ratio = size.with_backward(backward_cost(script.training, 0.0)).ratio
        changes.append(Change(f"without --{flags.checkpointing}", meaning, ratio))
    return changes
