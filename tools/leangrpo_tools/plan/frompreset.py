"""The plan of an upstream that keeps its settings in a Python config."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

from leangrpo_tools import recipe
from leangrpo_tools.errors import KitError
from leangrpo_tools.plan import accelerate, launch, options, preset
from leangrpo_tools.plan.cost import Rollout, backward_cost
from leangrpo_tools.plan.facts import ConfigFacts, Entries, Facts, ScriptFacts
from leangrpo_tools.plan.memory import Memory
from leangrpo_tools.plan.preset import ConfigValues
from leangrpo_tools.plan.report import Change, PlanReport


@dataclass(frozen=True)
class Asked:
    """What the command line asks for; see `plan`."""

    launch_file: Path | None
    preset: str | None
    script: str | None
    overrides: list[str]
    ranks: int | None
    gpu_gb: float
    other_gb: float


@dataclass(frozen=True)
class Blocked:
    """Why nothing can be replayed; what would help, if anything, and whether that is a setting of the kit."""

    why: str
    help: str | None = None
    meaning: str = ""
    setting: bool = False


_DEEPSPEED = Blocked(
    "the launch file starts DeepSpeed, whose engine the runtime leaves alone",
    "--config_file with distributed_type: MULTI_GPU",
    "DDP in place of DeepSpeed: every GPU then holds all weights in fp32",
)


def plan(upstream: str, known: Facts, config: ConfigFacts, asked: Asked) -> PlanReport:
    """Read the preset, by the launch file or by its name, and predict what the patch changes. Raises as `plan`."""
    training = asked.launch_file and launch.find_training(
        asked.launch_file, {name: script.program for name, script in known.scripts.items()}
    )
    flagged, overrides = preset.in_words(training.after, config.flag) if training else (None, [])
    wanted = asked.preset or flagged
    if wanted is None or "$" in wanted:
        what = f"--{config.flag} is {wanted!r}, which is not known" if wanted else f"--{config.flag} is not given"
        raise KitError("LG504", what, fix="name the preset: --preset FILE:NAME")
    name = asked.script or (training.script if training else _script_for(wanted, known))
    if name not in known.scripts:
        raise KitError("LG502", f"there is no script {name!r}", fix=f"known: {', '.join(known.scripts)}")
    script = known.scripts[name]
    overrides = [*overrides, *preset.settings(asked.overrides, config.flag)]
    chosen = _chosen(upstream, script, config, asked, wanted, overrides)
    values = ConfigValues(chosen, config)
    missing = [item for item in script.needs if not values.has(item)]
    if missing:
        what = f"{values.file}: the preset {chosen.name} has no {', '.join(missing)}"
        fix = f"add it to the preset, or plan it with another script than {name}"
        raise KitError("LG505", what, cause=f"{script.program} reads it and stops", fix=fix)
    started = accelerate.read(training.before, chosen.root) if training else None
    ranks = _ranks(asked, training, started, values)
    blocked = _blocked(known.entries_of(script), values, script)
    if started is not None and started.deepspeed:
        blocked.append(_DEEPSPEED)
    free = _size(known.entries_of(script), values, script, ranks)
    size = replace(free, replayable=not blocked)
    memory = _memory(script, known.entries_of(script), values, free, asked)
    lora = "lora" if _lora(known.entries_of(script), values) else "full"
    checkpointed = 1.0 if script.always_checkpointed else 0.0
    return PlanReport(
        upstream=upstream,
        script=name,
        launch=str(asked.launch_file or chosen.file),
        line=training.line if training else values.line,
        preset=f"{chosen.file}:{chosen.name}" if chosen.name else str(chosen.file),
        patched=name in recipe.scripts_of(upstream),
        ranks=ranks,
        rollout=size,
        training=lora,
        checkpointed=checkpointed,
        memory=None if blocked else memory,
        leftover="carried",
        overridden={entry: value for entry, value in overrides},
        notes=_notes(training, script, values, ranks, blocked, overrides),
        changes=_changes(config, known.entries_of(script), free, blocked, memory),
        settings=_remedies(free, blocked, memory, setting=True),
    )


def _script_for(wanted: str, known: Facts) -> str:
    file, name = preset.split(wanted)
    name = name or file
    found = [script for script, facts in known.scripts.items() if name in facts.presets]
    if len(found) == 1:
        return found[0]
    fix = f"say which: --script {' | '.join(known.scripts)}, or give a launch file"
    raise KitError("LG502", f"which script trains the preset {name} is not known", fix=fix)


def _chosen(
    upstream: str, script: ScriptFacts, config: ConfigFacts, asked: Asked, wanted: str, overrides: list
) -> preset.Chosen:
    file, name = preset.split(wanted)
    if asked.preset and name is None and not file.endswith(".py"):
        file, name = script.file or config.file, file
        near = asked.launch_file.parent if asked.launch_file else Path.cwd()
        root = preset.tree_near(near, upstream, config)
        if root is None:
            fix = f"go to upstream's tree, or give the file: --preset PATH/TO/{config.file}:{name}"
            raise KitError("LG508", f"there is no {config.file} here ({near})", fix=fix)
        return preset.Chosen(root, Path(file), name, overrides)
    if asked.preset:
        root = preset.root_of(Path(file), config)
        return preset.Chosen(root, Path(file).resolve().relative_to(root), name, overrides)
    assert asked.launch_file is not None
    source = options.find_program(asked.launch_file, script.program)
    root = source.parents[len(Path(script.program).parts) - 1] if source else Path.cwd()
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


def _lora(entries: Entries, values: ConfigValues) -> bool:
    return entries.lora is not None and values.switch(entries.lora)


def _above(name: str | None, least: float, values: ConfigValues) -> bool:
    return name is not None and values.number(name) > least


def _blocked(entries: Entries, values: ConfigValues, script: ScriptFacts) -> list[Blocked]:
    """Why nothing can be replayed, if so."""
    found = [Blocked(script.no_replay)] if script.no_replay else []
    if entries.guidance and entries.train_guidance:
        sampled, trained = _above(entries.guidance, 1.0, values), values.switch(entries.train_guidance)
        if sampled != trained:
            with_it, without = ("rollout", "update") if sampled else ("update", "rollout")
            why = (
                f"with {entries.guidance} {values.number(entries.guidance):g} and {entries.train_guidance} {trained} "
                f"the {with_it} evaluates the unconditional input and the {without} does not"
            )
            found.append(Blocked(why))
    precision = values.text(entries.precision) if entries.precision and script.rounded_under else ""
    if precision in script.rounded_under:
        why = f"under {precision} upstream rounds the network's input between rollout and update"
        meaning = "inputs that differ by that rounding alone are taken as equal; not upstream's bits"
        found.append(Blocked(why, "LEANGRPO_INPUTS=rounded", meaning, setting=True))
    return found


def _size(entries: Entries, values: ConfigValues, script: ScriptFacts, ranks: int) -> Rollout:
    """The rollout's size on one rank. Raises LG504, LG505, LG509."""
    rows, group = values.whole(entries.rows), values.whole(entries.group)
    if ranks * rows % group:
        step = group // math.gcd(group, rows)
        what = (
            f"{ranks} ranks of {rows} samples ({entries.rows}) cannot be shared by groups of {group} ({entries.group})"
        )
        raise KitError("LG505", what, cause="upstream refuses to start so", fix=f"use a multiple of {step} ranks")
    batches = values.whole(entries.batches) * (values.whole(entries.repeats) if entries.repeats else 1)
    accumulation, passes = values.whole(entries.accumulation), values.whole(entries.passes)
    steps = values.whole(entries.steps)
    if accumulation > batches * passes:
        what = f"{entries.accumulation} {accumulation} exceeds the {batches * passes} batches of a rollout"
        cause = "most rollouts would then end without an update; upstream adds gradients up over several"
        raise KitError("LG505", what, cause=cause, fix=f"use {batches * passes} or less")
    guided = entries.guidance is None or _above(entries.guidance, 1.0, values)
    return Rollout(
        samples=batches * rows,
        trained=batches * rows,
        steps=steps,
        trained_steps=_trained_steps(entries, values, steps),
        accumulation=accumulation * rows,
        backward=backward_cost("lora" if _lora(entries, values) else "full", float(script.always_checkpointed)),
        batch=rows,
        calls=script.calls if guided else 1,
        passes=passes,
        reference=int(_above(entries.reference, 0.0, values)),
        sampling_reference=int(_above(entries.reward_reference, 0.0, values)),
    )


