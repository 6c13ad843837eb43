"""The plan of an upstream that keeps its settings in a Python config."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from leangrpo_tools import recipe
from leangrpo_tools.errors import KitError
from leangrpo_tools.plan import accelerate, instead, launch, named, options, preset, presetsize, sizing, wrapped
from leangrpo_tools.plan.asked import Asked
from leangrpo_tools.plan.choice import LOW_PRECISION, WHOLE_ROUNDED, Case
from leangrpo_tools.plan.cost import Rollout
from leangrpo_tools.plan.facts import ConfigFacts, Entries, Facts, Offers, ScriptFacts
from leangrpo_tools.plan.instead import Instead
from leangrpo_tools.plan.named import Named
from leangrpo_tools.plan.predict import predict
from leangrpo_tools.plan.preset import ConfigValues
from leangrpo_tools.plan.presetsize import Blocked
from leangrpo_tools.plan.report import Change, PlanReport
from leangrpo_tools.plan.sizing import Sized
from leangrpo_tools.plan.traffic import Wire
from leangrpo_tools.plan.wrapped import Wrapped


def plan(upstream: str, known: Facts, config: ConfigFacts, asked: Asked) -> PlanReport:
    """Read the preset, by the launch file or by its name, and predict what the patch changes. Raises as `plan`."""
    programs = {name: script.program for name, script in known.scripts.items()} | recipe.refused_by(upstream)
    if asked.launch_file is None:
        return _plan(upstream, known, config, asked, None)
    hits = launch.trainings(asked.launch_file, programs, asked.script, asked.line)
    return launch.one_of(hits, lambda hit: _plan(upstream, known, config, asked, hit), PlanReport.figures)


def _plan(
    upstream: str, known: Facts, config: ConfigFacts, asked: Asked, training: launch.Training | None
) -> PlanReport:
    refused = recipe.refused_by(upstream)
    alone = asked.script or (training.script if training else None)
    if alone in refused:
        recipe.load(upstream).find(alone)  # says why
    flagged, overrides = preset.in_words(training.after, config.flag) if training else (None, [])
    wanted = asked.preset or flagged
    if wanted is None and training is None:
        cause = f"{upstream} keeps its settings in presets ({config.file}), which its launch files name"
        fix = f"--launch PATH/TO/scripts/NAME.sh, or --preset PATH/TO/{config.file}:NAME"
        raise KitError("LG501", "--launch and --preset are missing", cause=cause, fix=fix)
    if wanted is None or "$" in wanted:
        what = f"--{config.flag} is {wanted!r}, which is not known" if wanted else f"--{config.flag} is not given"
        cause = f"the launch file takes it from a variable: {launch.NOT_READ}" if wanted else "no preset is named there"
        raise KitError("LG504", what, cause=cause, fix="name the preset: --preset FILE:NAME")
    edited = training.changed.by(preset.split(wanted)[0]) if training and not asked.preset else ""
    if edited:
        cause = f"{edited} of the launch file may change it before it is read"
        fix = f"name the preset as it will be: --preset FILE:{preset.split(wanted)[1] or 'NAME'}"
        raise KitError("LG504", f"what {wanted} is, is not known", cause=cause, fix=fix)
    name = asked.script or (training.script if training else _script_for(wanted, known, config, upstream))
    if name not in known.scripts:
        cause = f"{upstream} has {', '.join(known.scripts)}"
        raise KitError("LG502", f"there is no script {name!r}", cause=cause, fix="give one of these: --script S")
    script = known.scripts[name]
    overrides = [*overrides, *preset.settings(asked.overrides, config.flag)]
    chosen = _chosen(upstream, script, config, asked, wanted, overrides, training.program if training else "")
    values = ConfigValues(chosen, config)
    missing = [item for item in script.needs if not values.has(item)]
    if missing:
        what = f"{values.file}: the preset {chosen.name} has no {', '.join(missing)}"
        fix = f"add it to the preset, or plan it with another script than {name}"
        raise KitError("LG505", what, cause=f"{script.program} reads it and stops", fix=fix)
    near = asked.launch_file.parent if asked.launch_file else chosen.root
    started = accelerate.read(training, chosen.root, Path.cwd(), near) if training else None
    ranks = _ranks(asked, training, started, values)
    entries = known.entries_of(script)
    precision = values.text(entries.precision) if entries.precision else "no"
    around = wrapped.by(known, script, started, training, ranks, precision, values.whole(entries.rows))
    network = _network(script, entries, values, asked.network)
    free = asked.machine.measured(presetsize.size(entries, values, script, ranks, around.checkpointed))
    blocked = presetsize.blocked(entries, values, script)
    under_ddp = None
    if around.blocked is not None:
        ddp = wrapped.DDP if not script.always_checkpointed else replace(wrapped.DDP, checkpointed=1.0)
        plain = asked.machine.measured(presetsize.size(entries, values, script, ranks, ddp.checkpointed))
        under_ddp = _instead(
            known, config, script, entries, values, asked, network, plain, ddp, started, chosen.root, ranks
        )
        blocked.append(around.blocked)
    size = replace(free, replayable=not blocked)
    sized = _bytes(script, entries, values, network, size, around, asked)
    case = _case(known, script, entries, values, size, ranks, around)
    low = bool(around.layout and around.layout.low)
    wire = Wire(2, 2) if low else Wire(script.gathered_bytes, script.reduced_bytes)
    elsewhere = under_ddp.sized if under_ddp else sized
    return PlanReport(
        upstream=upstream,
        script=name,
        launch=str(asked.launch_file or chosen.file),
        line=training.line if training else values.line,
        preset=f"{chosen.file}:{chosen.name}" if chosen.name else str(chosen.file),
        patched=name in recipe.scripts_of(upstream),
        ranks=ranks,
        rollout=size,
        training="lora" if presetsize.lora(entries, values) else "full",
        checkpointed=around.checkpointed,
        network=network,
        sized=sized,
        instead=under_ddp if all(reason.help for reason in blocked) else None,
        table=predict(case, sized.memory, asked.machine.speeds, wire),
        speeds=asked.machine.speeds,
        leftover="carried",
        overridden={entry: value for entry, value in overrides},
        notes=_notes(training, started, script, values, ranks, size, blocked, overrides),
        changes=_changes(config, entries, free, blocked, elsewhere),
        settings=_remedies(free, blocked, elsewhere, setting=True),
    )


def _network(script: ScriptFacts, entries: Entries, values: ConfigValues, wanted: str | None) -> Named:
    """Which network is trained: as the command line says, else the config, else upstream's own."""
    kind = named.kind_of(script.network)
    if wanted is not None:
        return named.asked(wanted, kind)
    if script.network is None or kind is None:
        return Named(why="the kit does not know the networks that this script trains")
    if entries.model is None or not values.has(entries.model):
        return named.upstreams(script.network, f"the preset has no {entries.model}")
    try:
        path = values.text(entries.model)
    except KitError as err:
        choice = " | ".join(named.trainable(kind))
        return Named(source=entries.model, why=err.what, help=f"say which it is: {named.OPTION} {choice}")
    return named.by_path(path, entries.model, kind, script.folders)


