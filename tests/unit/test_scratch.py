"""Scratch folders of rehearsals: what killed processes left goes, what others hold or want to keep stays."""

from __future__ import annotations

import functools
import multiprocessing
import os
import signal
import tempfile
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from leangrpo_tools.rehearsal.scratch import PREFIX, Scratch
from leangrpo_tools.rehearsal.session import Session

FORK = multiprocessing.get_context("fork")
DEFAULTS = {
    signal.SIGTERM: signal.SIG_DFL, signal.SIGHUP: signal.SIG_DFL, signal.SIGINT: signal.default_int_handler,
}  # fmt: skip


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def _work(say, ignored: int = 0) -> None:
    # Started in the background, or by nohup, this process would ignore some of them from its birth.
    for number, handler in DEFAULTS.items():
        signal.signal(number, signal.SIG_IGN if number == ignored else handler)
    with Session() as session:
        (session.folder() / "file").write_text("x")
        say.send(session.root)
        while True:
            signal.pause()


def working(ignored: int = 0) -> tuple[BaseProcess, Path]:
    """A process in the middle of a rehearsal, and its folder."""
    ours, theirs = FORK.Pipe()
    process = FORK.Process(target=_work, args=(theirs, ignored))
    process.start()
    assert ours.poll(60)
    return process, ours.recv()


def ended(process: BaseProcess, number: int) -> int | None:
    assert process.pid is not None
    os.kill(process.pid, number)
    process.join(60)
    return process.exitcode


def test_a_killed_process_is_cleaned_up_after_by_the_next(root: Path) -> None:
    (killed, left), (running, held) = working(), working()
    kept = Scratch()
    kept.close(keep=True)
    for name in ("without-a-mark", "with-a-folder"):
        (root / f"{PREFIX}{name}").mkdir()
    (root / f"{PREFIX}with-a-folder/held").mkdir()
    outside = root / "outside"
    outside.mkdir()
    (outside / "held").touch()
    (root / f"{PREFIX}link").symlink_to(outside)
    (root / f"{PREFIX}with-a-link").mkdir()
    (root / f"{PREFIX}with-a-link/held").symlink_to(outside / "held")
    there = set(root.iterdir())
    assert ended(killed, signal.SIGKILL) == -signal.SIGKILL and (left / "rehearsal1/file").exists()
    with Session() as session:
        assert set(root.iterdir()) == there - {left} | {session.root}
        assert (held / "rehearsal1/file").exists() and (outside / "held").exists()
    assert set(root.iterdir()) == there - {left}
    assert ended(running, signal.SIGKILL) == -signal.SIGKILL
    Scratch().close(keep=False)
    assert set(root.iterdir()) == there - {left, held}


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGINT, 1)])
def test_polite_signals_clean_up_at_once(root: Path, number: int, status: int) -> None:
    process, folder = working()
    assert ended(process, number) == status
    assert not folder.exists() and list(root.iterdir()) == []


def test_what_nohup_ignores_stays_ignored() -> None:
    """The hangup of its terminal does not end it; the signal after that one does."""
    process, folder = working(ignored=signal.SIGHUP)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGHUP)
    assert ended(process, signal.SIGTERM) == 143 and not folder.exists()


def test_of_what_is_kept_only_the_logs_stay(root: Path) -> None:
    with Session() as session:
        for folder in (session.folder(), session.folder()):
            for name in ("logs/native/rank0.err", "assets/model", "work/native/checkpoint", "patched/file", "out/x"):
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / name).write_text(name)
        session.keep = True
    kept = sorted(str(path.relative_to(session.root)) for path in session.root.rglob("*") if path.is_file())
    assert kept == ["rehearsal1/logs/native/rank0.err", "rehearsal2/logs/native/rank0.err"]


def test_handlers_are_put_back_and_a_folder_of_ones_own_stays(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    request.addfinalizer(functools.partial(signal.signal, signal.SIGTERM, signal.getsignal(signal.SIGTERM)))
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with Session(tmp_path / "mine") as session:
        folder = session.folder()
        assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    assert folder.is_dir() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    with Session() as session:
        session.keep = True
    assert session.root.is_dir()
