"""The plan of an upstream that takes its settings from the flags of a launch file."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from pathlib import Path

from leangrpo_tools import recipe
from leangrpo_tools.errors import KitError
from leangrpo_tools.plan import accelerate, families, launch, options
from leangrpo_tools.plan.asked import Asked, Machine
from leangrpo_tools.plan.choice import LOW_PRECISION, Case
from leangrpo_tools.plan.cost import Rollout, backward_cost
from leangrpo_tools.plan.facts import Facts, Flags, Offers, ScriptFacts
from leangrpo_tools.plan.memory import Memory
from leangrpo_tools.plan.networks import Model
from leangrpo_tools.plan.predict import predict
from leangrpo_tools.plan.report import Change, PlanReport
from leangrpo_tools.plan.traffic import Wire


@dataclass(frozen=True)
class _Read:
    """A launch file as it was read."""

    script: ScriptFacts
    flags: Flags
    values: launch.FlagValues
    ranks: int
    machine: Machine


def plan(upstream: str, known: Facts, launch_file: Path, asked: Asked) -> PlanReport:
    """Read the launch file and predict what the patch changes. Raises as `leangrpo_tools.plan.plan`."""
    programs = {name: script.program for name, script in known.scripts.items()}
    training = launch.find_training(launch_file, programs, asked.script)
    script = known.scripts[training.script]
    if script.unreadable:
        what = f"{upstream} {training.script} cannot be planned from a launch file"
        fix = "leangrpo list says what its updates per rollout are; plan reads the other scripts' launch files"
        raise KitError("LG506", what, cause=script.unreadable, fix=fix)
    if asked.ranks is not None and asked.ranks < 1:
        raise KitError("LG503", f"--ranks is {asked.ranks}", fix="give the number of processes, 1 or more")
    source = options.find_program(launch_file, training.program)
    root = options.root_of(source, training.program)
    started = accelerate.read(training.before, root, Path.cwd(), launch_file.parent)
    world = asked.ranks or launch.ranks(training, started.processes if started else None)
    declared = options.read_options(launch.text_of(source)) if source else None
    values = launch.FlagValues(training, declared, known.defaults)
    read = _Read(script, known.flags_of(script), values, world, asked.machine)
    size, checkpointed = _size(read)
    size = asked.machine.measured(size)
    memory = _memory(read, checkpointed)
    case = _case(known, read, size)
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
        memory=memory,
        table=predict(case, memory, asked.machine.speeds, Wire(script.gathered_bytes, script.reduced_bytes)),
        speeds=asked.machine.speeds,
        leftover=script.leftover,
        defaults=values.defaulted,
        defaults_from=str(source) if declared is not None else "the kit's table for the pinned commit",
        notes=_notes(script, training, values, started),
        changes=_changes(read, size, checkpointed),
    )


def _size(read: _Read) -> tuple[Rollout, float]:
    """The rollout's size and the share of checkpointed blocks. Raises LG504, LG505."""
    script, flags, values = read.script, read.flags, read.values
    prompts = values.whole(flags.prompts)
    generations = values.whole(flags.generations) if _grouped(read) else 1
    samples = prompts * generations
    trained = min(values.whole(flags.selected), samples) if flags.selected else samples
    steps, fraction = values.whole(flags.steps), values.number(flags.fraction)
    trained_steps = int((steps - 1) * fraction)
    if flags.window and flags.windowed and values.holds(flags.windowed):
        trained_steps = values.whole(flags.window)
    accumulation = values.whole(flags.accumulation)
    share = 1.0 if script.always_checkpointed or values.switch(flags.checkpointing) else 0.0
    if share and flags.checkpointed_share:
        share = min(max(values.number(flags.checkpointed_share), 0.0), 1.0)
    if not 0 < fraction <= 1 or trained_steps < 1:
        what = f"--{flags.fraction} {fraction:g} of {steps - 1} steps trains {trained_steps} steps"
        fix = f"use --{flags.fraction} with a value above 0, at most 1"
        if 0 < fraction <= 1:
            least = next(number for number in itertools.count(2) if int((number - 1) * fraction) >= 1)
            fix = f"use --{flags.steps} {least} or more"
        raise KitError("LG505", what, fix=fix)
    if accumulation > trained:
        what = f"--{flags.accumulation} {accumulation} exceeds the {trained} samples of a rollout: no update is made"
        raise KitError("LG505", what, fix=f"use --{flags.accumulation} {trained} or less")
    if trained % accumulation and script.leftover == "refused":
        what = f"--{flags.accumulation} {accumulation} does not divide the {trained} samples of a rollout"
        raise KitError("LG505", what, cause="upstream refuses to start so", fix=f"use a divisor of {trained}")
    cost = backward_cost(script.training, share)
    return Rollout(samples, trained, steps, trained_steps, accumulation, cost, script.no_replay is None), share


