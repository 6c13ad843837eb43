"""The plan of an upstream that takes its settings from the flags of a launch file."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from pathlib import Path

from leangrpo_tools import recipe
from leangrpo_tools.errors import KitError
from leangrpo_tools.plan import accelerate, families, launch, named, options, preset, sharding, sizing
from leangrpo_tools.plan.asked import Asked, Machine
from leangrpo_tools.plan.choice import LOW_PRECISION, WHOLE_ROUNDED, Case
from leangrpo_tools.plan.cost import Rollout, backward_cost
from leangrpo_tools.plan.facts import Facts, Flags, Offers, ScriptFacts
from leangrpo_tools.plan.memory import Memory
from leangrpo_tools.plan.named import Named
from leangrpo_tools.plan.networks import Model
from leangrpo_tools.plan.predict import predict
from leangrpo_tools.plan.report import Change, PlanReport
from leangrpo_tools.plan.sharding import Sharding
from leangrpo_tools.plan.sizing import Call, Sized
from leangrpo_tools.plan.traffic import Wire


@dataclass(frozen=True)
class _Read:
    """A launch file as it was read."""

    script: ScriptFacts
    flags: Flags
    values: launch.FlagValues
    ranks: int
    machine: Machine
    layout: Sharding | None
    """None where every rank holds the whole network."""


def plan(upstream: str, known: Facts, launch_file: Path, asked: Asked) -> PlanReport:
    """Read the launch file and predict what the patch changes. Raises as `leangrpo_tools.plan.plan`."""
    programs = {name: script.program for name, script in known.scripts.items()}
    hits = launch.trainings(launch_file, programs, asked.script, asked.line)
    return launch.one_of(hits, lambda hit: _plan(upstream, known, launch_file, asked, hit), PlanReport.figures)


def _plan(upstream: str, known: Facts, launch_file: Path, asked: Asked, training: launch.Training) -> PlanReport:
    script = known.scripts[training.script]
    if script.unreadable:
        what = f"{upstream} {training.script} cannot be planned from a launch file"
        fix = "leangrpo list says what its updates per rollout are; plan reads the other scripts' launch files"
        raise KitError("LG506", what, cause=script.unreadable, fix=fix)
    if asked.ranks is not None and asked.ranks < 1:
        raise KitError("LG503", f"--ranks is {asked.ranks}", fix="give the number of processes, 1 or more")
    source = options.find_program(launch_file, training.program)
    root = options.root_of(source, training.program)
    started = accelerate.read(training, root, Path.cwd(), launch_file.parent)
    world = asked.ranks or launch.ranks(training, started.processes if started else None)
    declared = options.read_options(launch.text_of(source)) if source else None
    flags = known.flags_of(script)
    edited = training.changed.by(training.program)
    doubt = f"$<{edited} of the launch file, which changes the script,>" if edited else ""
    said = {name: value or "" for name, value in preset.settings(asked.overrides, "")}
    values = launch.FlagValues(training, declared, known.defaults, said, flags.needed(), doubt)
    layout = _layout(known, script, flags, values, world, training)
    read = _Read(script, flags, values, world, asked.machine, layout)
    size, checkpointed = _size(read)
    size = asked.machine.measured(size)
    network = _network(read, asked.network)
    known_bytes = _bytes(read, network, checkpointed)
    case = _case(known, read, size)
    low = bool(layout and layout.low)
    wire = Wire(2, 2) if low else Wire(script.gathered_bytes, script.reduced_bytes)
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
        network=network,
        sized=known_bytes,
        table=predict(case, known_bytes.memory, asked.machine.speeds, wire),
        speeds=asked.machine.speeds,
        leftover=script.leftover,
        overridden=dict(said),
        defaults=values.defaulted,
        defaults_from=str(source) if declared is not None else "the kit's table for the pinned commit",
        notes=_notes(read, training, started),
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
    return Rollout(samples, trained, steps, trained_steps, accumulation, cost, not _refusals(read)), share


def _refusals(read: _Read) -> list[str]:
    """Why nothing can be replayed."""
    found = [read.script.no_replay] if read.script.no_replay else []
    return found + ([sharding.OFFLOADED] if read.layout and read.layout.offloaded else [])


def _layout(
    known: Facts, script: ScriptFacts, flags: Flags, values: launch.FlagValues, ranks: int, training: launch.Training
) -> Sharding | None:
    """How weights are spread. Raises LG504 for a strategy that upstream does not know."""
    if (script.wrapper or known.wrapper) != "fsdp" or (ranks == 1 and script.made):
        return None
    master = (values.text(flags.master, told=False) if flags.master else None) or "fp32"
    low = script.low_precision or master != "fp32"
    try:
        offloaded = values.switch(flags.offload, told=False)
    except KitError as err:
        return Sharding(low=low, why=err.what, help=err.fix or "")
    given = (values.text(flags.strategy, told=False) if flags.strategy else None) or "full"
    for flag, value in ((flags.strategy, given), (flags.master, master)):
        if "$" in value:
            why, fix = (
                f"--{flag} is {value}: {values.why_not(value)}",
                f"say it: --set {flag}=VALUE",
            )
            return Sharding(low=low, offloaded=offloaded, why=why, help=fix)
    strategy = sharding.named(flags.strategy, given) if flags.strategy else "FULL_SHARD"
    return sharding.of(strategy, ranks, sharding.node_of(training.before), low=low, offloaded=offloaded)


def _grouped(read: _Read) -> bool:
    return read.flags.grouped is None or read.values.switch(read.flags.grouped)


def _case(known: Facts, read: _Read, size: Rollout) -> Case:
    """What the kit's settings can do with it."""
    script, flags, grouped = read.script, read.flags, _grouped(read)
    offers: Offers = script.offers or known.offers
    whole = "" if grouped else f"it needs --{flags.grouped}: without it advantages are taken over all ranks"
    no = "the runtime does not do this for this script"
    alone = "this script never shares gradients between ranks"
    layout = read.layout
    late = LOW_PRECISION if layout and layout.low else sharding.OFFLOADED if layout and layout.offloaded else ""
    rounded = WHOLE_ROUNDED if layout and layout.low and read.ranks > 1 else ""
    return Case(
        size,
        read.ranks,
        script.wrapper or known.wrapper,
        prompts=read.values.whole(flags.prompts),
        generations=read.values.whole(flags.generations) if grouped else 1,
        reweight=rounded if offers.reweight else no,
        shared=(alone if script.wrapper == "none" else no) if not offers.shared else whole,
        on_policy=no if not offers.on_policy else whole,
        late=late,
        flag=f"--{flags.accumulation}",
        stays=bool(layout and layout.stays),
    )


