"""Fixes of the errors about lock file and sources, followed as they are printed."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest
import yaml
from support import toywheel
from support.fixes import Shell, follows
from support.toytree import git

from leangrpo_tools import bundle, data, lock

APPLY = ("apply-patch", "DanceGRPO")
pytestmark = pytest.mark.usefixtures("small")


def edit_lock(kit, **values: str) -> bytes:
    """Change values of the toy's entry. Returns the file as it was."""
    path = kit.root / "upstreams.lock"
    before = path.read_bytes()
    said = yaml.safe_load(before)
    said["upstreams"]["DanceGRPO"] |= values
    path.write_text(yaml.safe_dump(said))
    return before


@follows("LG101")
def test_a_lock_file_that_is_invalid(kit, shell: Shell) -> None:
    before = edit_lock(kit, commit="main")
    assert "restore upstreams.lock" in shell.fails("LG101", *APPLY).fix
    (kit.root / "upstreams.lock").write_bytes(before)
    shell.works(*APPLY)


@follows("LG102")
def test_an_unknown_upstream(kit, shell: Shell) -> None:
    said = shell.fails("LG102", "apply-patch", "DanceGPRO")
    listed = shell.paste(said.command("leangrpo"))
    assert listed.status == 0 and "DanceGRPO" in listed.out
    shell.works(*APPLY)


@follows("LG103")
def test_a_destination_that_is_taken(kit, clone, shell: Shell) -> None:
    said = shell.fails("LG103", *APPLY, clone)
    shell.works(*APPLY, *said.options("--tree"))
    assert "leave them out" in shell.fails("LG103", *APPLY, "other", "--tree", clone).fix
    shell.works(*APPLY, "other")


@follows("LG104")
def test_no_network(kit, shell: Shell) -> None:
    said = shell.fails("LG104", *APPLY, "--source", "http://127.0.0.1:9/nothing")
    assert said.options("--source") == ["--source", "PATH"]
    shell.works(*APPLY, "--source", kit.upstream)


@follows("LG105")
@pytest.mark.parametrize("wrong", ["there is none", "no repository"])
def test_a_source_that_cannot_be_read(kit, shell: Shell, wrong: str) -> None:
    path = kit.upstream.parent / "upstraem"
    if wrong == "no repository":
        path.mkdir()
    said = shell.fails("LG105", *APPLY, "--source", path)
    shown = shell.paste(said.command("git" if path.exists() else "ls"))
    if path.exists():
        assert shown.status and shell.paste(said.command("git").replace(str(path), str(kit.upstream))).status == 0
    else:
        assert shown.status == 0 and "upstream\n" in shown.out
    shell.works(*APPLY, "--source", kit.upstream)


