"""Commands whose output, names or environment are bad: a code and its exit status, never a traceback."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from leangrpo_tools import cli, data, output
from leangrpo_tools.errors import CODES, KitError

START = "import sys; from leangrpo_tools import cli; sys.argv = sys.argv[1:]; cli.leangrpo()"
PRINTING = [
    ["list"], ["list", "--json", "-"], ["--help"], ["explain", "LG201"], ["diff", "tree"], ["status", "tree"],
    ["check", "tree"], ["support"],
]  # fmt: skip


def shell(folder: Path, argv: list[str], rest: str = "", **env: str) -> subprocess.CompletedProcess[bytes]:
    """`leangrpo ARGV REST` as a shell runs it."""
    line = f'exec {sys.executable} -c "$0" leangrpo "$@" {rest}'
    command = ["bash", "-c", line, START, *argv]
    return subprocess.run(command, cwd=folder, env={**os.environ, **env}, capture_output=True, timeout=120)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a patched tree."""
    folder = tmp_path_factory.mktemp("streams")
    from leangrpo_tools.apply import apply

    apply("mini", folder / "tree")
    return folder


@pytest.mark.parametrize("argv", PRINTING, ids=" ".join)
@pytest.mark.parametrize(
    ("rest", "status", "code"),
    [(">/dev/full", 3, "LG106"), (">&-", 3, "LG112"), ("| true; exit ${PIPESTATUS[0]}", 141, "")],
)
def test_output_that_goes_nowhere(place: Path, argv: list[str], rest: str, status: int, code: str) -> None:
    if argv == ["--help"] and rest == ">&-":
        pytest.skip("the parser prints nothing then, and nothing is lost")
    if "PIPE" in rest:
        line = f'(sleep 0.3; exec {sys.executable} -c "$0" leangrpo "$@") {rest}'
        command = ["bash", "-c", line, START, *argv]
        done = subprocess.run(command, cwd=place, capture_output=True, timeout=120)
    else:
        done = shell(place, argv, rest)
    assert done.returncode == status, done
    assert b"Traceback" not in done.stderr and b"Exception ignored" not in done.stderr
    assert done.stderr.startswith(f"error {code}: ".encode()) if code else done.stderr == b""


def test_closed_streams_are_not_mixed_up(place: Path) -> None:
    """A file that is opened must not take the place of a stream that was closed: git would write into it."""
    for rest in ("<&-", "2>&-", "<&- 2>&-"):
        done = shell(place, ["status", "tree", "--json", "-"], rest)
        assert done.returncode == 0 and json.loads(done.stdout)["patched"] is True and done.stderr == b""
    done = shell(place, ["status", "./nowhere", "--json", "-"], "2>&-")
    assert done.returncode == 2 and json.loads(done.stdout)["error"]["code"] == "LG301"


def test_every_name_can_be_printed(place: Path) -> None:
    for name in (b"caf\xc3\xa9 \xe6\x9c\xa8", b"not utf-8 \xff", b'quote" and\nnewline'):
        folder = os.fsdecode(name)
        env = {"PYTHONIOENCODING": "ascii", "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
        (place / folder).mkdir()
        for more in (env, {}, {"PYTHONIOENCODING": "ascii:strict"}):
            done = shell(place, ["status", folder], **more)
            assert done.returncode == 0 and b"not patched" in done.stdout and done.stderr == b""
            done = shell(place, ["status", folder, "--json", "-"], **more)
            assert os.fsencode(json.loads(done.stdout)["dest"]).endswith(name)
            done = shell(place, ["status", folder, "--json", "s.json"], **more)
            assert os.fsencode(json.loads((place / "s.json").read_text("utf-8"))["dest"]).endswith(name)
            done = shell(place, ["revert", folder], **more)
            assert done.returncode == 2 and done.stderr.startswith(b"error LG301: ")


def coloured(place: Path, **env: str) -> bool:
    """Whether `diff` colours what it prints on a terminal."""
    ours, theirs = pty.openpty()
    base = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "TERM")}
    command = [sys.executable, "-c", START, "leangrpo", "diff", "tree", "--stat"]
    process = subprocess.Popen(command, cwd=place, stdout=theirs, stderr=theirs, env={**base, **env})
    os.close(theirs)
    said = b""
    try:
        while chunk := os.read(ours, 1 << 16):
            said += chunk
    except OSError:  # the terminal has gone with the process
        pass
    assert process.wait() == 0 and b"changed" in said
    os.close(ours)
    return b"\x1b[" in said


def test_colour_only_where_it_is_wanted(place: Path) -> None:
    assert coloured(place, TERM="xterm") and coloured(place, TERM="xterm", NO_COLOR="")
    assert not coloured(place, TERM="xterm", NO_COLOR="1") and not coloured(place, TERM="dumb")


