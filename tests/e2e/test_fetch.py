"""Where upstreams come from: the cache, mirrors without large files, and each way in which it can fail."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest
from support.toytree import git

from leangrpo_tools import data, lock, objects, sources
from leangrpo_tools.apply import apply
from leangrpo_tools.errors import KitError
from leangrpo_tools.gitcmd import GitFailed


def edit_lock(kit, **values: str) -> None:
    path = kit.root / "upstreams.lock"
    text = path.read_text()
    entry = lock.load(path).upstreams["DanceGRPO"]
    for key, value in values.items():
        text = text.replace(getattr(entry, key), value)
    path.write_text(text)


def fails(kit, code: str, **options) -> str:
    with pytest.raises(KitError) as caught:
        apply("DanceGRPO", **options)
    assert caught.value.code == code, caught.value
    assert list(kit.work.iterdir()) == []
    return str(caught.value)


def test_a_mirror_without_its_largest_file(kit) -> None:
    """What some mirrors are: a bare folder without configuration in which a large blob is missing."""
    mirror = kit.work.with_name("mirror")
    git(kit.work, "clone", "-q", "--bare", str(kit.upstream), str(mirror))
    pack = next((mirror / "objects/pack").glob("*.pack"), None)
    if pack:
        kept = mirror.with_name("loose.pack")
        for item in (mirror / "objects/pack").iterdir():
            item.chmod(0o644)
        shutil.move(pack, kept)
        shutil.rmtree(mirror / "objects/pack")
        os.system(f"git --git-dir {mirror} unpack-objects -q < {kept}")
    oid = git(kit.upstream, "rev-parse", "HEAD:assets/prompts.txt")
    (mirror / "objects" / oid[:2] / oid[2:]).unlink()
    (mirror / "config").unlink()
    result = apply("DanceGRPO", source=str(mirror))
    assert result.changed
    assert git(result.dest, "config", "remote.origin.url") == str(kit.upstream)
    assert git(result.dest, "status", "--porcelain") == ""


def test_a_mirror_that_lacks_a_needed_file(kit) -> None:
    mirror = kit.work.with_name("mirror")
    shutil.copytree(kit.upstream / ".git", mirror)
    oid = git(kit.upstream, "rev-parse", "HEAD:fastvideo/train_grpo_flux.py")
    (mirror / "objects" / oid[:2] / oid[2:]).unlink()
    fails(kit, "LG109", source=str(mirror))
    assert apply("DanceGRPO").changed


def test_the_cache_repairs_itself(kit) -> None:
    apply("DanceGRPO", "a")
    for item in (data.cache_dir() / "upstreams/DanceGRPO.git/objects").rglob("*"):
        if item.is_file():
            item.unlink()
    assert apply("DanceGRPO", "b").changed


def test_wrong_tree(kit) -> None:
    edit_lock(kit, tree="a" * 40)
    assert "a" * 40 in fails(kit, "LG108")


def test_missing_commit(kit) -> None:
    edit_lock(kit, commit="a" * 40)
    assert "a" * 40 in fails(kit, "LG107")


def test_something_that_is_no_commit(kit) -> None:
    edit_lock(kit, commit=git(kit.upstream, "rev-parse", "HEAD^{tree}"))
    fails(kit, "LG108")


def test_no_network(kit) -> None:
    message = fails(kit, "LG104", source="http://127.0.0.1:9/nothing")
    assert "--source" in message


def test_sources_that_cannot_be_read(kit) -> None:
    plain = kit.work.with_name("plain")
    plain.mkdir()
    assert "not a git repository" in fails(kit, "LG105", source=str(plain))
    assert "does not exist" in fails(kit, "LG105", source=str(plain / "nothing"))
    (plain / ".git/objects").mkdir(parents=True)
    fails(kit, "LG105", source=str(plain))
    fails(kit, "LG105", source="--upload-pack=touch /tmp/x")
    fails(kit, "LG105", source="ext::sh -c true")


def test_full_disk(kit, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):

        def full(*_: object, number: int = number) -> None:
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(objects.shutil, "copy2", full)
        assert "df -h" in fails(kit, "LG106")
    entry = lock.load().upstreams["DanceGRPO"]
    assert isinstance(entry, lock.GitEntry)
    git_says = GitFailed(("fetch",), 128, "fatal: write error: No space left on device")
    assert sources.failure(git_says, "x", entry).code == "LG106"


def test_full_disk_while_patching(kit, monkeypatch: pytest.MonkeyPatch) -> None:
    dest = apply("DanceGRPO", scripts=["flux"]).dest
    before = (dest / "fastvideo/train_grpo_wan_2_1.py").read_bytes()

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("leangrpo_tools.journal.os.fsync", full)
    with pytest.raises(KitError) as caught:
        apply("DanceGRPO", scripts=["wan_2_1"])
    assert caught.value.code == "LG106"
    assert (dest / "fastvideo/train_grpo_wan_2_1.py").read_bytes() == before


def test_a_destination_that_is_not_ours(kit) -> None:
    (kit.work / "DanceGRPO").mkdir()
    assert apply("DanceGRPO").changed
    (kit.work / "other").mkdir()
    (kit.work / "other/file").write_text("mine\n")
    with pytest.raises(KitError) as caught:
        apply("DanceGRPO", "other")
    assert caught.value.code == "LG103"
    assert [item.name for item in (kit.work / "other").iterdir()] == ["file"]
    with pytest.raises(KitError) as caught:
        apply("DanceGRPO", "x", tree=kit.work)
    assert caught.value.code == "LG103"


def test_leftovers_of_killed_runs_are_removed(kit) -> None:
    left = kit.work / ".DanceGRPO.999999999.part"
    left.mkdir()
    (left / "file").write_text("x\n")
    apply("DanceGRPO")
    assert not left.exists()


def test_hooks_and_filters_of_the_source_do_not_run(kit) -> None:
    (kit.upstream / ".git/hooks").mkdir(exist_ok=True)
    for name in ("post-checkout", "reference-transaction", "post-update", "pre-receive"):
        hook = kit.upstream / ".git/hooks" / name
        hook.write_text(f"#!/bin/sh\ntouch {kit.work}/ran\n")
        hook.chmod(0o755)
    git(kit.upstream, "config", "uploadpack.packObjectsHook", f"touch {kit.work}/ran;")
    assert apply("DanceGRPO").changed
    assert not (kit.work / "ran").exists()


def test_no_git(kit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(kit.work))
    fails(kit, "LG110")


def test_an_unwritable_cache(kit, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = kit.work.with_name("blocked")
    Path(blocked).write_text("a file\n")
    monkeypatch.setenv("LEANGRPO_CACHE", str(blocked))
    fails(kit, "LG112")
