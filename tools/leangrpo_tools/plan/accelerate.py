"""What the file after `accelerate launch --config_file` says, read as text."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import yaml


@dataclass(frozen=True)
class Started:
    """How `accelerate launch` starts the ranks, where its file is at hand or its name tells."""

    deepspeed: bool
    processes: int | None


def read(words: list[str], root: Path) -> Started | None:
    """The launcher's file, by the words before the script; None where none is given. `root`: upstream's tree."""
    given: str | None = None
    for place, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name == "--config_file":
            given = value if equals else (words[place + 1] if place + 1 < len(words) else None)
    if given is None:
        return Started("--use_deepspeed" in words, None) if "--use_deepspeed" in words else None
    by_name = "deepspeed" in Path(given).name.lower() or "--use_deepspeed" in words
    try:
        content = yaml.safe_load((root / given).read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError, RecursionError):
        return Started(by_name, None)
    if not isinstance(content, dict):
        return Started(by_name, None)
    processes = content.get("num_processes")
    known = isinstance(processes, int) and not isinstance(processes, bool) and processes > 0
    deepspeed = content.get("distributed_type") == "DEEPSPEED" or "--use_deepspeed" in words
    return Started(deepspeed, processes if known else None)
