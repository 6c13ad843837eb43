"""Commands of others, bounded in time without a word: one that hangs is ended, with all that it has started."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

SILENT_S = 300.0
"""How long a command may neither say anything nor end, in seconds."""
TOO_LARGE = int(getattr(signal, "SIGXFSZ", 25))
"""The signal of a process that writes beyond the limit of a file's size (``ulimit -f``)."""


@dataclass(frozen=True)
class Done:
    """How a command ended: its status (negative: the signal that killed it) and what it wrote."""

    status: int
    stdout: bytes
    stderr: bytes


Start = Callable[[list[str], Path, dict[str, str], bool], "subprocess.Popen[bytes]"]


def _start(command: list[str], folder: Path, env: dict[str, str], own_session: bool) -> subprocess.Popen[bytes]:
    pipe = subprocess.PIPE
    return subprocess.Popen(
        command, cwd=folder, env=env, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=own_session
    )


def run(
    command: list[str], folder: Path, stdin: bytes, env: dict[str, str], *,
    heard: Callable[[bytes], None] | None = None, own_session: bool = True, start: Start = _start,
) -> Done:  # fmt: skip
    """Run a command to its end, or to its silence: then its status is -SIGKILL and stderr says so.

    Args:
        heard: is given stderr, chunk by chunk, as it comes.
        own_session: apart from the terminal, so that everything that the command has started ends with it.
        start: makes the process, with pipes for its three streams.
    """
    process = start(command, folder, env, own_session)
    said: queue.Queue[tuple[str, bytes]] = queue.Queue()
    assert process.stdin and process.stdout and process.stderr
    for task in (
        threading.Thread(target=_feed, args=(process.stdin, stdin), daemon=True),
        threading.Thread(target=_listen, args=("stdout", process.stdout, said), daemon=True),
        threading.Thread(target=_listen, args=("stderr", process.stderr, said), daemon=True),
    ):
        task.start()
    texts: dict[str, list[bytes]] = {"stdout": [], "stderr": []}
    listening = len(texts)
    try:
        while listening:
            name, chunk = said.get(timeout=SILENT_S)
            listening -= not chunk
            texts[name].append(chunk)
            if heard is not None and name == "stderr":
                heard(chunk)
        process.wait(timeout=SILENT_S)
    except (queue.Empty, subprocess.TimeoutExpired):
        _end(process, own_session)
        texts["stderr"].append(f"\nfatal: operation timed out: not a word in {SILENT_S:.0f} s".encode())
    except BaseException:
        _end(process, own_session)
        raise
    return Done(process.returncode, b"".join(texts["stdout"]), b"".join(texts["stderr"]))


def _feed(pipe: IO[bytes], content: bytes) -> None:
    with suppress(OSError):  # it ended without reading everything; its status says why
        pipe.write(content)
    with suppress(OSError):
        pipe.close()


def _listen(name: str, pipe: IO[bytes], said: queue.Queue[tuple[str, bytes]]) -> None:
    while chunk := os.read(pipe.fileno(), 1 << 16):
        said.put((name, chunk))
    pipe.close()
    said.put((name, b""))


def _end(process: subprocess.Popen[bytes], own_session: bool) -> None:
    with suppress(OSError):
        if own_session and hasattr(os, "killpg"):
            os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.wait()
