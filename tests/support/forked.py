"""Runs pytest in forks of a process that has imported torch already: many short runs, each with a runtime of its own.

As a program it reads jobs from stdin, a JSON object per line (`folder` with a copy of the runtime, `arguments`, `log`),
and answers each with pytest's exit status.
"""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

SECONDS = 300


class Runner:
    """One such process, started when first asked. Use from one thread at a time."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def run(self, folder: Path, arguments: Sequence[str]) -> tuple[int, str]:
        """The exit status of pytest with the runtime in `folder`, and its output; a hang is status -9."""
        if self._process is None or self._process.poll() is not None:
            command = [sys.executable, __file__]
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
            )
        assert self._process.stdin is not None and self._process.stdout is not None
        log = folder / "pytest.log"
        self._process.stdin.write(
            json.dumps({"folder": str(folder), "arguments": list(arguments), "log": str(log)}) + "\n"
        )
        self._process.stdin.flush()
        watch = threading.Timer(SECONDS, os.killpg, (self._process.pid, signal.SIGKILL))
        watch.start()
        answer = self._process.stdout.readline()
        watch.cancel()
        return int(answer or -9), log.read_text() if log.exists() else ""

    def close(self) -> None:
        if self._process is not None and self._process.poll() is None:
            assert self._process.stdin is not None and self._process.stdout is not None
            self._process.stdin.close()
            self._process.wait(timeout=10)
            self._process.stdout.close()


def _serve() -> None:
    import pytest
    import torch
    import torch.distributed.fsdp
    import torch.utils.checkpoint
    import yaml

    assert yaml
    sys.path = [path for path in sys.path if path != str(Path(__file__).parent)]
    torch.set_num_threads(1)
    torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))]).zero_grad()  # imports more at its first use
    for line in sys.stdin:
        job = json.loads(line)
        child = os.fork()
        if child:
            print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
            continue
        log = os.open(job["log"], os.O_CREAT | os.O_WRONLY)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.chdir(job["folder"])
        sys.path.insert(0, job["folder"])
        import leangrpo_core

        assert leangrpo_core.__file__ is not None and leangrpo_core.__file__.startswith(job["folder"])
        status = int(pytest.main(job["arguments"]))
        sys.stdout.flush()
        os._exit(status)


if __name__ == "__main__":
    _serve()