def _trained_steps(entries: Entries, values: ConfigValues, steps: int) -> int:
    if entries.window:
        window = values.whole(entries.window, least=0)
        trained, rule = window or steps - 1, f"{entries.window} {window}"
    else:
        assert entries.fraction
        trained, rule = int(steps * values.number(entries.fraction)), f"{entries.fraction}"
    if not 1 <= trained <= steps:
        what = f"{rule} of {steps} steps ({entries.steps}) trains {trained} steps"
        raise KitError("LG505", what, fix=f"train at least 1 and at most {steps} steps")
    return trained


def _memory(script: ScriptFacts, entries: Entries, values: ConfigValues, size: Rollout, asked: Asked) -> Memory | None:
    """Bytes under DDP by formula, where the model's sizes are known, for a LoRA in 16 bits."""
    model, trained = script.model, script.trained_parameters
    if model is None or trained is None or not entries.height or not entries.width:
        return None
    if not _lora(entries, values) or (entries.precision and values.text(entries.precision) not in ("fp16", "bf16")):
        return None
    guided = entries.guidance is not None and _above(entries.guidance, 1.0, values)
    frames = values.whole(entries.frames) if entries.frames else 1
    return Memory(
        model,
        trained,
        ranks=1,
        pixels=float(values.whole(entries.height) * values.whole(entries.width)),
        gpu_bytes=1e9 * asked.gpu_gb,
        other_bytes=1e9 * asked.other_gb,
        sharded=False,
        checkpointed=script.always_checkpointed,
        inputs=size.batch * (script.guided_inputs if guided else 1),
        frames=1 + (frames - 1) // model.frames_per_latent,
    )


