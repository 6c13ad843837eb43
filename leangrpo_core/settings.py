"""Settings of a patched run: `.leangrpo/config.yaml` in the tree, overridden by `LEANGRPO_*` variables."""

import difflib
import hashlib
import math
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from .errors import LeanError

SCHEDULES = ("retain", "reweight", "recompute", "auto")
BUFFERS = ("sample", "affine")
SYNCS = ("upstream", "group", "late")
ORDERS = ("held-first", "upstream")
INPUTS = ("exact", "rounded")
LAYOUTS = ("native", "shared")
UPDATES = ("faithful", "on-policy")
ALLOWED = {
    "schedule": ", ".join(SCHEDULES[:-1]) + " or " + SCHEDULES[-1],
    "buffers": " or ".join(BUFFERS),
    "budget_gb": "measured, unlimited, or a number of gigabytes (1e9 bytes) per rank, 0 or more",
    "offload_gb": "unlimited, or a number of gigabytes (1e9 bytes) of host memory per rank, 0 or more",
    "sync": ", ".join(SYNCS[:-1]) + " or " + SYNCS[-1],
    "audit": "first, off, or every:N with N >= 1",
    "order": " or ".join(ORDERS),
    "inputs": " or ".join(INPUTS),
    "layout": " or ".join(LAYOUTS),
    "updates": " or ".join(UPDATES),
}
# Variables of the kit that are no settings of a run and may be set beside them.
NOT_SETTINGS = {"LEANGRPO_REPORT_DIR", "LEANGRPO_CACHE", "LEANGRPO_VENV", "LEANGRPO_DEBUG"}


@dataclass(frozen=True)
class Settings:
    """Read once per process.

    Attributes:
        schedule: `retain` keeps the graphs of the rollout; `reweight` walks each at once and keeps the gradient of the
            sample, which is scaled when its weight in the loss is known; `recompute` is upstream's own behaviour, the
            off switch; `auto` measures the first window and one kept call, and chooses.
        budget_gb: gigabytes (1e9 bytes) of kept graphs a rank may hold at a time; `inf` is unlimited, None measured.
        offload_gb: gigabytes of host memory for graphs beyond that budget; 0 recomputes them, `inf` is unlimited.
        sync: `upstream` reduces gradients over the ranks as often as upstream does; `late` once per update under FSDP1
            and FSDP2 where there is room for it, and also where upstream leaves every rank alone; `group` once per
            prompt group, whose graphs are walked as soon as its last row was trained.
        audit: which windows are compared with a native recomputation: `first` that can be judged, `off`, `every:N`.
        order: where upstream shuffles the samples of a rollout over several updates: `held-first` trains those whose
            graphs are held first; `upstream` leaves the order alone and holds the graphs of all.
        buffers: of `reweight`: `sample` keeps a gradient per sample; `affine` two per prompt group.
        inputs: whether an input of the update may be the rollout's but for rounding: `exact` or `rounded`.
        layout: `native`, each rank draws all samples of its prompts, or `shared`, ranks share the samples of a prompt.
        updates: `faithful` trains a rollout's samples in upstream's updates; `on-policy` draws each update's samples
            by the policy as it is then, which is another algorithm.
        given: names of the settings that somebody has set, be it to their defaults: `auto` leaves those alone.
    """

    schedule: str = "retain"
    budget_gb: float | None = None
    sync: str = "upstream"
    audit: str = "first"
    order: str = "held-first"
    inputs: str = "exact"
    offload_gb: float = 0.0
    layout: str = "native"
    updates: str = "faithful"
    buffers: str = "sample"
    given: frozenset[str] = field(default=frozenset(), compare=False)

    @property
    def budget_bytes(self) -> float | None:
        """The budget in bytes; None to measure."""
        return None if self.budget_gb is None else self.budget_gb * 1e9

    def audits(self, window: int, audited: bool) -> bool:
        """Whether window number `window` (from 1) is to be audited; `audited` if an earlier one was."""
        if self.audit == "off":
            return False
        if self.audit == "first":
            return not audited
        return (window - 1) % int(self.audit.removeprefix("every:")) == 0

    def text(self) -> str:
        """One line, equal on all ranks of a sound run."""
        budget = "measured" if self.budget_gb is None else _text(self.budget_gb)
        names = ("sync", "audit", "order", "inputs")
        text = " ".join([f"schedule={self.schedule} budget_gb={budget}", *(f"{n}={getattr(self, n)}" for n in names)])
        text += f" buffers={self.buffers}" if self.schedule == "reweight" else ""
        text += f" offload_gb={_text(self.offload_gb)}" if self.offload_gb else ""
        text += f" layout={self.layout}" if self.layout != "native" else ""
        return text + (f" updates={self.updates}" if self.updates != "faithful" else "")

    def digest(self) -> str:
        """A short hash of the settings, for the start line."""
        return hashlib.sha256(self.text().encode()).hexdigest()[:12]


