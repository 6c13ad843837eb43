"""What a preset says: the rollout's size, its memory, and why nothing of it can be replayed."""

from __future__ import annotations

import math
from dataclasses import dataclass

from leangrpo_tools.errors import KitError
from leangrpo_tools.plan.cost import Rollout, backward_cost
from leangrpo_tools.plan.facts import Entries, ScriptFacts
from leangrpo_tools.plan.preset import ConfigValues
from leangrpo_tools.plan.sizing import Call


@dataclass(frozen=True)
class Blocked:
    """Why nothing can be replayed; what would help, if anything, and whether that is a setting of the kit."""

    why: str
    help: str | None = None
    meaning: str = ""
    setting: bool = False


def lora(entries: Entries, values: ConfigValues) -> bool:
    """Whether a LoRA is trained, not the whole network."""
    return entries.lora is not None and values.switch(entries.lora)


def above(name: str | None, least: float, values: ConfigValues) -> bool:
    """Whether an entry that upstream has is above a number."""
    return name is not None and values.number(name) > least


def blocked(entries: Entries, values: ConfigValues, script: ScriptFacts) -> list[Blocked]:
    """Why nothing can be replayed, if so."""
    found = [Blocked(script.no_replay)] if script.no_replay else []
    if entries.guidance and entries.train_guidance:
        sampled, trained = above(entries.guidance, 1.0, values), values.switch(entries.train_guidance)
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


def size(entries: Entries, values: ConfigValues, script: ScriptFacts, ranks: int, share: float) -> Rollout:
    """The rollout's size on one rank, with this share of checkpointed blocks. Raises LG504, LG505, LG509."""
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
    guided = entries.guidance is None or above(entries.guidance, 1.0, values)
    return Rollout(
        samples=batches * rows,
        trained=batches * rows,
        steps=steps,
        trained_steps=_trained_steps(entries, values, steps),
        accumulation=accumulation * rows,
        backward=backward_cost("lora" if lora(entries, values) else "full", share),
        batch=rows,
        calls=script.calls if guided else 1,
        passes=passes,
        reference=int(above(entries.reference, 0.0, values)),
        sampling_reference=int(above(entries.reward_reference, 0.0, values)),
        counted_on=True,
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


def call(
    entries: Entries, values: ConfigValues, script: ScriptFacts, rollout: Rollout, frames_per_latent: int, share: float
) -> Call:
    """One call of the network. `share`: of the blocks with activation checkpointing."""
    pixels = None
    if entries.height and entries.width:
        pixels = float(values.whole(entries.height) * values.whole(entries.width))
    guided = entries.guidance is not None and above(entries.guidance, 1.0, values)
    frames = values.whole(entries.frames) if entries.frames else 1
    return Call(
        pixels,
        frames=1 + (frames - 1) // frames_per_latent,
        inputs=rollout.batch * (script.guided_inputs if guided else 1),
        checkpointed=share,
        lora=lora(entries, values),
        sixteen_bit=entries.precision is None or values.text(entries.precision) in ("fp16", "bf16"),
    )
