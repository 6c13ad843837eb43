"""A kit whose DanceGRPO is a toy repository, with a cache of its own."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest
from support import toytree
from support.fixes import Shell

from leangrpo_tools import data, transform


@dataclass
class Kit:
    """Where things are in a test."""

    root: Path
    upstream: Path
    work: Path


@pytest.fixture
def kit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Kit:
    upstream = toytree.make_upstream(tmp_path / "upstream")
    root = toytree.make_kit(tmp_path / "kit", upstream)
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.setattr(data, "data_root", lambda: root)
    monkeypatch.setenv("LEANGRPO_CACHE", str(tmp_path / "cache"))
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))  # killed runs leave things there
    monkeypatch.chdir(work)
    return Kit(root, upstream, work)


@pytest.fixture
def shell(monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]) -> Shell:
    """A user at a prompt."""
    return Shell(monkeypatch, capfdbinary)


@pytest.fixture
def clone(kit: Kit) -> Path:
    """A user's own checkout of the toy upstream, on a branch."""
    toytree.git(kit.work, "clone", "-q", str(kit.upstream), "mine")
    return kit.work / "mine"


@pytest.fixture
def small(kit: Kit, monkeypatch: pytest.MonkeyPatch) -> Kit:
    """A kit with a runtime of two files that transforms each file once, for tests that repeat everything many times."""
    core = kit.root / "leangrpo_core"
    for path in core.rglob("*.py"):
        if path not in (core / "__init__.py", core / "errors.py"):
            path.unlink()
    real, known = transform.transform, {}

    def transform_once(file, data, edits, where=""):
        key = (file, data, repr(edits))
        if key not in known:
            known[key] = real(file, data, edits, where)
        return known[key]

    monkeypatch.setattr(transform, "transform", transform_once)
    return kit