def _network(read: _Read, wanted: str | None) -> Named:
    """Which network is trained: as the command line says, else the launch file, else upstream's own."""
    script, flags = read.script, read.flags
    if wanted is not None:
        return named.asked(wanted, named.kind_of(script.network))
    if script.made:
        return Named("its own", "", f"--{script.made.width} and --{script.made.layers}")
    if script.network is None:
        return Named(why="the kit does not know the networks that this script trains")
    for flag in flags.models:
        path = read.values.text(flag, told=False)
        if path is not None:
            kind, why = named.kind_of(script.network) or "", read.values.why_not(path)
            return named.by_path(path, f"--{flag}", kind, script.folders, why)
    return named.upstreams(script.network, f"the launch file has no --{flags.models[-1]}" if flags.models else "")


def _bytes(read: _Read, network: Named, checkpointed: float) -> Sized:
    """Bytes by formula, as far as the network, and what autograd saves of it, are known."""
    script, flags, values, machine = read.script, read.flags, read.values, read.machine
    if script.made:
        try:
            return Sized(_made(read, checkpointed))
        except KitError as err:  # a width that the launch file leaves open, say
            return Sized(None, err.what, err.fix or "")
    frames, guided, pixels = 1, False, None
    try:
        if flags.height and flags.width:
            pixels = float(values.whole(flags.height) * values.whole(flags.width))
        per_latent = network.network.frames_per_latent if network.network else 1
        if flags.frames is not None and per_latent > 1:
            frames = 1 + (values.whole(flags.frames) - 1) // per_latent
        guided = flags.guidance is not None and values.number(flags.guidance) > 1
    except KitError:  # computed by the launch file, say: the rest of the plan stands without it
        pixels = None
    inputs = script.guided_inputs if guided else 1
    call = Call(pixels, frames, inputs, checkpointed, script.training == "lora")
    return sizing.size(script, network, read.layout, call, machine)


def _made(read: _Read, checkpointed: float) -> Memory:
    """Of a network whose width and depth the launch file chooses."""
    made, machine = read.script.made, read.machine
    assert made is not None
    model, sixteen_bit = _model(read), read.values.switch(made.sixteen_bit)
    return Memory(
        model,
        model.parameters,
        read.ranks,
        float(made.image_tokens),
        gpu_bytes=1e9 * machine.gpu_gb,
        other_bytes=1e9 * machine.other_gb,
        sharded=read.layout is not None,
        checkpointed=checkpointed,
        host_bytes=1e9 * machine.host_gb,
        element=2 if sixteen_bit else 4,
        measured=machine.graph_bytes,
    )


def _model(read: _Read) -> Model:
    made = read.script.made
    assert made is not None
    width, layers = read.values.whole(made.width), read.values.whole(made.layers)
    return families.flux(
        width, layers, 2 * layers, head=made.head, channels=made.channels, text=width, text_tokens=made.text_tokens,
        sixteen_bit=read.values.switch(made.sixteen_bit),
    )  # fmt: skip


def _notes(read: _Read, training: launch.Training, started: accelerate.Started | None) -> list[str]:
    notes = [*training.notes, *([started.note] if started and started.note else []), *read.script.notes]
    notes += [f"nothing can be replayed: {why}" for why in _refusals(read)]
    if read.values.unresolved:
        words = ", ".join(read.values.unresolved)
        notes.append(f"flags hidden in {words} are not known: those that are written are counted as they are written")
        notes += launch.hidden(read.values.unresolved)
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
