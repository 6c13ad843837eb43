"""One rank's process: forked from the server, runs upstream's script with the stand-ins and the recorder in place."""

from __future__ import annotations

import dataclasses
import faulthandler
import functools
import importlib
import importlib.util
import json
import os
import runpy
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from leangrpo_rehearsal.base import Config, Context, Script


def load_script(module: str) -> Script:
    """The rehearsal bound to `SCRIPT` in a module given by its dotted name."""
    return importlib.import_module(module).SCRIPT


def prepare(job: dict[str, Any]) -> None:
    """Writes the tiny checkpoints and data that every variant gets a copy of."""
    import torch

    torch.manual_seed(0)
    workdir = Path(job["workdir"])
    script = load_script(job["module"])
    for folder in ("", *script.folders):
        (workdir / folder).mkdir(parents=True, exist_ok=True)
    script.prepare(workdir, Config(**job["config"]))


def run(job: dict[str, Any]) -> None:
    """Runs the script as rank `job["rank"]` and records it under `job["out"]`."""
    out = Path(job["out"])
    out.mkdir(parents=True, exist_ok=True)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # the watchdog asks where a rank hangs
    try:
        _start(job, out)
    except BaseException as error:
        failure = {"kind": type(error).__name__, "message": str(error), "traceback": traceback.format_exc()}
        (out / "failure.json").write_text(json.dumps(failure))
        raise


def compare(job: dict[str, Any]) -> None:
    """Compares the records of two runs, or of the ranks of one, and writes what comes out as JSON."""
    from leangrpo_rehearsal import compare as comparing

    runs = [comparing.load(Path(run["out"]), run["ranks"]) for run in job["runs"]]
    if len(runs) == 1:
        found: list[Any] = comparing.replicas(runs[0])
    else:
        found = [dataclasses.asdict(item) for item in comparing.compare(runs[0], runs[1], job["across_ranks"])]
    Path(job["result"]).write_text(json.dumps(found))


def _start(job: dict[str, Any], out: Path) -> None:
    script, config = load_script(job["module"]), Config(**job["config"])
    tree, workdir = Path(job["tree"]), Path(job["workdir"])
    for name in [name for name in os.environ if name.startswith("LEANGRPO_")]:
        del os.environ[name]
    os.environ.update(job["env"])
    os.chdir(workdir)
    sys.dont_write_bytecode = True
    target, folders = _program(script, tree)
    sys.path[:0] = folders
    sys.argv = [str(target), *job["argv"]]

    from leangrpo_rehearsal import double, eightbit, shapes, shims, stubs, wrappers
    from leangrpo_rehearsal.interleave import Turns
    from leangrpo_rehearsal.recorder import Recorder, StopRehearsal

    # Collectives wait longer than the watchdog, which says more than their time-out would.
    shims.install(config.precision, Path(job["store"]), job["timeout_s"] + 60)
    if job["double"]:
        double.install()
    wrappers.install()
    always = ("wandb", "bitsandbytes") if eightbit.asked_for(tree / script.path) else ("wandb",)
    stubs.install(script.stubs, always=always)
    recorder = Recorder(out, job["updates"], Path(job["follow"]) if job["follow"] else None)
    _guard(recorder)
    recorder.turns, recorder.per_turn = Turns.of(job), config.updates_per_rollout
    recorder.clock = time.process_time if config.clock == "cpu" else time.perf_counter
    context = Context(job["rank"], config.ranks, job["variant"], config, workdir, tree, recorder)
    recorder.average = (script.averaged(config) and not context.patched) or job["once"]
    if job["once"]:
        wrappers.without_reductions()
    script.install(context)
    noted = shapes.Notes() if job["note"] else shapes.Repeated(Path(job["shapes"])) if job["shapes"] else None
    if noted is not None:
        noted.install(script.policy)
    recorder.install(script.policy)
    if job["variant"] == "control" and job["rank"] == 0:
        script.flip_advantage(context)
    for injection in job["inject"]:
        _function(injection["function"])(dataclasses.replace(context, args=injection.get("args", {})))
    if recorder.turns is not None:
        recorder.turns.wait(recorder.beat)
    try:
        runpy.run_path(str(target), run_name="__main__")
    except StopRehearsal:
        pass
    except SystemExit as error:
        if error.code not in (None, 0):
            raise
    recorder.finish()
    wrappers.write(out, recorder.networks)
    eightbit.write(out)
    if isinstance(noted, shapes.Notes):
        noted.write(out)
    _leave()


class RecorderFault(RuntimeError):
    """The rehearsal could not write down what it saw. Says nothing of the script."""


def _guard(recorder: Any) -> None:
    """What fails in the recorder's own work is told apart from what fails in the script."""

    def guarded(work: Any) -> Any:
        @functools.wraps(work)
        def done(*args: Any, **kwargs: Any) -> Any:
            try:
                return work(*args, **kwargs)
            except Exception as error:
                raise RecorderFault(f"{type(error).__name__}: {error}") from error

        return done

    for name in ("_capture", "_before_step", "_after_step", "note", "finish"):
        setattr(recorder, name, guarded(getattr(recorder, name)))


def _program(script: Script, tree: Path) -> tuple[Path, list[str]]:
    """The file that is run, and the folders that come first on sys.path for it."""
    if not script.driver:
        target = tree / script.path
        return target, [str(target.parent), str(tree)]
    spec = importlib.util.find_spec(script.driver)
    assert spec is not None and spec.origin is not None
    return Path(spec.origin), [str(tree)]


def _leave() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.barrier()  # no rank leaves while another still talks to it
        dist.destroy_process_group()


def _function(name: str) -> Any:
    """`package.module:function` or `path/to/file.py:function`."""
    where, _, attribute = name.rpartition(":")
    if not where.endswith(".py"):
        return getattr(importlib.import_module(where), attribute)
    spec = importlib.util.spec_from_file_location("leangrpo_injection_" + Path(where).stem, where)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, attribute)