def _grouped(read: _Read) -> bool:
    return read.flags.grouped is None or read.values.switch(read.flags.grouped)


def _case(known: Facts, read: _Read, size: Rollout) -> Case:
    """What the kit's settings can do with it."""
    script, flags, grouped = read.script, read.flags, _grouped(read)
    offers: Offers = script.offers or known.offers
    whole = "" if grouped else f"it needs --{flags.grouped}: without it advantages are taken over all ranks"
    no = "the runtime does not do this for this script"
    alone = "this script never shares gradients between ranks"
    return Case(
        size,
        read.ranks,
        script.wrapper or known.wrapper,
        prompts=read.values.whole(flags.prompts),
        generations=read.values.whole(flags.generations) if grouped else 1,
        reweight="" if offers.reweight else no,
        shared=(alone if script.wrapper == "none" else no) if not offers.shared else whole,
        on_policy=no if not offers.on_policy else whole,
        late=LOW_PRECISION if script.low_precision else "",
        flag=f"--{flags.accumulation}",
    )


def _memory(read: _Read, checkpointed: float) -> Memory | None:
    """Bytes by formula, where the sizes of the model, and of what autograd saves of it, are known."""
    model, flags, values, machine = _model(read), read.flags, read.values, read.machine
    if model is None or (checkpointed < 1 and not model.image_token_bytes):
        return None
    try:
        if read.script.made:
            pixels, frames, guided = float(read.script.made.image_tokens), 1, False
        elif flags.height and flags.width:
            pixels = float(values.whole(flags.height) * values.whole(flags.width))
            video = flags.frames is not None and model.frames_per_latent > 1
            frames = 1 + (values.whole(flags.frames or "") - 1) // model.frames_per_latent if video else 1
            guided = flags.guidance is not None and values.number(flags.guidance) > 1
        else:
            return None
    except KitError:  # computed by the launch file, say: the rest of the plan stands without it
        return None
    element = 2 if not read.script.made or values.switch(read.script.made.sixteen_bit) else 4
    return Memory(
        model,
        read.script.trained_parameters or model.parameters,
        read.ranks,
        pixels,
        gpu_bytes=1e9 * machine.gpu_gb,
        other_bytes=1e9 * machine.other_gb,
        sharded=read.script.wrapper != "none" and (read.ranks > 1 or read.script.made is None),
        checkpointed=checkpointed,
        inputs=read.script.guided_inputs if guided else 1,
        frames=frames,
        host_bytes=1e9 * machine.host_gb,
        element=element,
    )


def _model(read: _Read) -> Model | None:
    made = read.script.made
    if made is None:
        return read.script.model
    width, layers = read.values.whole(made.width), read.values.whole(made.layers)
    return families.flux(
        width, layers, 2 * layers, head=made.head, channels=made.channels, text=width, text_tokens=made.text_tokens,
        sixteen_bit=read.values.switch(made.sixteen_bit),
    )  # fmt: skip


def _notes(
    script: ScriptFacts, training: launch.Training, values: launch.FlagValues, started: accelerate.Started | None
) -> list[str]:
    notes = [*training.notes, *([started.note] if started and started.note else []), *script.notes]
    if script.no_replay:
        notes.append(f"nothing can be replayed: {script.no_replay}")
    if values.unresolved:
        notes.append(f"flags hidden in {', '.join(values.unresolved)} are not known and not counted")
        notes += launch.hidden(values.unresolved)
    return notes


def _changes(read: _Read, size: Rollout, checkpointed: float) -> list[Change]:
    """Upstream's flags that would change the ratio."""
    if not size.replayable:
        return []
    flags, script, changes = read.flags, read.script, []
    if size.accumulation != size.trained:
        meaning = (
            f"one update per rollout instead of {size.updates}, so all of it is free of recomputation and "
            f"{size.trained * size.trained_steps} graphs are held. This changes training: fewer and larger updates"
        )
        ratio = size.with_accumulation(size.trained).ratio
        changes.append(Change(f"--{flags.accumulation} {size.trained}", meaning, ratio))
    if checkpointed and flags.checkpointing and not script.always_checkpointed and read.machine.backward is None:
        meaning = "the same numbers and a cheaper backward, but every graph held keeps all its activations"
        cheaper = replace(size, backward=backward_cost(script.training, 0.0))
        changes.append(Change(f"without --{flags.checkpointing}", meaning, cheaper.ratio))
    return changes
