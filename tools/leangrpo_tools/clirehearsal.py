"""The options of the commands that run upstream's scripts: `verify-patch` and `bench-patch`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from leangrpo_tools.cliargs import Json, Name, Source

Python = Annotated[
    str | None, typer.Option(metavar="PYTHON", help="The interpreter that trains; default: the one that runs the kit.")
]


def verify_command(
    name: Name,
    script: Annotated[str, typer.Option(metavar="S", help="The training script to rehearse.")],
    tree: Annotated[Path | None, typer.Option(metavar="DEST", help="A patched tree; default: a fresh one.")] = None,
    source: Source = None,
    python: Python = None,
    schedule: Annotated[
        str, typer.Option(help="retain, reweight, recompute (upstream's own behaviour) or auto.")
    ] = "retain",
    buffers: Annotated[str, typer.Option(help="The patched run's LEANGRPO_BUFFERS: sample or affine.")] = "sample",
    sync: Annotated[str, typer.Option(help="The patched run's LEANGRPO_SYNC: upstream, group or late.")] = "upstream",
    ranks: Annotated[int, typer.Option(min=1, help="Processes.")] = 1,
    updates: Annotated[int, typer.Option(min=1, help="Optimizer updates to compare.")] = 4,
    updates_per_rollout: Annotated[int, typer.Option(min=1, help="Optimizer updates per rollout.")] = 2,
    precision: Annotated[str, typer.Option(help="fp32 or bf16 (autocast).")] = "fp32",
    checkpointing: Annotated[bool, typer.Option("--checkpointing", help="With activation checkpointing.")] = False,
    ema: Annotated[bool, typer.Option("--ema", help="With an average of the weights.")] = False,
    budget: Annotated[str, typer.Option(metavar="GB", help="The patched run's LEANGRPO_BUDGET_GB.")] = "unlimited",
    option: Annotated[
        list[str] | None, typer.Option(metavar="O=VALUE", help="An option of this script alone; may be repeated.")
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="A match with warnings is exit status 1, too.")] = False,
    thorough: Annotated[
        bool, typer.Option("--thorough", help="Rehearse branches, too, that the command line does not enter.")
    ] = False,
    json: Json = None,
) -> None:
    """Run upstream's own script on CPU, unpatched and patched, and compare every update."""
    from leangrpo_tools import show

    with show.outcome(json) as out:
        from leangrpo_tools.rehearsal import verify

        report = verify(
            name,
            script=script,
            tree=tree,
            source=source,
            python=python,
            schedule=schedule,
            buffers=buffers,
            sync=sync,
            ranks=ranks,
            updates=updates,
            updates_per_rollout=updates_per_rollout,
            precision=precision,
            checkpointing=checkpointing,
            ema=ema,
            budget=budget,
            options=_options(option),
            strict=strict,
            thorough=thorough,
        )
        out.done(report, show.rehearsed)


def bench_command(
    name: Name,
    script: Annotated[str, typer.Option(metavar="S", help="The training script to time.")],
    tree: Annotated[Path | None, typer.Option(metavar="DEST", help="A patched tree; default: a fresh one.")] = None,
    source: Source = None,
    python: Python = None,
    repeat: Annotated[int, typer.Option(min=1, help="Processes per way of running.")] = 3,
    schedule: Annotated[
        str, typer.Option(help="all: retain, reweight and fewer reductions; or one of them, or auto.")
    ] = "all",
    rollouts: Annotated[int, typer.Option(min=2, help="Rollouts of each; the first is not counted.")] = 3,
    sync: Annotated[str, typer.Option(help="The patched run's LEANGRPO_SYNC.")] = "upstream",
    ranks: Annotated[int, typer.Option(min=1, help="Processes at a time.")] = 1,
    updates_per_rollout: Annotated[int, typer.Option(min=1, help="Optimizer updates per rollout.")] = 2,
    precision: Annotated[str, typer.Option(help="fp32 or bf16 (autocast).")] = "fp32",
    checkpointing: Annotated[bool, typer.Option("--checkpointing", help="With activation checkpointing.")] = False,
    budget: Annotated[str, typer.Option(metavar="GB", help="The patched run's LEANGRPO_BUDGET_GB.")] = "unlimited",
    clock: Annotated[
        str, typer.Option(help="wall, or cpu: seconds of the process, where the machine does other things.")
    ] = "wall",
    option: Annotated[
        list[str] | None, typer.Option(metavar="O=VALUE", help="An option of this script alone; may be repeated.")
    ] = None,
    picture: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw it, too (.png; needs matplotlib).")] = None,
    json: Json = None,
) -> None:
    """Time upstream's own script on CPU, unpatched and patched in turn, beside the ratio that could be reached."""
    from leangrpo_tools import show

    with show.outcome(json) as out:
        from leangrpo_tools.rehearsal import bench

        report = bench(
            name, script=script, tree=tree, source=source, python=python, repeat=repeat, rollouts=rollouts,
            ranks=ranks, sync=sync, schedule=schedule,
            updates_per_rollout=updates_per_rollout, precision=precision, checkpointing=checkpointing, budget=budget,
            clock=clock, picture=picture, options=_options(option),
        )  # fmt: skip
        out.done(report, show.rehearsed)


def _options(given: list[str] | None) -> list[tuple[str, str]]:
    return [(name, value) for name, _, value in (item.partition("=") for item in given or ())]
