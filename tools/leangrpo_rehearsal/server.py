"""The fork server: imports the heavy libraries once, then forks a process per rank.

Importing torch and diffusers takes seconds, a fork after it milliseconds. The server never imports anything from a
rehearsed tree. It speaks JSON lines: commands arrive on stdin, events leave on a descriptor of their own, because
libraries print to stdout. It ends, with its children, when stdin closes.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import select
import signal
import sys
import traceback
from typing import Any

_TICK_S = 0.02


def main() -> None:
    """Serves until stdin closes."""
    events = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    import torch

    torch.set_num_threads(1)
    children: dict[int, tuple[str, int]] = {}
    pending = b""
    try:
        while True:
            ready, _, _ = select.select([0], [], [], _TICK_S if children else 1.0)
            if ready:
                chunk = os.read(0, 1 << 16)
                if not chunk:
                    return
                *lines, pending = (pending + chunk).split(b"\n")
                for line in lines:
                    _serve(json.loads(line), children, events)
            _reap(children, events)
    finally:
        for pid in children:
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)  # from here on it writes nothing more


def _serve(command: dict[str, Any], children: dict[int, tuple[str, int]], events: Any) -> None:
    if command["op"] == "preload":
        problem = _preload(command["modules"])
        print(json.dumps({"event": "preloaded", "id": command["id"], "problem": problem}), file=events)
    elif command["op"] == "start":
        pid = _fork(command, events)
        children[pid] = (command["id"], command["rank"])
    elif command["op"] == "signal":
        for pid, (run, _) in children.items():
            if run == command["id"]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, command["signal"])


def _preload(modules: list[str]) -> str | None:
    for name in modules:
        module, _, attribute = name.partition(":")
        try:
            loaded = importlib.import_module(module)
            if attribute:
                getattr(loaded, attribute)
        except Exception as error:  # reported as "could not rehearse", whatever it is
            return f"{name}: {type(error).__name__}: {error}"
    gc.collect()
    gc.freeze()  # a collection in a child would copy every page that holds an object: a quarter of a second, timed
    return None


def _fork(command: dict[str, Any], events: Any) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        _become_child(command, events)
        from leangrpo_rehearsal import child

        getattr(child, command["call"])(command["job"])
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _become_child(command: dict[str, Any], events: Any) -> None:
    os.close(events.fileno())
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    for number, path in ((1, command["stdout"]), (2, command["stderr"])):
        os.dup2(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o644), number)
    with contextlib.suppress(Exception):  # Linux only: die with the server, however it dies
        import ctypes

        ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def _reap(children: dict[int, tuple[str, int]], events: Any) -> None:
    for pid in list(children):
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            run, rank = children.pop(pid)
            code = os.waitstatus_to_exitcode(status)
            print(json.dumps({"event": "exit", "id": run, "rank": rank, "code": code}), file=events)


if __name__ == "__main__":
    main()
