"""How `accelerate launch` starts the ranks: its own words, and the file after `--config_file`, read as text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from leangrpo_tools.errors import KitError

if TYPE_CHECKING:
    from leangrpo_tools.plan.launch import Training

_TYPES = {"use_fsdp": "FSDP", "use_deepspeed": "DEEPSPEED", "use_megatron_lm": "MEGATRON_LM", "multi_gpu": "MULTI_GPU"}
_FILE = "~/.cache/huggingface/accelerate/default_config.yaml"


@dataclass(frozen=True)
class Started:
    """How `accelerate launch` starts the ranks, as far as its words, its file, or the file's name tell.

    Attributes:
        deepspeed: it starts DeepSpeed, or a file is named as if it did.
        processes: the number of ranks that its file gives.
        machines: the number of nodes that it gives.
        kind: `distributed_type`, such as FSDP, MULTI_GPU, DEEPSPEED; None: not known.
        fsdp: entries of `fsdp_config`, those of the command line before those of the file.
        file: the configuration that was read.
        note: what is not known of it.
    """

    deepspeed: bool
    processes: int | None
    kind: str | None = None
    fsdp: dict[str, Any] = field(default_factory=dict)
    file: Path | None = None
    note: str = ""
    machines: int | None = None
    given: str = ""
    """The file as the launch file names it."""


def read(training: Training, *roots: Path) -> Started | None:
    """The launcher's configuration; None where neither accelerate nor its variables say anything.

    Args:
        training: the words before the script, variables, and what the launch file changes.
        roots: folders that the file's name may start from, in this order: upstream's tree is the first.
    """
    words = training.before
    from_variables = _variables(training)
    if not any(word.rsplit("/", 1)[-1] in ("accelerate", "accelerate-launch", "accelerate.commands.launch")
               for word in words):  # fmt: skip
        return from_variables
    options = _options(words)
    kind = next((_TYPES[name] for name in _TYPES if name in options), None)
    fsdp = {name: value for name, value in options.items() if name.startswith("fsdp_")}
    given = options.get("config_file")
    content, path, note = _content(given, roots, training)
    told = content.get("distributed_type")
    kind = kind or (str(told).upper() if told else None)
    by_name = kind is None and given is not None and "deepspeed" in Path(given).name.lower()
    if kind is not None:
        note = ""
    stored = content.get("fsdp_config")
    fsdp = (stored if isinstance(stored, dict) else {}) | fsdp
    if from_variables is not None:
        kind, note = from_variables.kind or kind, note or from_variables.note
        fsdp = from_variables.fsdp | fsdp
    return Started(
        kind == "DEEPSPEED" or by_name,
        _count(content, "num_processes"),
        kind,
        fsdp,
        path,
        note,
        _count(content, "num_machines"),
        given or "",
    )


def _variables(training: Training) -> Started | None:
    """What ACCELERATE_* variables that the file sets make of any launcher's run. Raises LG504."""
    given = {name: value for name, value in training.exports.items() if name.startswith(("ACCELERATE_", "FSDP_"))}
    if (steps := given.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS")) is not None:
        what = f"the launch file sets ACCELERATE_GRADIENT_ACCUMULATION_STEPS={steps}"
        cause = "accelerate takes it in place of what the script gives, so when updates come is not known"
        raise KitError("LG504", what, cause=cause, fix="plan a copy of the launch file without it")
    fsdp: dict[str, Any] = {name.lower(): value for name, value in given.items() if name.startswith("FSDP_")}
    for variable, kind in (("ACCELERATE_USE_DEEPSPEED", "DEEPSPEED"), ("ACCELERATE_USE_FSDP", "FSDP")):
        value = given.get(variable, "false")
        if "$" in value:
            return Started(False, None, note=f"{variable} is not known: it may be {kind}, and then nothing here holds")
        if value.lower() in ("1", "true", "yes", "y", "on", "t"):
            return Started(kind == "DEEPSPEED", None, kind, fsdp, given=variable)
    return None


def _count(content: dict[str, Any], name: str) -> int | None:
    value = content.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def _options(words: list[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for place, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name.startswith("--"):
            after = words[place + 1] if place + 1 < len(words) and not words[place + 1].startswith("-") else ""
            found[name[2:].replace("-", "_")] = value if equals else after
    return found


def _content(given: str | None, roots: Sequence[Path], training: Training) -> tuple[dict[str, Any], Path | None, str]:
    """What the file holds, where it lies, and what is not known."""
    from leangrpo_tools.plan.launch import text_of

    may = "it may be DeepSpeed or FSDP, and then nothing here holds"
    if given is None:
        return {}, None, f"accelerate's configuration is that of {_FILE} on the machine, which is not read: {may}"
    if "$" in given:
        return {}, None, f"accelerate's configuration, {given}, is not known: {may}"
    if line := training.changed.by(given):
        return {}, None, f"accelerate's configuration, {given}, may be changed in {line} of the launch file: {may}"
    if not Path(given).is_absolute() and (folder := training.changed.goes_to(roots[0])):
        return {}, None, f"accelerate's configuration, {given}, is looked for in {folder}, and is not known: {may}"
    path = next((root / given for root in roots if (root / given).is_file()), None)
    if path is None:
        return {}, None, f"accelerate's configuration, {given}, is not here to be read: {may}"
    try:
        content = yaml.safe_load(text_of(path))
    except (KitError, ValueError, yaml.YAMLError, RecursionError):
        return {}, None, f"accelerate's configuration, {path}, cannot be read: {may}"
    return (content, path, "") if isinstance(content, dict) else ({}, path, f"{path} holds no configuration: {may}")