def _bytes(
    script: ScriptFacts, entries: Entries, values: ConfigValues, network: Named, size: Rollout, around: Wrapped,
    asked: Asked,
) -> Sized:  # fmt: skip
    if around.uncounted:
        return Sized(None, around.uncounted, "the configuration below is counted" if around.blocked else "")
    per_latent = network.network.frames_per_latent if network.network else 1
    call = presetsize.call(entries, values, script, size, per_latent, around.checkpointed)
    return sizing.size(script, network, around.layout, call, asked.machine)


def _instead(
    known: Facts, config: ConfigFacts, script: ScriptFacts, entries: Entries, values: ConfigValues, asked: Asked,
    network: Named, free: Rollout, ddp: Wrapped, started: accelerate.Started | None, root: Path,
    ranks: int,
) -> Instead:  # fmt: skip
    """What DDP would give, with the settings of the kit that it needs."""
    needed = tuple(f"export {reason.help}" for reason in presetsize.blocked(entries, values, script) if reason.setting)
    precision = values.text(entries.precision) if entries.precision else "no"
    sized = _bytes(script, entries, values, network, free, ddp, asked)
    case = _case(known, script, entries, values, free, ranks, ddp)
    machines = (started.machines if started else None) or 1
    file, text = instead.configuration(root, config.ddp, precision, ranks, machines)
    table = predict(case, sized.memory, asked.machine.speeds, Wire())
    given = started.given if started else ""
    return Instead(file, text, given, free, sized, table, needed)