USAGE = {name: [name, "--nonsense"] for name in cli.COMMANDS} | {"no command": ["nonsense"]}


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capfdbinary, tmp_path: Path):
    monkeypatch.chdir(tmp_path)

    def run(*argv: str) -> tuple[int, bytes, bytes]:
        monkeypatch.setattr(sys, "argv", ["leangrpo", *argv])
        with pytest.raises(SystemExit) as caught:
            cli.leangrpo()
        return int(caught.value.code or 0), *capfdbinary.readouterr()

    return run


@pytest.mark.parametrize("argv", USAGE.values(), ids=list(USAGE))
def test_a_usage_error_is_json_too(call, argv: list[str]) -> None:
    status, out, err = call(*argv, "--json", "-")
    assert status == 2 and json.loads(out)["error"]["code"] == "LG121" and err.startswith(b"error LG121: ")
    status, out, _ = call(*argv, "--json=e.json")
    assert status == 2 and out == b"" and json.loads(Path("e.json").read_text())["ok"] is False
    assert call(*argv)[1] == b"" and call(*argv, "--json")[0] == 2
    assert os.listdir() == ["e.json"]


LONG = "n" * 256
NAMES: dict[str, list[str]] = {
    "apply": ["apply", "mini", LONG],
    "apply --tree": ["apply", "mini", "--tree", LONG],
    "apply --bundle": ["apply", "mini", "d", "--bundle", LONG],
    "apply --source": ["apply", "DanceGRPO", "d", "--source", LONG],
    "apply --script-as": ["apply", "mini", "--tree", ".", "--script-as", f"train={LONG}"],
    "apply below": ["apply", "mini", f"a/{LONG}/b"],
    "diff": ["diff", LONG],
    "diff --output": ["diff", "tree", "--output", LONG],
    "revert": ["revert", LONG],
    "status": ["status", LONG],
    "check": ["check", LONG],
    "bundle": ["bundle", "mini", "--output", LONG],
    "verify": ["verify", "mini", "--script", "train", "--tree", LONG],
    "bench": ["bench", "mini", "--script", "train", "--tree", LONG],
    "plan": ["plan", "mini", "--launch", LONG],
    "plan --preset": ["plan", "flowGRPO", "--preset", f"{LONG}:p"],
    "list --json": ["list", "--json", LONG],
    "a link to itself": ["status", "loop"],
    "below a file": ["status", "file/d"],
    "apply below a file": ["apply", "mini", "file/d"],
}


@pytest.mark.parametrize("argv", NAMES.values(), ids=list(NAMES))
def test_names_that_no_file_can_have(call, place: Path, argv: list[str]) -> None:
    os.symlink(place / "tree", "tree")
    os.symlink("loop", "loop")
    Path("file").touch()
    there = set(os.listdir())
    status, _, err = call(*argv)
    code = err.decode().partition(":")[0].removeprefix("error ")
    assert code in CODES and code != "LG199" and status == CODES[code].exit_code, err
    assert set(os.listdir()) in (there, there | {"a"}) and len(err) < 3000


def test_long_names_that_files_can_have(call) -> None:
    assert call("apply", "mini", "d" * 255)[0] == 0 and call("check", "d" * 255, "--json", "j" * 255)[0] == 0
    assert sorted(map(len, os.listdir())) == [255, 255]


def test_json_goes_where_it_can(call, tmp_path: Path) -> None:
    """Into a pipe that is read; not into a folder, nor a pipe that nobody reads, which would be waited for."""
    os.mkfifo("pipe")
    os.mkdir("folder")
    for name in ("pipe", "folder", "nowhere/x", "/dev/full"):
        status, out, err = call("list", "--json", name)
        code = "LG106" if name == "/dev/full" else "LG112"
        assert status == 3 and err.startswith(f"error {code}: ".encode()), (name, err)
        assert (out == b"") == (name in ("folder", "nowhere/x"))  # said before anything is done
    reader = subprocess.Popen(["cat", "pipe"], stdout=subprocess.PIPE)
    while call("list", "--json", "pipe")[0]:
        time.sleep(0.05)
    assert json.loads(reader.communicate(timeout=60)[0])
    assert call("list", "--json", "/dev/null")[0] == 0
    Path("real").write_text("old")
    os.chmod("real", 0o600)
    os.symlink("real", "link")
    assert call("list", "--json", "link")[0] == 0 and json.loads(Path("real").read_text())
    assert os.path.islink("link") and os.stat("real").st_mode & 0o777 == 0o600
    assert sorted(os.listdir()) == ["folder", "link", "pipe", "real"]


