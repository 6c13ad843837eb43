"""Optimizers of bitsandbytes need a GPU: torch's own take their place, and the run writes down which were asked for."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

NAMES = {
    f"{paged}{name}{bits}": base
    for name, base in (("AdamW", torch.optim.AdamW), ("Adam", torch.optim.Adam), ("SGD", torch.optim.SGD),
                       ("RMSprop", torch.optim.RMSprop), ("Adagrad", torch.optim.Adagrad))
    for paged in ("", "Paged")
    for bits in ("", "8bit", "32bit")
}  # fmt: skip
FILE = "stand_ins.json"

used: list[str] = []


def fill(module: ModuleType) -> None:
    """Gives a stand-in for `bitsandbytes`, or for its `optim`, the optimizers."""
    made = {name: _of(name, base) for name, base in NAMES.items()}
    if module.__name__ == "bitsandbytes":
        module.optim = SimpleNamespace(**made)  # type: ignore[attr-defined]
    else:
        module.__dict__.update(made)


def asked_for(script: Path) -> bool:
    """Whether the script's text names the package."""
    return script.is_file() and "bitsandbytes" in script.read_text(encoding="utf-8", errors="replace")


def write(out: Path) -> None:
    """`stand_ins.json` under `out`: the optimizers that were made in another's place."""
    (out / FILE).write_text(json.dumps(sorted(set(used))))


def _of(name: str, base: Any) -> type:
    known = inspect.signature(base.__init__).parameters

    def init(self: Any, params: Any, *args: Any, **kwargs: Any) -> None:
        used.append(name)
        base.__init__(self, params, *args, **{key: value for key, value in kwargs.items() if key in known})

    return type(name, (base,), {"__init__": init})
