"""Full disks and damaged caches: coded errors, nothing half-made, and a good cache stays as it is, byte for byte."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from support.smalldisk import limited, mounted
from support.toytree import contents, git

from leangrpo_tools import bundle, data, fetch, gitcache, lock, processes
from leangrpo_tools.apply import apply
from leangrpo_tools.errors import KitError


@pytest.fixture
def filled(kit):
    """The kit with a filled cache, on a machine that does not reach the upstream any more."""
    check_out("first")
    kit.upstream.rename(kit.upstream.with_name("out of reach"))
    return kit


def cache() -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(data.cache_dir().rglob("*")) if path.is_file()}


def check_out(dest: Path | str) -> Path:
    """What `apply` does before it patches."""
    fetch.checkout("DanceGRPO", lock.load().upstreams["DanceGRPO"], Path(dest))
    return Path(dest)


def refused(dest: Path | str) -> KitError:
    with pytest.raises(KitError) as caught:
        check_out(dest)
    return caught.value


def whole(kit, name: str) -> None:
    """Offline, a checkout elsewhere is the right one."""
    assert contents(check_out(kit.work / name)) == contents(kit.work / "first")
    assert git(kit.work / name, "status", "--porcelain") == ""


ROOM = ["size=16k", "size=48k", "size=64k", "nr_inodes=5", "nr_inodes=30"]


@pytest.mark.parametrize("room", ROOM)
def test_no_room_at_the_destination(filled, room: str) -> None:
    before = cache()
    with mounted(filled.work.with_name("small"), room) as small:
        err = refused(small / "d")
        assert err.code == "LG106" and "df -i" in err.fix, err
        assert list(small.iterdir()) == []
    assert cache() == before
    whole(filled, "second")


@pytest.mark.parametrize("room", ["size=1m", pytest.param("size=12m", marks=pytest.mark.slow)])
def test_no_room_to_rehearse(tmp_path: Path, room: str) -> None:
    """In the kit's own copies, and where a training script writes: never a verdict, nor a traceback."""
    with mounted(tmp_path / "small", room) as small:
        code = "import sys; from leangrpo_tools import cli; sys.argv = ['verify-patch', 'mini', '--script', 'train']"
        command = [sys.executable, "-c", f"{code}; cli.verify_patch()"]
        done = subprocess.run(command, env={**os.environ, "TMPDIR": str(small)}, capture_output=True, text=True)
        said = [line for line in done.stderr.splitlines() if not line.startswith("rehearsing: ")]
        assert done.returncode == 3 and said[0] == f"error LG106: no space left below {small}", done
        assert "TMPDIR" in said[2] and not list(small.glob("leangrpo-*"))


@pytest.mark.parametrize("size", [0, 200, 1_000, 2_000])
def test_files_may_not_grow(filled, size: int) -> None:
    before = cache()
    with limited(size):
        assert refused("d").code == "LG106"
    assert cache() == before and not [item for item in filled.work.iterdir() if item.name.endswith(".part")]
    whole(filled, "second")


@pytest.mark.parametrize("room", ["size=16k", "nr_inodes=8"])
@pytest.mark.parametrize("what", ["cache", "temporary files"])
def test_no_room_elsewhere(kit, monkeypatch: pytest.MonkeyPatch, what: str, room: str) -> None:
    with mounted(kit.work.with_name("small"), room) as small:
        if what == "cache":
            monkeypatch.setenv("LEANGRPO_CACHE", str(small / "cache"))
        else:
            monkeypatch.setattr(tempfile, "tempdir", str(small))
            (small / "filler").write_bytes(bytes(8 << 10))
        try:
            apply("DanceGRPO", dry_run=what != "cache")  # which makes its checkout among the temporary files
        except KitError as err:
            assert err.code == "LG106"
        except OSError as err:
            assert what != "cache" and err.errno == 28  # `outcome` gives it its code
        else:
            raise AssertionError("there was room")
    assert not list(kit.work.iterdir())
    monkeypatch.undo()