def _script_for(wanted: str, known: Facts, config: ConfigFacts, upstream: str) -> str:
    """The script that one of upstream's presets is for. Raises LG508 where there is no such preset, else LG502."""
    file, name = preset.split(wanted)
    name = name or file
    found = [script for script, facts in known.scripts.items() if name in facts.presets]
    if len(found) == 1:
        return found[0]
    if file.endswith(".py"):
        config_file: Path | None = Path(file)
        root = preset.root_of(Path(file), config)
    else:
        root = preset.tree_near(Path.cwd(), upstream, config)
        config_file = root / config.file if root else None
    cause = "it is none of upstream's own presets"
    if root and config_file:
        preset.must_have(root, config_file, name, config)
    else:
        own = ", ".join(sorted(preset for script in known.scripts.values() for preset in script.presets))
        cause += f" ({own}), and there is no {config.file} here ({Path.cwd()}) to look it up in"
    fix = f"say which: --script {' | '.join(known.scripts)}, or give a launch file"
    raise KitError("LG502", f"which script trains the preset {name} is not known", cause=cause, fix=fix)


def _chosen(
    upstream: str, script: ScriptFacts, config: ConfigFacts, asked: Asked, wanted: str, overrides: list, program: str
) -> preset.Chosen:
    file, name = preset.split(wanted)
    if asked.preset and name is None and not file.endswith(".py"):
        file, name = script.file or config.file, file
        near = asked.launch_file.parent if asked.launch_file else Path.cwd()
        root = preset.tree_near(near, upstream, config)
        if root is None:
            fix = f"go to upstream's tree, or give the file: --preset PATH/TO/{config.file}:{name}"
            cause = f"neither it nor a folder above it is upstream's tree, and it has no folder {upstream}"
            raise KitError("LG508", f"there is no {config.file} here ({near})", cause=cause, fix=fix)
        return preset.Chosen(root, Path(file), name, overrides)
    if asked.preset:
        root = preset.root_of(Path(file), config)
        return preset.Chosen(root, Path(file).resolve().relative_to(root), name, overrides)
    assert asked.launch_file is not None
    source = options.find_program(asked.launch_file, program or script.program)
    root = options.root_of(source, program or script.program)
    return preset.Chosen(root, Path(file), name, overrides)


def _ranks(asked: Asked, training: launch.Training | None, started, values: ConfigValues) -> int:
    if asked.ranks is not None:
        if asked.ranks < 1:
            raise KitError("LG503", f"--ranks is {asked.ranks}", fix="give the number of processes, 1 or more")
        return asked.ranks
    if training is not None:
        return launch.ranks(training, started.processes if started else None)
    if isinstance(values.written_for, int) and values.written_for > 0:
        return values.written_for
    raise KitError("LG503", "a preset does not say how many ranks there are", fix="say it: --ranks N")


