"""`leangrpo plan`: what a launch file or preset would gain, from its text alone, before anything is patched or run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from leangrpo_tools import lock, recipe
from leangrpo_tools.errors import KitError
from leangrpo_tools.plan import facts, fromflags, frompreset
from leangrpo_tools.plan.asked import Asked, Machine
from leangrpo_tools.plan.predict import Speeds
from leangrpo_tools.plan.report import PlanReport

__all__ = ["Machine", "PlanReport", "Speeds", "plan"]


def plan(
    name: str,
    launch_file: Path | None = None,
    ranks: int | None = None,
    gpu_gb: float = 80.0,
    other_gb: float = 0.0,
    *,
    preset: str | None = None,
    script: str | None = None,
    overrides: Sequence[str] = (),
    network: str | None = None,
    machine: Machine | None = None,
    line: int | None = None,
) -> PlanReport:
    """Read upstream's launch file, or a preset of its config, and predict what the patch changes.

    Args:
        name: the upstream, in any case.
        launch_file: upstream's own launch script. It is read, never run.
        ranks: world size, where the file leaves it open, or to ask about another one.
        gpu_gb: memory of a GPU, in gigabytes (1e9 bytes).
        other_gb: what else stays on each GPU: VAE, text encoders, reward model.
        preset: `NAME`, or `FILE:NAME`, of the Python config that the upstream keeps its settings in, with or instead of
            a launch file; such a config is read as text, too.
        script: the script that it starts, where that has another name than upstream's, or the one that trains the
            preset, where that is not one of upstream's.
        overrides: `ENTRY=VALUE` for entries of the preset, `FLAG=VALUE` for flags of a launch file.
        network: the network that is trained, by the kit's name or its repository's, in place of the path that the
            launch file or preset names.
        machine: memory, speeds and measured costs, in place of `gpu_gb` and `other_gb`.
        line: of the launch file, where several of its lines start training.

    Raises:
        KitError: LG102 unknown upstream; LG501, LG502 the launch file; LG503 ranks not known; LG504 a flag's value;
            LG505 no update would ever be made, or upstream stops; LG506 not plannable; LG508, LG509 the preset; LG210 a
            script that the kit leaves alone.
    """
    upstream = lock.load().find(name)
    _check(machine or Machine(gpu_gb, other_gb))
    known = facts.load(upstream)
    asked = Asked(
        launch_file, preset, script, list(overrides), ranks, network, machine or Machine(gpu_gb, other_gb), line
    )
    if known.config is not None:
        return frompreset.plan(upstream, known, known.config, asked)
    if preset:
        what = f"{upstream} keeps its settings in launch files, not in presets"
        cause = "--preset was given, which is for upstreams with a Python config"
        raise KitError("LG501", what, cause=cause, fix="give --launch FILE alone")
    if launch_file is None:
        cause = f"{upstream} keeps its settings in its launch files, so there is nothing to read without one"
        raise KitError("LG501", "--launch is missing", cause=cause, fix=f"--launch {_shipped(upstream)}")
    return fromflags.plan(upstream, known, launch_file, asked)


def _shipped(upstream: str) -> str:
    """Upstream's own launch files, to choose from."""
    files = dict.fromkeys(file for script in recipe.load(upstream).scripts.values() for file in script.launch)
    return f"PATH/TO/FILE, of your own or one of upstream's: {', '.join(files)}"


LARGEST = 1e12
"""Of what is asked about a machine; beyond it sums are no longer what they say."""


def _check(machine: Machine) -> None:
    figures = {**vars(machine), **vars(machine.speeds)}
    for name, value in figures.items():
        least = 1e-9 if name == "graph_gb" else 0
        if isinstance(value, (int, float)) and not least <= value <= LARGEST:
            option = f"--{name.replace('_', '-')}"
            cause = "negative, no number, or beyond what a machine can have"
            raise KitError("LG504", f"{option} is {value:g}", cause=cause, fix=f"give a number from 0 to {LARGEST:g}")
