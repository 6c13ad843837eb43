"""How a command ends: with its result, or with an error under a code; never with a traceback or half a file.

Exit statuses beside those of :mod:`leangrpo_tools.errors`: 130 after Ctrl-C and 141 when nobody reads the output any
more, as the shell reports other tools.
"""

from __future__ import annotations

import errno
import io
import json
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from typing import Any

from leangrpo_tools.disk import BAD_NAME, FULL, bad_path, disk_full, is_full, no_room, problem
from leangrpo_tools.errors import KitError
from leangrpo_tools.gitcmd import GitFailed, clean_environment
from leangrpo_tools.packages import broken

DEBUG = "LEANGRPO_DEBUG"
"""The variable that has tracebacks printed."""


class Unheard(Exception):
    """Whoever read the output has gone."""


def start() -> None:
    """Make the standard streams fit to use: open, and able to print every name."""
    with suppress(OSError):
        while (number := os.open(os.devnull, os.O_RDWR)) <= 2:  # or the next file would take the place of one of them
            os.set_inheritable(number, True)
        os.close(number)
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def on_terminal() -> bool:
    """Whether colour is wanted on stdout, see no-color.org."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def say(text: str | bytes) -> None:
    """Print, and see to it that it arrives. Raises Unheard, LG106 and LG112."""
    if sys.stdout is None:
        raise KitError("LG112", "standard output is closed", fix="redirect it: >/dev/null")
    try:
        if isinstance(text, bytes):
            sys.stdout.flush()
            sys.stdout.buffer.write(text)
        else:
            sys.stdout.write(text)
        sys.stdout.flush()
    except OSError as err:
        with suppress(OSError, ValueError):  # Python flushes once more when it ends
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(err, BrokenPipeError):
            raise Unheard from err
        code = "LG106" if err.errno in FULL else "LG112"
        raise KitError(code, f"standard output cannot be written: {err.strerror}", fix="redirect it elsewhere") from err


def write_file(path: Path, content: bytes) -> None:
    """Write a file complete or not at all. A device, or a pipe that somebody reads, is written to as it is.

    Raises LG106, LG112 and LG131.
    """
    try:
        if path.exists() and (not path.is_file() or str(path).startswith(("/dev/", "/proc/"))):
            flags = os.O_WRONLY | os.O_APPEND | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0)
            number = os.open(path, flags)
            os.set_blocking(number, True)
            with open(number, "wb") as out:
                out.write(content)
            return
        where = Path(os.path.realpath(path))
        number, temp = tempfile.mkstemp(prefix=".leangrpo-", dir=where.parent)
        try:
            with open(number, "wb") as out:
                out.write(content)
            os.chmod(temp, where.stat().st_mode & 0o777 if where.exists() else 0o666 & ~_umask())
            os.replace(temp, where)
        finally:
            Path(temp).unlink(missing_ok=True)
    except ValueError as err:
        raise bad_path(path, str(err)) from err
    except OSError as err:
        if err.errno in FULL or err.errno in BAD_NAME:
            raise problem(err, path.parent) from err
        why = "it is a pipe that nobody reads" if err.errno == errno.ENXIO else err.strerror
        raise KitError("LG112", f"{path} cannot be written: {why}", fix=f"ls -ld {path.parent} {path}") from err


def _umask() -> int:
    found = os.umask(0)
    os.umask(found)
    return found


@dataclass
class Outcome:
    """Where a command puts its result: ``file`` is for JSON, ``-`` stands for stdout."""

    file: Path | None

    def check(self) -> None:
        """Raise LG112 before anything is done whose result could not be written."""
        say("")
        if self.file is None or str(self.file) == "-":
            return
        if self.file.is_dir():
            raise KitError("LG112", f"{self.file} cannot be written: it is a folder", fix="--json FILE")
        if not self.file.parent.is_dir():
            fix = f"mkdir -p {self.file.parent}"
            raise KitError("LG112", f"{self.file} cannot be written: there is no folder {self.file.parent}", fix=fix)

    def done(self, result: Any, text: Callable[[Any], str]) -> None:
        """Print the text, write the JSON, and end with the result's ``exit_code`` if it has one."""
        if self.file is None or str(self.file) != "-":
            shown = text(result)
            say(shown + "\n" if shown else "")
        self.write(_plain(result))
        status = getattr(result, "exit_code", 0)
        if status:
            raise SystemExit(status)

    def write(self, plain: Any) -> None:
        """Write JSON; numbers that JSON does not know are refused."""
        if self.file is None:
            return
        text = json.dumps(plain, indent=2, ensure_ascii=False, allow_nan=False, default=str) + "\n"
        on_stdout = str(self.file) == "-"
        try:
            text.encode((on_stdout and sys.stdout and sys.stdout.encoding) or "utf-8")
        except UnicodeEncodeError:
            text = json.dumps(plain, indent=2, allow_nan=False, default=str) + "\n"
        if on_stdout:
            say(text)
        else:
            write_file(self.file, text.encode())