@pytest.fixture
def git_that(kit, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Puts a git before the real one that does something else for one verb."""

    real, folder = shutil.which("git"), kit.work.with_name("bin")
    folder.mkdir()

    def put(verb: str, does: str) -> None:
        script = f'#!/bin/sh\nfor word in "$@"; do [ "$word" = {verb} ] && {{ {does}; }}; done\nexec {real} "$@"\n'
        (folder / "git").write_text(script)
        (folder / "git").chmod(0o755)

    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    return put


FULL = 'echo "fatal: cannot write: No space left on device" >&2; exit 128'


@pytest.mark.parametrize("verb", ["init", "checkout", "config", "update-ref"])
@pytest.mark.parametrize(("does", "code"), [(FULL, "LG106"), ("kill -XFSZ $$", "LG106"), ("exit 1", "LG112")])
def test_a_git_that_fails_at_the_destination(filled, git_that, verb: str, does: str, code: str) -> None:
    before = cache()
    git_that(verb, does)
    assert refused("d").code == code
    assert cache() == before and [item.name for item in filled.work.iterdir()] == ["first"]
    git_that("nothing", "exit 1")
    whole(filled, "second")


def test_a_git_that_hangs_is_ended_with_its_children(filled, git_that, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "SILENT_S", 1.0)
    mark = filled.work.with_name("still there")
    git_that("checkout", f"(sleep 4; touch '{mark}') & wait")
    start = time.monotonic()
    err = refused("d")
    assert err.code == "LG112" and "not a word in 1 s" in err.what and time.monotonic() - start < 4
    time.sleep(max(0.0, start + 5 - time.monotonic()))
    assert not mark.exists() and [item.name for item in filled.work.iterdir()] == ["first"]


def _packs(suffix: str) -> list[Path]:
    """Sorted by size."""
    folder = data.cache_dir() / "upstreams/DanceGRPO.git/objects/pack"
    found = sorted(folder.glob(f"*{suffix}"), key=lambda path: path.stat().st_size)
    for path in found:
        path.chmod(0o644)
    return found


def _cut(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:size])


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def _pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


DAMAGE: dict[str, Callable[[], object]] = {
    **{f"the small pack has {size} bytes": lambda size=size: _cut(_packs(".pack")[0], size) for size in (0, 12, 100)},
    "the large pack lacks a byte": lambda: _cut(_packs(".pack")[-1], -1),
    "a bit of a pack": lambda: _flip(_packs(".pack")[-1]),
    "a bit of an index": lambda: _flip(_packs(".idx")[0]),
    "an index is cut": lambda: _cut(_packs(".idx")[-1], 200),
    "an index is gone": lambda: _packs(".idx")[0].unlink(),
    "a pack is gone": lambda: _packs(".pack")[-1].unlink(),
    "a pack is a pipe": lambda: _pipe(_packs(".pack")[0]),
    "everything is gone": lambda: shutil.rmtree(data.cache_dir() / "upstreams/DanceGRPO.git/objects"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_cache_is_found(kit, damage: str) -> None:
    """At once, without the network, where git by itself hangs; with it, or a bundle, the cache is filled again."""
    first = contents(check_out("first"))
    entry = lock.load().upstreams["DanceGRPO"]
    assert isinstance(entry, lock.GitEntry)
    packed = gitcache.pack("DanceGRPO", entry)
    DAMAGE[damage]()
    damaged = sorted(data.cache_dir().rglob("*"))
    away = kit.upstream.rename(kit.upstream.with_name("out of reach"))
    start = time.monotonic()
    assert refused("d").code == refused("d").code == "LG132" and not gitcache.whole("DanceGRPO", entry)
    with pytest.raises(KitError) as caught:
        gitcache.pack("DanceGRPO", entry)
    assert caught.value.code == "LG132" and time.monotonic() - start < 60
    assert sorted(data.cache_dir().rglob("*")) == damaged
    assert [item.name for item in kit.work.iterdir()] == ["first"]
    if "index" in damage:
        gitcache.fill_from_pack("DanceGRPO", entry, packed, "a bundle")
    else:
        away.rename(kit.upstream)
        assert contents(check_out("d")) == first
        kit.upstream.rename(away)
    assert contents(check_out("offline again")) == first and gitcache.whole("DanceGRPO", entry)


def test_a_bundle_fills_a_damaged_cache_again(small) -> None:
    first = apply("DanceGRPO", "first", scripts=["flux"]).dest
    file = bundle.make("DanceGRPO", small.work.with_name("d.bundle")).file
    _cut(_packs(".pack")[0], 100)
    small.upstream.rename(small.upstream.with_name("out of reach"))
    assert contents(apply("DanceGRPO", "d", scripts=["flux"], bundle=file).dest) == contents(first)


def test_no_room_to_patch(small) -> None:
    """The checkout is complete then, and stays as it was."""
    check_out("first")
    before = cache()
    with mounted(small.work.with_name("small"), "size=100k") as place:
        with pytest.raises(KitError) as caught:
            apply("DanceGRPO", place / "d", scripts=["flux"])
        assert caught.value.code == "LG106"
        assert list(place.iterdir()) == [place / "d"]
        left = {name: item for name, item in contents(place / "d").items() if not name.startswith(".leangrpo/")}
        assert left == contents(small.work / "first")
        subprocess.run(["mount", "-o", "remount,size=4m", str(place)], check=True)
        assert apply("DanceGRPO", place / "d", scripts=["flux"]).changed
        assert git(place / "d", "status", "--porcelain") == ""
    assert cache() == before


def test_the_cache_keeps_what_it_has_for_other_pins(kit) -> None:
    """Two kits with different pins share a cache, offline."""
    lock_file = kit.root / "upstreams.lock"
    old = lock_file.read_text()
    first = contents(check_out("old"))
    commit, tree = git(kit.upstream, "rev-parse", "HEAD"), git(kit.upstream, "rev-parse", "HEAD^{tree}")
    (kit.upstream / "README.md").write_text("newer\n")
    git(kit.upstream, "commit", "-qam", "newer")
    new = old.replace(commit, git(kit.upstream, "rev-parse", "HEAD"))
    new = new.replace(tree, git(kit.upstream, "rev-parse", "HEAD^{tree}"))
    lock_file.write_text(new)
    second = contents(check_out("new"))
    assert first != second
    kit.upstream.rename(kit.upstream.with_name("out of reach"))
    assert contents(check_out("new again")) == second
    lock_file.write_text(old)
    assert contents(check_out("old again")) == first
    _flip(_packs(".pack")[-1])
    assert refused("d").code == "LG132"


@pytest.mark.parametrize("other", ["DanceGRPO", "mini"])
def test_two_processes_and_one_destination(kit, monkeypatch: pytest.MonkeyPatch, other: str) -> None:
    """The one that comes later takes the checkout that the first has put there; of another upstream it refuses."""
    real = fetch._put

    def late(temp: Path, dest: Path) -> None:
        pid = os.fork()
        if pid == 0:
            fetch._put = real
            try:
                fetch.checkout(other, lock.load().upstreams[other], dest)
            finally:
                os._exit(0)
        os.waitpid(pid, 0)
        real(temp, dest)

    monkeypatch.setattr(fetch, "_put", late)
    if other == "mini":
        assert refused("d").code == "LG103"
    else:
        assert git(check_out("d"), "status", "--porcelain") == ""
    assert [item.name for item in kit.work.iterdir()] == ["d"]