def _text(gigabytes: float) -> str:
    return f"{gigabytes:g}".replace("inf", "unlimited")


def _number(name: str, value: str) -> float | None:
    if value in ("measured", "unlimited"):
        return None if value == "measured" else math.inf
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not number >= 0:  # also refuses NaN
        raise _refuse(name, value)
    return number


def _refuse(name: str, value: str) -> LeanError:
    return LeanError("LG601", f"{name}={value!r} is not allowed", f"allowed: {ALLOWED[name]}")


def parse(values: Mapping[str, str]) -> Settings:
    """Checks raw values, names in lower case without the prefix. Raises LG601."""
    unknown = sorted(set(values) - set(ALLOWED))
    if unknown:
        known = "; ".join(f"{name} ({rule})" for name, rule in ALLOWED.items())
        near = difflib.get_close_matches(unknown[0], ALLOWED, n=1)
        hint = f"did you mean {near[0]} (LEANGRPO_{near[0].upper()})? " if near else ""
        names = ", ".join(f"{name} (LEANGRPO_{name.upper()})" for name in unknown)
        raise LeanError("LG601", f"unknown setting {names}", f"{hint}known settings: {known}")
    words = {
        "schedule": SCHEDULES,
        "sync": SYNCS,
        "order": ORDERS,
        "inputs": INPUTS,
        "layout": LAYOUTS,
        "updates": UPDATES,
        "buffers": BUFFERS,
    }
    for name, allowed in words.items():
        if values.get(name, allowed[0]) not in allowed:
            raise _refuse(name, values[name])
    chosen = {name: values[name] for name in words if name in values}
    audit = values.get("audit", Settings.audit)
    every = audit.removeprefix("every:")
    if audit not in ("first", "off") and not (audit.startswith("every:") and every.isdecimal() and int(every) >= 1):
        raise _refuse("audit", audit)
    budget = _number("budget_gb", values["budget_gb"]) if "budget_gb" in values else None
    offload = _number("offload_gb", values["offload_gb"]) if "offload_gb" in values else 0.0
    if offload is None:
        raise _refuse("offload_gb", values["offload_gb"])
    return Settings(budget_gb=budget, audit=audit, offload_gb=offload, given=frozenset(values), **chosen)


def read_file(path: Path) -> dict[str, str]:
    """Flat `name: value` lines with `#` comments: the runtime may not depend on a YAML parser."""
    values: dict[str, str] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        text = line.split("#", 1)[0].strip()
        if not text:
            continue
        name, colon, value = text.partition(":")
        name = name.strip()
        if not colon or name in values:
            what = "is given twice" if colon else "is no `name: value` line"
            raise LeanError("LG601", f"{path}:{number} {text!r} {what}", "correct the line, or put a # before it")
        values[name] = value.strip().strip("'\"")
    return values


def find_config(start: Path) -> Path | None:
    """The config file of the patched tree that holds `start`, if there is one."""
    for folder in start.resolve().parents:
        config = folder / ".leangrpo" / "config.yaml"
        if config.is_file():
            return config
    return None


def load(environ: Mapping[str, str] | None = None, start: Path | None = None) -> Settings:
    """Settings of this process. Raises LG601 for unknown names and values, from the file or the environment."""
    environ = os.environ if environ is None else environ
    config = find_config(start or Path(__file__))
    script = getattr(sys.modules["__main__"], "__file__", None)
    if config is None and start is None and script:  # the runtime is installed instead of copied into the tree
        config = find_config(Path(script))
    values = read_file(config) if config else {}
    for name, value in environ.items():
        if name.startswith("LEANGRPO_") and name not in NOT_SETTINGS:
            values[name.removeprefix("LEANGRPO_").lower()] = value.strip()
    return parse(values)
