"""What `leangrpo plan` says of a rehearsal: of its launch line, with the costs that were measured natively."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from leangrpo_rehearsal.base import Config, Script
from leangrpo_tools.errors import KitError
from leangrpo_tools.plan import Machine, PlanReport, Speeds, plan
from leangrpo_tools.plan.choice import Choice

if TYPE_CHECKING:
    from leangrpo_tools.rehearsal.timing import Timing

ENDLESS = 1e9
"""Gigabytes of memory, and per second, where neither is to count."""


def read(script: Script, upstream: str, tree: Path, workdir: Path, config: Config, machine: Machine) -> PlanReport:
    """The plan of the launch line that the rehearsal stands for. `tree` gets a file with it. Raises as `plan`."""
    words = [script.path, *script.planned(workdir, config)]
    file = tree / "rehearsal.sh"
    file.write_text(f"torchrun --nproc_per_node={config.ranks} {shlex.join(words)}\n", encoding="utf-8")
    return plan(upstream, file, machine=machine)


def measured(native: Timing, report: PlanReport) -> Machine:
    """What the native runs tell of the costs: seconds per sample and step of each kind of work, and of the rest.

    Where ranks communicate, that is inside the seconds of forwards and backwards. Forwards of evaluations are a part of
    the rest.
    """
    size = report.rollout
    per_step = size.calls / size.batch
    no_grad = native.cost("no_grad") / native.calls["no_grad"] * per_step
    grad, backward = (native.cost(kind) / native.calls["grad"] * per_step for kind in ("grad", "backward"))
    counted = size.forwards(patched=False)
    rest = native.median - counted["no_grad"] * no_grad - counted["grad"] * (grad + backward)
    speeds = Speeds(link_gb=ENDLESS, forward_seconds=no_grad, rest_seconds=max(rest, 0.0))
    return Machine(ENDLESS, speeds=speeds, grad_forward=grad / no_grad, backward=backward / no_grad)


def ratios(
    script: Script, upstream: str, tree: Path, workdir: Path, config: Config, timings: list[Timing]
) -> dict[str, float]:
    """The predicted ratio of each way of running, by its name. Empty where the upstream cannot be planned."""
    try:
        counted = read(script, upstream, tree, workdir, config, Machine(ENDLESS))
        report = read(script, upstream, tree, workdir, config, measured(timings[0], counted))
    except KitError as error:
        if error.code != "LG506":
            raise
        return {}
    found = {"native": 1.0, "recompute": 1.0}
    wanted = Choice("retain")  # other reductions are not in the costs of one machine
    rows = [row for row in report.table.rows if row.choice == wanted]
    if config.budget_gb == "unlimited" and rows:
        found[wanted.schedule] = rows[0].ratio
    return found