def _case(
    known: Facts,
    script: ScriptFacts,
    entries: Entries,
    values: ConfigValues,
    size: Rollout,
    ranks: int,
    around: Wrapped,
) -> Case:
    """What the kit's settings can do with it. Its sampler spreads each group over the ranks."""
    offers: Offers = script.offers or known.offers
    sixteen = entries.precision is None or values.text(entries.precision) in ("bf16", "fp16")
    reweight = "" if offers.reweight else "the runtime does not do this for this script"
    if size.reference or size.sampling_reference:
        reweight = "a KL term to a reference policy is no multiple of the advantage"
    elif size.batch > 1:
        reweight = f"a call takes {size.batch} samples, and their gradients come out added up"
    low = bool(around.layout and around.layout.low)
    if not reweight and low and ranks > 1:
        reweight = WHOLE_ROUNDED
    return Case(
        size,
        ranks,
        around.wrapper,
        generations=values.whole(entries.group),
        reweight=reweight,
        shared="upstream's sampler spreads each group over the ranks already",
        on_policy="advantages are taken over the whole rollout, so no update can start before its end",
        late=LOW_PRECISION if low else "upstream averages gradients once per update already",
        inputs="rounded" if script.rounded_inputs and sixteen else "exact",
        stays=bool(around.layout and around.layout.stays),
    )


def _notes(
    training: launch.Training | None,
    started: accelerate.Started | None,
    script: ScriptFacts,
    values: ConfigValues,
    ranks: int,
    size: Rollout,
    blocked: list[Blocked],
    overrides: list[tuple[str, str | None]],
) -> list[str]:
    notes = [*(training.notes if training else []), *script.notes]
    notes += [started.note] if started and started.note else []
    loose = preset.loose(training.after) if training else []
    if loose:
        notes.append(f"entries that {', '.join(loose)} may set are not known and not counted")
        notes += launch.hidden(loose)
    notes += [f"nothing is replayed: {reason.why}" for reason in blocked]
    if isinstance(values.written_for, int) and values.written_for != ranks:
        notes.append(
            f"the preset is written for {values.written_for} ranks and planned for {ranks}: the batches per rank stay "
            f"as they are, so a rollout has {ranks / values.written_for:.3g} times the samples it was meant to have"
        )
    if size.free != size.replayed:
        batches, step = size.visits // size.batch, size.accumulation // size.batch
        places = [[n for n in range(1, batches + 1) if (first * batches + n) % step == 0] for first in (0, 1)]
        notes.append(
            f"a rollout has {batches} batches and an update takes {step}: updates come after batches {places[0]}, then "
            f"after {places[1]} of the next rollout, and so on; what is free of recomputation is their average"
        )
    if overrides:
        names = ", ".join(name for name, _ in overrides)
        notes.append(f"entries that the preset works out from {names} keep their values, as upstream does it")
    return notes


def _remedies(free: Rollout, blocked: list[Blocked], sized: Sized, setting: bool) -> list[Change]:
    """What makes a blocked plan replayable, with the ratio once all of it is done."""
    if not all(reason.help for reason in blocked):
        return []
    fits = sized.memory.fitting(joint=False) if sized.memory else None
    room = f". What fits is not known: {sized.why}"
    if sized.memory is not None and fits is not None:
        fits = min(fits, free.graphs)
        gpu = f"{sized.memory.gpu_bytes / 1e9:g} GB"
        room = f". By formula {fits} of {free.graphs} graphs fit into {gpu}: ratio {free.ratio_with(fits):.2f} then"
    found = []
    for reason in blocked:
        others = [str(other.help) for other in blocked if other is not reason]
        meaning = reason.meaning + room + (f". Only together with {', '.join(others)}" if others else "")
        if reason.setting == setting:
            found.append(Change(str(reason.help), meaning, free.ratio))
    return found


def _changes(
    config: ConfigFacts, entries: Entries, free: Rollout, blocked: list[Blocked], sized: Sized
) -> list[Change]:
    """Upstream's flags that would change the ratio."""
    changes = _remedies(free, blocked, sized, setting=False)
    if not blocked and free.accumulation != free.visits:
        one = free.with_accumulation(free.visits)
        meaning = (
            f"one update per rollout instead of {free.updates}, so all of it is free of recomputation and {one.graphs} "
            "graphs are held. This changes training: fewer and larger updates"
        )
        changes.append(
            Change(f"--{config.flag}.{entries.accumulation}={free.visits // free.batch}", meaning, one.ratio)
        )
    return changes
