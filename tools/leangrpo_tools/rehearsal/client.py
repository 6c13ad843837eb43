"""The parent's side of the fork server: starts ranks, watches for progress, collects exits."""

from __future__ import annotations

import dataclasses
import json
import os
import queue
import signal
import subprocess
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from leangrpo_tools.errors import KitError
from leangrpo_tools.rehearsal.interpreter import Interpreter, environment, examine, lent


@dataclasses.dataclass
class RankExit:
    """How one rank's process ended. `hung` is where it was when the watchdog ended it."""

    rank: int
    code: int | None = None
    hung: str | None = None


class ForkServer:
    """A running fork server. Use as a context manager; several rehearsals can share one."""

    def __init__(self, folder: Path, python: Interpreter | None = None) -> None:
        """`folder` gets what runs in the interpreter, by default the kit's own."""
        python = python or examine()
        env = environment(python.own)
        # Freed memory stays with the process, as it does on CUDA: else each kept graph and gradient is timed with the
        # page faults of fresh memory.
        env.update(MALLOC_MMAP_MAX_="0", MALLOC_TRIM_THRESHOLD_=str(1 << 40), MALLOC_TOP_PAD_=str(1 << 26))
        env.update(
            OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", PYTHONDONTWRITEBYTECODE="1", TOKENIZERS_PARALLELISM="false",
            CUDA_VISIBLE_DEVICES="", HF_HUB_OFFLINE="1", WANDB_MODE="disabled", PYTHONUNBUFFERED="1",
            PYTHONPATH=os.pathsep.join(filter(None, [str(lent(folder)), env.get("PYTHONPATH")])),
        )  # fmt: skip
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the server)
        self._process = subprocess.Popen(
            [python.path, "-B", "-m", "leangrpo_rehearsal.server"], cwd=folder,  # else it would import from here
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, env=env, text=True, bufsize=1,
        )  # fmt: skip
        self._events: dict[str, queue.Queue[dict[str, Any] | None]] = {}
        self._lock = threading.Lock()
        self._count = 0
        self._preloaded: set[str] = set()
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def __enter__(self) -> ForkServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the server and whatever it still runs."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._listener.join(timeout=10)
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._errors.close()

    def preload(self, modules: tuple[str, ...]) -> None:
        """Imports modules in the server. A module that cannot be imported is LG401."""
        missing = [name for name in modules if name not in self._preloaded]
        if not missing:
            return
        run, events = self._open()
        self._send({"op": "preload", "id": run, "modules": missing})
        try:
            event = events.get(timeout=600)
        except queue.Empty:
            event = None
        if event is None:
            raise KitError(
                "LG401",
                f"the rehearsal's fork server ended: {self._last_words()}",
                cause="torch cannot be imported, or the process ran out of memory or was killed",
                fix="python -c 'import torch, diffusers', then run verify-patch again",
            )
        if event["problem"]:
            raise KitError("LG401", f"a module the rehearsal needs cannot be imported: {event['problem']}",
                           cause="the environment lacks it, or has an incompatible version",
                           fix="install the kit's rehearsal extra: pip install 'leangrpo-kit[verify]'")  # fmt: skip
        self._preloaded.update(missing)

    def run(self, call: str, jobs: list[dict[str, Any]], logs: Path, timeout_s: float) -> list[RankExit]:
        """Runs one process per job, in parallel, until all end. Ranks without progress for `timeout_s` are ended.

        Once a rank failed the others get a few seconds to notice, since they may wait for it for ever.
        """
        run, events = self._open()
        logs.mkdir(parents=True, exist_ok=True)
        exits = [RankExit(rank) for rank in range(len(jobs))]
        for rank, job in enumerate(jobs):
            self._send({
                "op": "start", "id": run, "rank": rank, "call": call, "job": job,
                "stdout": str(logs / f"rank{rank}.out"), "stderr": str(logs / f"rank{rank}.err"),
            })  # fmt: skip
        progress = [[logs / f"rank{rank}.out", logs / f"rank{rank}.err", Path(job.get("out", logs)) / "progress"]
                    for rank, job in enumerate(jobs)]  # fmt: skip
        began, failed_at = time.time(), None
        while any(item.code is None for item in exits):
            try:
                event = events.get(timeout=0.5)
            except queue.Empty:
                event = {}
            if event is None:
                for item in exits:
                    item.code = -1 if item.code is None else item.code
                break
            if event:
                exits[event["rank"]].code = event["code"]
                if event["code"] != 0 and failed_at is None:
                    failed_at = time.time()
                continue
            idle = [time.time() - max([began, *(p.stat().st_mtime for p in paths if p.exists())]) for paths in progress]
            waiting = [item for item in exits if item.code is None and item.hung is None]
            # Ranks wait for one another, so a hang is everybody without progress.
            stuck = all(idle[item.rank] > timeout_s for item in waiting)
            if waiting and (stuck or (failed_at is not None and time.time() - failed_at > 10)):
                self._end(run, [item for item in waiting], progress, stuck)
        return exits

    def _end(self, run: str, waiting: list[RankExit], progress: list[list[Path]], stuck: bool) -> None:
        for item in waiting:
            where = progress[item.rank][-1]
            text = where.read_text().strip() if where.exists() else "before the first policy forward"
            item.hung = text if stuck else f"waiting for a rank that failed; {text}"
        self._send({"op": "signal", "id": run, "signal": int(signal.SIGUSR1)})  # stacks into the log
        time.sleep(0.5)
        self._send({"op": "signal", "id": run, "signal": int(signal.SIGKILL)})

    def _last_words(self) -> str:
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else "without a message"

    def _open(self) -> tuple[str, queue.Queue[dict[str, Any] | None]]:
        with self._lock:
            self._count += 1
            run = str(self._count)
            self._events[run] = queue.Queue()
        return run, self._events[run]

    def _send(self, command: dict[str, Any]) -> None:
        with self._lock:
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps(command) + "\n")

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            event = json.loads(line)
            self._events[event["id"]].put(event)
        for waiting in list(self._events.values()):
            waiting.put(None)
