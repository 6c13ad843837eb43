"""Kill a process for real at its n-th change of a folder, in the middle of a write where it is one."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

KILLED, FAILED = 9, 3
READING = {"rev-parse", "symbolic-ref", "config", "ls-tree", "cat-file", "merge-file", "ls-files", "diff", "version"}
CHANGES = {"os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.chmod", "os.link", "os.symlink", "os.truncate"}
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


def killed_at(step: int, folder: Path, action: Callable[[], Any]) -> bool:
    """Run ``action`` in a fork and end that process (``os._exit``: nothing is cleaned up) at the given change.

    A change is a rename, removal, new folder, change of mode or opening for writing below ``folder``, or a git command
    that may write. What is opened for writing is left with half a text. Returns False if there were fewer changes.
    """
    pid = os.fork()
    if pid == 0:
        try:
            sys.addaudithook(_hook(step, str(folder)))
            action()
        except BaseException:
            traceback.print_exc()
            os._exit(FAILED)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert code in (0, KILLED), f"step {step}: exit {code}"
    return code == KILLED


def _hook(step: int, folder: str) -> Callable[[str, tuple[Any, ...]], None]:
    left, busy = step, False

    def hook(event: str, args: tuple[Any, ...]) -> None:
        nonlocal left, busy
        if busy or not _counts(event, args, folder):
            return
        if left:
            left -= 1
            return
        busy = True
        if event == "open" and os.path.isdir(os.path.dirname(args[0])) and not str(args[0]).endswith(".lock"):
            with open(args[0], "wb") as out:
                out.write(b"half a te")
        os._exit(KILLED)

    return hook


def _counts(event: str, args: tuple[Any, ...], folder: str) -> bool:
    if event == "subprocess.Popen":
        words = [str(word) for word in args[1]]
        return not READING & set(words)
    if event == "open":
        path, mode, flags = args
        writes = any(char in mode for char in "wxa+") if isinstance(mode, str) else bool((flags or 0) & WRITING)
        return writes and str(path).startswith(folder)
    if event not in CHANGES:
        return False
    return any(str(path).startswith(folder) for path in args[:2] if isinstance(path, (str, os.PathLike)))
