"""How `accelerate launch` starts the ranks: its own words, and the file after `--config_file`, read as text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from leangrpo_tools.errors import KitError

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


def read(words: list[str], *roots: Path) -> Started | None:
    """The launcher's configuration, by the words before the script; None where accelerate does not start it.

    Args:
        words: those before the script.
        roots: folders that the file's name may start from, in this order.
    """
    if not any(word.rsplit("/", 1)[-1] in ("accelerate", "accelerate-launch", "accelerate.commands.launch")
               for word in words):  # fmt: skip
        return None
    options = _options(words)
    kind = next((_TYPES[name] for name in _TYPES if name in options), None)
    fsdp = {name: value for name, value in options.items() if name.startswith("fsdp_")}
    given = options.get("config_file")
    content, path, note = _content(given, roots)
    told = content.get("distributed_type")
    kind = kind or (str(told).upper() if told else None)
    by_name = kind is None and given is not None and "deepspeed" in Path(given).name.lower()
    if kind is not None:
        note = ""
    stored = content.get("fsdp_config")
    fsdp = (stored if isinstance(stored, dict) else {}) | fsdp
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


def _content(given: str | None, roots: Sequence[Path]) -> tuple[dict[str, Any], Path | None, str]:
    """What the file holds, where it lies, and what is not known."""
    from leangrpo_tools.plan.launch import text_of

    may = "it may be DeepSpeed or FSDP, and then nothing here holds"
    if given is None:
        return {}, None, f"accelerate's configuration is that of {_FILE} on the machine, which is not read: {may}"
    if "$" in given:
        return {}, None, f"accelerate's configuration, {given}, is not known: {may}"
    path = next((root / given for root in roots if (root / given).is_file()), None)
    if path is None:
        return {}, None, f"accelerate's configuration, {given}, is not here to be read: {may}"
    try:
        content = yaml.safe_load(text_of(path))
    except (KitError, ValueError, yaml.YAMLError, RecursionError):
        return {}, None, f"accelerate's configuration, {path}, cannot be read: {may}"
    return (content, path, "") if isinstance(content, dict) else ({}, path, f"{path} holds no configuration: {may}")