@contextmanager
def outcome(file: Path | None) -> Iterator[Outcome]:
    """Run a command's body; an error becomes its message and exit status."""
    clean_environment()
    out = Outcome(file)
    try:
        out.check()
        yield out
        say("")
    except (Exception, KeyboardInterrupt) as err:
        raise SystemExit(ended(err, out)) from err


def ended(err: BaseException, out: Outcome) -> int:
    """Say why a command failed, as text and as JSON. Returns its exit status."""
    if isinstance(err, Unheard):
        return 128 + int(getattr(signal, "SIGPIPE", 13))
    if isinstance(err, KeyboardInterrupt):
        _tell("interrupted")
        return 128 + signal.SIGINT
    return failed(known(err), out)


def failed(err: KitError, out: Outcome, status: int | None = None) -> int:
    """Print an error and write it as JSON. Returns its exit status, by default that of its code."""
    _tell(str(err))
    with suppress(KitError, Unheard, OSError):  # it may be the JSON that cannot be written
        out.write({"ok": False, "error": err.to_json()})
    return err.exit_code if status is None else status


def known(err: BaseException) -> KitError:
    """Any error under a code; LG199 for what nobody foresaw, whose details go into a file."""
    if isinstance(err, KitError):
        return err
    if isinstance(err, ImportError) and (lacking := broken(err)):
        return lacking
    if isinstance(err, GitFailed):
        if err.full:
            return disk_full(Path.cwd())
        return KitError("LG110", f"{err}", cause="an unexpected answer of git", fix="git --version; git status")
    if isinstance(err, OSError):
        if is_full(err):
            temporary = Path(tempfile.gettempdir())
            return disk_full(Path(err.filename).parent if isinstance(err.filename, str) else
                             temporary if no_room(temporary) else Path.cwd())  # fmt: skip
        if err.errno in BAD_NAME or (
            err.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ELOOP) and err.filename
        ):
            return problem(err, Path(os.fsdecode(err.filename)).parent)
    if isinstance(err, ValueError) and "null byte" in str(err):
        return bad_path("a path", str(err))
    return _unexpected(err)


def _unexpected(err: BaseException) -> KitError:
    details = "".join(traceback.format_exception(err))
    first = f"{type(err).__name__}: {err}".splitlines()[0][:300]
    fix = f"report it with what {DEBUG}=1 prints"
    if os.environ.get(DEBUG):
        _tell(details)
    else:
        with suppress(OSError):
            number, path = tempfile.mkstemp(prefix="leangrpo-error-", suffix=".log")
            with open(number, "w", encoding="utf-8", errors="backslashreplace") as log:
                log.write(f"{sys.argv}\nPython {sys.version} on {sys.platform}\n{details}")
            fix = f"report it to whoever maintains the kit, with {path}"
    return KitError("LG199", first, cause="a fault of the kit, or of this machine; it says nothing of a patch", fix=fix)


def _tell(text: str) -> None:
    with suppress(OSError, ValueError):
        print(text, file=sys.stderr, flush=True)


def _plain(result: Any) -> Any:
    if hasattr(result, "to_json"):
        return result.to_json()
    return {"ok": True, **result.__dict__} if is_dataclass(result) else result


def json_wanted(argv: list[str]) -> Path | None:
    """The value of ``--json`` in a command line that the parser has refused; None if it has none."""
    for place, word in enumerate(argv):
        name, mark, value = word.partition("=")
        if word == "--":
            return None
        if name == "--json":
            value = value if mark else next(iter(argv[place + 1 :]), "")
            return Path(value) if value and (value == "-" or not value.startswith("-")) else None
    return None
