"""`verify-patch` and `bench-patch`: upstream's own training script on CPU, unpatched and patched, compared or timed."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from leangrpo_tools.errors import KitError

if TYPE_CHECKING:
    from leangrpo_rehearsal.base import Config
    from leangrpo_tools.rehearsal.report import Report
    from leangrpo_tools.rehearsal.runs import Injection
    from leangrpo_tools.rehearsal.session import Session
    from leangrpo_tools.rehearsal.timing import BenchReport
    from leangrpo_tools.rehearsal.trees import Trees

TIMEOUT_S = 120.0
SCHEDULES = ("retain", "reweight", "recompute", "auto")
BUFFERS = ("sample", "affine")
SYNCS = ("upstream", "group", "late")
PRECISIONS = ("fp32", "bf16")
CLOCKS = ("wall", "cpu")
OVERRULED = [
    f"LEANGRPO_{name}"
    for name in ("SCHEDULE", "BUFFERS", "BUDGET_GB", "OFFLOAD_GB", "SYNC", "ORDER", "INPUTS", "LAYOUT", "UPDATES")
]
HELP = "verify-patch --help"


def verify(
    name: str,
    *,
    script: str,
    tree: Path | str | None = None,
    source: str | None = None,
    python: str | Path | None = None,
    schedule: str = "retain",
    buffers: str = "sample",
    sync: str = "upstream",
    ranks: int = 1,
    updates: int = 2,
    updates_per_rollout: int = 1,
    precision: str = "fp32",
    checkpointing: bool = False,
    ema: bool = False,
    budget: str = "unlimited",
    options: Sequence[tuple[str, str]] = (),
    inject: Sequence[Injection] = (),
    session: Session | None = None,
    timeout_s: float = TIMEOUT_S,
    strict: bool = False,
    thorough: bool = False,
) -> Report:
    """Rehearses one script of an upstream.

    Args:
        name: the upstream, in any case.
        script: the script's name in the recipe.
        tree: a patched checkout to rehearse; by default a fresh one, made from the cache or `source`.
        python: the interpreter that rehearses, by default the kit's own or the session's.
        schedule: the patched run's, `retain`, `reweight`, `recompute` or `auto`.
        buffers: the patched run's LEANGRPO_BUFFERS, `sample` or `affine`.
        sync: the patched run's LEANGRPO_SYNC, `upstream`, `group` or `late`.
        ranks: processes.
        updates: optimizer updates to compare.
        updates_per_rollout: optimizer updates made with the samples of one rollout.
        precision: `fp32` (autocast off) or `bf16` (autocast as upstream has it).
        checkpointing: with activation checkpointing.
        ema: with an average of the weights, where the script has one.
        budget: the patched run's LEANGRPO_BUDGET_GB.
        options: further options of the script's rehearsal, as (name, value).
        inject: functions to run in chosen ranks before the script starts, for tests.
        session: a fork server and native runs to share between rehearsals.
        timeout_s: how long a rank may go without progress.
        strict: a warning makes the report's exit code 1.
        thorough: also rehearses the branches of the script that this configuration does not enter.

    Raises LG401 when upstream's script cannot be run here, LG405 for an interpreter that cannot rehearse, LG403 for a
    configuration that the script does not have, LG404 for a package that is missing or too old.
    """
    _check(schedule, sync, precision, budget, buffers)
    chosen = dict(
        ranks=ranks, updates=updates, updates_per_rollout=updates_per_rollout, precision=precision,
        checkpointing=checkpointing, ema=ema, schedule=schedule, budget_gb=budget, sync=sync,
        buffers=buffers, options=tuple(options),
    )  # fmt: skip
    with _both_trees(name, script, tree, source, session, python, chosen) as (shared, found, config, say):
        from leangrpo_tools.rehearsal.rehearse import rehearse

        report = rehearse(
            found.rehearsal, found.native, found.patched, config, session=shared, upstream=found.upstream,
            inject=inject, timeout_s=timeout_s, say=say, file=found.file, thorough=thorough,
        )  # fmt: skip
        report.strict = strict
        report.notes += found.notes
        report.tested.append(f"run by {shared.python.describe()}")
        shared.keep |= bool(report.failures)
        return report


def bench(
    name: str,
    *,
    script: str,
    tree: Path | str | None = None,
    source: str | None = None,
    python: str | Path | None = None,
    repeat: int = 3,
    rollouts: int = 3,
    ranks: int = 1,
    updates_per_rollout: int = 2,
    precision: str = "fp32",
    checkpointing: bool = False,
    budget: str = "unlimited",
    sync: str = "upstream",
    schedule: str = "all",
    clock: str = "wall",
    picture: Path | None = None,
    options: Sequence[tuple[str, str]] = (),
) -> BenchReport:
    """Times one script natively and patched, in turn; see :func:`verify` for what the arguments mean.

    Args:
        repeat: processes per way of running.
        rollouts: of each process, of which the first is not counted.
        schedule: what is timed beside native and `recompute`: one, or `all` (see `ways.py`); with `auto` also the
            others, and only the rollouts after it has chosen count.
        picture: a file for a picture of the ratios.
        clock: `wall` seconds, or `cpu` seconds of each rank, which other work on the machine hardly changes.

    Raises LG401 when upstream's script cannot be run here, LG405 for an interpreter that cannot rehearse, LG403 for a
    configuration that the script does not have, LG404 for a package that is missing or too old.
    """
    _check("retain" if schedule == "all" else schedule, sync, precision, budget)
    if picture is not None:
        from leangrpo_tools.rehearsal import picture as pictures

        pictures.check(picture)
    if clock not in CLOCKS:
        raise KitError("LG403", f"--clock {clock}", cause=f"allowed: {', '.join(CLOCKS)}", fix="bench-patch --help")
    chosen = dict(
        ranks=ranks, updates_per_rollout=updates_per_rollout, precision=precision, checkpointing=checkpointing,
        budget_gb=budget, sync=sync, schedule=schedule, clock=clock, options=tuple(options),
    )  # fmt: skip
    with _both_trees(name, script, tree, source, None, python, chosen) as (shared, found, config, say):
        from leangrpo_tools.rehearsal.timing import measure

        report = measure(
            found.rehearsal, found.native, found.patched, config, session=shared, upstream=found.upstream,
            repeat=repeat, rollouts=rollouts, say=say,
        )  # fmt: skip
        if picture is not None:
            pictures.draw(report, picture)
        return report


@contextlib.contextmanager
def _both_trees(
    name: str, script: str, tree: Path | str | None, source: str | None, session: Session | None,
    python: str | Path | None, chosen: dict[str, Any],
) -> Iterator[tuple[Session, Trees, Config, Callable[[str], None]]]:  # fmt: skip
    """A session, the untouched and the patched tree of a script, what is rehearsed, and somebody to tell what happens.

    What the script cannot be rehearsed with is refused before a tree is made.
    """
    if tree is not None and source is not None:
        raise KitError("LG103", "--tree does not go with --source", fix="leave one of them out")
    from leangrpo_tools.rehearsal import session as sessions
    from leangrpo_tools.rehearsal import trees
    from leangrpo_tools.rehearsal.interpreter import examine
    from leangrpo_tools.rehearsal.rehearse import configured, find_script

    with contextlib.ExitStack() as stack:
        shared = session or stack.enter_context(sessions.Session(python=examine(python)))
        say = stack.enter_context(_progress())
        folder = shared.folder()
        if tree is None:
            from leangrpo_tools import fetch, lock, recipe
            from leangrpo_tools.apply import apply

            upstream = lock.load().find(name)
            for notice in fetch.unused(upstream, lock.load().upstreams[upstream], source):
                print(f"notice: {notice}", file=sys.stderr)
            rehearsal = recipe.load(upstream).find(script).rehearsal
            if rehearsal:
                configured(rehearsal, chosen)
                wanted = find_script(rehearsal)
                shared.python.require(script, wanted.preload, wanted.needs)
            say(f"patching a fresh checkout of {name}")
            root = folder / "checkout"
            apply(upstream, root, source=source, scripts=[script])
        else:
            root = Path(tree)
        found = trees.export(root, folder, script, upstream=name)
        wanted = find_script(found.rehearsal)
        shared.python.require(script, wanted.preload, wanted.needs)
        try:
            yield shared, found, configured(found.rehearsal, chosen), say
        except KitError as error:
            shared.keep |= error.code == "LG401"  # the message points into the logs
            raise


def _check(schedule: str, sync: str, precision: str, budget: str, buffers: str = "sample") -> None:
    exported = sorted(name for name in OVERRULED if name in os.environ)
    if exported:
        raise KitError(
            "LG403", f"{', '.join(exported)} in the environment would not be used",
            cause="what is rehearsed is what the options of this command say",
            fix=f"unset {' '.join(exported)}; see --schedule, --sync, --budget and --option, as order=upstream",
        )  # fmt: skip
    chosen = (
        ("schedule", schedule, SCHEDULES), ("sync", sync, SYNCS), ("precision", precision, PRECISIONS),
        ("buffers", buffers, BUFFERS),
    )  # fmt: skip
    for name, value, allowed in chosen:
        if value not in allowed:
            raise KitError("LG403", f"--{name} {value}", cause=f"allowed: {', '.join(allowed)}", fix=HELP)
    try:
        bad = budget not in ("measured", "unlimited") and not float(budget) >= 0
    except ValueError:
        bad = True
    if bad:
        raise KitError("LG403", f"--budget {budget}", cause="allowed: measured, unlimited, or gigabytes", fix=HELP)


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """A spinner with the current stage on a terminal, a line per stage elsewhere."""
    if not sys.stderr.isatty():
        yield lambda text: print(f"rehearsing: {text}", file=sys.stderr, flush=True)
        return
    from rich.console import Console

    with Console(stderr=True).status("rehearsing") as status:
        yield lambda text: status.update(f"rehearsing: {text}")