@pytest.mark.parametrize(
    "error", [TypeError("x"), MemoryError(), RecursionError("deep"), OSError(5, "input/output"), AssertionError()]
)
def test_what_nobody_foresaw(call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: Exception) -> None:
    """Its own code and status 3: 1 would say that patched and original differ."""
    import tempfile

    def raises(*_: object, **__: object) -> None:
        raise error

    (tmp_path / "t").mkdir()
    mkstemp = tempfile.mkstemp
    monkeypatch.setattr(tempfile, "mkstemp", lambda **options: mkstemp(**{"dir": tmp_path / "t", **options}))
    for module, name, argv in (
        ("apply", "apply", ["apply", "mini"]), ("diff", "diff", ["diff", "."]), ("revert", "revert", ["revert", "."]),
        ("rehearsal", "verify", ["verify", "mini", "--script", "train"]), ("plan", "plan", ["plan", "mini"]),
        ("rehearsal", "bench", ["bench", "mini", "--script", "train"]), ("check", "check", ["check", "."]),
    ):  # fmt: skip
        monkeypatch.setattr(f"leangrpo_tools.{module}.{name}", raises)
        more = [] if argv[0] == "diff" else ["--json", "-"]
        status, out, err = call(*argv, *more)
        assert (
            status == 3 and err.startswith(b"error LG199: " + type(error).__name__.encode()) and b"Traceback" not in err
        )
        assert argv[0] == "diff" or json.loads(out)["error"]["code"] == "LG199"
        (log,) = (tmp_path / "t").iterdir()
        assert str(log) in err.decode() and "Traceback" in log.read_text() and "in raises" in log.read_text()
        log.unlink()
    monkeypatch.setenv("LEANGRPO_DEBUG", "1")
    assert b"in raises" in call("check", ".")[2] and not list((tmp_path / "t").iterdir())
    monkeypatch.delenv("LEANGRPO_DEBUG")
    with monkeypatch.context() as patch:
        patch.setattr(tempfile, "mkstemp", lambda **options: mkstemp(dir="nowhere", **options))
        assert call("check", ".")[0] == 3


@pytest.mark.parametrize("argv", [["apply", "mini"], ["verify", "mini", "--script", "train"], ["status"]], ids=" ".join)
def test_ctrl_c(call, monkeypatch: pytest.MonkeyPatch, argv: list[str]) -> None:
    def pressed(*_: object, **__: object) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(10)

    for name in ("apply.apply", "rehearsal.verify", "status.status"):
        monkeypatch.setattr(f"leangrpo_tools.{name}", pressed)
    old = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in the background
    try:
        assert call(*argv) == (130, b"", b"interrupted\n")
    finally:
        signal.signal(signal.SIGINT, old)


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import pwd

    monkeypatch.setattr(sys, "platform", "linux")
    known = Path(pwd.getpwuid(os.getuid()).pw_dir)

    def found(**env: str) -> Path:
        for name in ("HOME", "XDG_CACHE_HOME", "LEANGRPO_CACHE"):
            monkeypatch.delenv(name, raising=False)
            if name in env:
                monkeypatch.setenv(name, env[name])
        return data.cache_dir()

    kit = "leangrpo-kit"
    assert found(HOME="/h") == found(HOME="/h", XDG_CACHE_HOME="") == Path("/h/.cache") / kit
    assert found(HOME="/h", XDG_CACHE_HOME="relative") == Path("/h/.cache") / kit
    assert found(HOME="/h", XDG_CACHE_HOME="/x") == Path("/x") / kit
    assert found() == found(HOME="") == found(HOME="relative") == known / ".cache" / kit
    assert found(LEANGRPO_CACHE="~/c", HOME="/h") == Path("/h/c")
    monkeypatch.chdir(tmp_path)
    assert found(LEANGRPO_CACHE="~nobody-of-this-name/c") == tmp_path / "~nobody-of-this-name/c"

    def nobody(_: int) -> Any:
        raise KeyError

    monkeypatch.setattr(pwd, "getpwuid", nobody)
    with pytest.raises(KitError) as caught:
        found(HOME="")
    assert caught.value.code == "LG112" and "LEANGRPO_CACHE" in caught.value.fix


def test_support_of_one_upstream_or_script(call) -> None:
    def rows(*argv: str) -> set[tuple[str, str]]:
        return {
            (row["upstream"], row["script"]) for row in json.loads(call("support", "--json", "-", *argv)[1])["scripts"]
        }

    every = rows()
    assert rows("--upstream", "DANCEGRPO") == {row for row in every if row[0] == "DanceGRPO"} != every
    assert rows("--script", "flux") == {row for row in every if row[1] == "flux"} and len(rows("--script", "flux")) > 1
    assert rows("--upstream", "flowGRPO", "--script", "flux") == {("flowGRPO", "flux")}
    for argv, code in (
        (["--upstream", "nope"], b"LG102"),
        (["--script", "nope"], b"LG203"),
        (["--upstream", "mini", "--script", "sd3"], b"LG203"),
    ):
        status, _, err = call("support", *argv)
        assert status == 2 and err.startswith(b"error " + code)


def test_json_wanted() -> None:
    assert output.json_wanted(["a", "--json", "-"]) == output.json_wanted(["--json=-", "b"]) == Path("-")
    for argv in (["--", "--json", "-"], ["--json"], ["--json", "--tree"], ["--json="], ["x"]):
        assert output.json_wanted(argv) is None