@follows("LG106")
def test_a_full_disk(kit, shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr("leangrpo_tools.journal.os.fsync", full)
        said = shell.fails("LG106", *APPLY)
    assert shell.paste(said.command("df")).status == 0
    shell.works(*APPLY)  # there is room now: it repairs itself


@follows("LG107")
def test_a_mirror_that_is_behind(kit, shell: Shell) -> None:
    mirror = kit.work.with_name("mirror")
    git(kit.work, "clone", "-q", "--mirror", str(kit.upstream), str(mirror))
    git(kit.upstream, "commit", "-q", "--allow-empty", "-m", "newer")
    edit_lock(kit, commit=git(kit.upstream, "rev-parse", "HEAD"))
    said = shell.fails("LG107", *APPLY, "--source", mirror)
    assert "(git fetch --all)" in said.fix
    git(mirror, "fetch", "-q", "--all")
    shell.works(*APPLY, "--source", mirror)


@follows("LG108")
def test_a_wrong_hash(kit, shell: Shell) -> None:
    before = edit_lock(kit, tree="a" * 40)
    assert "restore upstreams.lock" in shell.fails("LG108", *APPLY).fix
    (kit.root / "upstreams.lock").write_bytes(before)
    shell.works(*APPLY)


@follows("LG109")
def test_a_mirror_that_lacks_a_file(kit, shell: Shell) -> None:
    mirror = kit.work.with_name("mirror")
    shutil.copytree(kit.upstream / ".git", mirror)
    oid = git(kit.upstream, "rev-parse", "HEAD:fastvideo/train_grpo_flux.py")
    (mirror / "objects" / oid[:2] / oid[2:]).unlink()
    assert "full clone: --source" in shell.fails("LG109", *APPLY, "--source", mirror).fix
    shell.works(*APPLY, "--source", kit.upstream)


@follows("LG110")
def test_no_git(kit, shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setenv("PATH", str(kit.work))
        assert "git" in shell.fails("LG110", *APPLY).fix
    assert subprocess.run(["git", "--version"], capture_output=True).returncode == 0
    shell.works(*APPLY)


@follows("LG112")
def test_a_folder_that_cannot_be_written(kit, shell: Shell) -> None:
    (kit.work / "blocked").write_text("a file\n")
    said = shell.fails("LG112", *APPLY, "blocked/dest")
    assert shell.paste(said.command("ls")).out.startswith("-")  # a file: give another folder
    shell.works(*APPLY, "free/dest")


@follows("LG113", "LG114")
@pytest.mark.parametrize("code", ["LG113", "LG114"])
def test_a_bundle_that_cannot_be_used(kit, shell: Shell, monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    monkeypatch.setattr(data, "core_path", lambda: kit.root / "leangrpo_core")
    file = kit.work / "some.bundle"
    bundle.make("DanceGRPO", file)
    if code == "LG113":
        file.write_bytes(file.read_bytes()[:-200])
    else:
        git(kit.upstream, "commit", "-q", "--allow-empty", "-m", "newer")
        edit_lock(kit, commit=git(kit.upstream, "rev-parse", "HEAD"))
    said = shell.fails(code, *APPLY, "--bundle", file)
    line = said.command("leangrpo").replace("NAME", "DanceGRPO").replace("FILE", "new.bundle")
    assert shell.paste(line).status == 0
    shell.works(*APPLY, "--bundle", "new.bundle")


@pytest.fixture
def toy(kit, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The toy wheel in a folder of its own; the kit pins it."""
    folder = kit.work.with_name("wheels")
    folder.mkdir()
    toywheel.pin(kit.root, toywheel.entry(toywheel.make_wheel(folder / toywheel.NAME)))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    return folder / toywheel.NAME


@follows("LG115")
def test_no_pip(kit, toy: Path, shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    bare = kit.work.with_name("bare")
    venv.create(bare, with_pip=False, symlinks=True)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", str(bare / "bin/python"))
        said = shell.fails("LG115", "apply-patch", "toy")
        assert said.options("--source") == ["--source", "PATH"]
        shell.works("apply-patch", "toy", "--source", toy)


@follows("LG116")
def test_a_wheel_that_cannot_be_unpacked(kit, toy: Path, shell: Shell) -> None:
    good = (kit.root / "upstreams.lock").read_bytes()
    odd = toy.parent / "odd"
    odd.mkdir()
    with zipfile.ZipFile(odd / toywheel.NAME, "w") as out:
        out.writestr(toywheel.member("../outside.py"), "x = 1\n")
    import hashlib

    toywheel.pin(kit.root, toywheel.entry(hashlib.sha256((odd / toywheel.NAME).read_bytes()).hexdigest()))
    assert "upstreams.lock" in shell.fails("LG116", "apply-patch", "toy", "--source", odd).fix
    (kit.root / "upstreams.lock").write_bytes(good)
    assert isinstance(lock.load().upstreams["toy"], lock.PypiEntry)
    shell.works("apply-patch", "toy", "--source", toy)


@follows("LG120")
def test_an_unknown_code(kit, shell: Shell) -> None:
    said = shell.fails("LG120", "leangrpo", "explain", "LG21")
    assert shell.paste(said.command("leangrpo")).out.startswith("LG2")


@follows("LG121")
def test_an_unknown_option(kit, shell: Shell) -> None:
    said = shell.fails("LG121", *APPLY, "--scirpt", "flux")
    shown = shell.paste(said.command("apply-patch").partition(" --help")[0] + " --help")
    assert shown.status == 0 and "--script" in shown.out
    shell.works(*APPLY, "--script", "flux")


@follows("LG131")
def test_a_name_that_is_too_long(kit, shell: Shell) -> None:
    assert "another name" in shell.fails("LG131", *APPLY, "d" * 300).fix
    shell.works(*APPLY, "d")


@follows("LG132")
def test_a_cache_that_is_damaged(kit, shell: Shell) -> None:
    """The fix is that of the source from which it would be filled: its folder shows the new name."""
    shell.works(*APPLY, "first")
    for pack in data.cache_dir().rglob("*.pack"):
        pack.chmod(0o644)
        pack.write_bytes(pack.read_bytes()[:100])
    moved = kit.upstream.rename(kit.upstream.with_name("moved"))
    said = shell.fails("LG132", *APPLY, "second")
    assert "moved" in shell.paste(said.command("ls")).out
    shell.works(*APPLY, "second", "--source", moved)