def _notes(
    training: launch.Training | None,
    script: ScriptFacts,
    values: ConfigValues,
    ranks: int,
    blocked: list[Blocked],
    overrides: list[tuple[str, str | None]],
) -> list[str]:
    notes = [*(training.notes if training else []), *script.notes]
    notes += [f"nothing is replayed: {reason.why}" for reason in blocked]
    if isinstance(values.written_for, int) and values.written_for != ranks:
        notes.append(
            f"the preset is written for {values.written_for} ranks and planned for {ranks}: the batches per rank stay "
            f"as they are, so a rollout has {ranks / values.written_for:.3g} times the samples it was meant to have"
        )
    if overrides:
        names = ", ".join(name for name, _ in overrides)
        notes.append(f"entries that the preset works out from {names} keep their values, as upstream does it")
    return notes


def _remedies(free: Rollout, blocked: list[Blocked], memory: Memory | None, setting: bool) -> list[Change]:
    """What makes a blocked plan replayable, with the ratio once all of it is done."""
    if not all(reason.help for reason in blocked):
        return []
    room = ""
    if memory is not None:
        fits = min(memory.fitting(joint=False), free.graphs)
        gpu = f"{memory.gpu_bytes / 1e9:g} GB"
        room = f". By formula {fits} of {free.graphs} graphs fit into {gpu}: ratio {free.ratio_with(fits):.2f} then"
    found = []
    for reason in blocked:
        others = [str(other.help) for other in blocked if other is not reason]
        meaning = reason.meaning + room + (f". Only together with {', '.join(others)}" if others else "")
        if reason.setting == setting:
            found.append(Change(str(reason.help), meaning, free.ratio))
    return found


def _changes(
    config: ConfigFacts, entries: Entries, free: Rollout, blocked: list[Blocked], memory: Memory | None
) -> list[Change]:
    """Upstream's flags that would change the ratio."""
    changes = _remedies(free, blocked, memory, setting=False)
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
