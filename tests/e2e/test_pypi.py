"""An upstream that is a wheel of a package registry: fetched once, checked at every use, patched like any other."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import sys
import time
import venv
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support import toywheel
from support.killer import killed_at
from support.toytree import contents, git, snapshot

from leangrpo_tools import bundle, data, fetch, lock, pipcmd, registry
from leangrpo_tools.apply import apply
from leangrpo_tools.check import check
from leangrpo_tools.diff import diff
from leangrpo_tools.errors import KitError
from leangrpo_tools.rehearsal import trees
from leangrpo_tools.revert import revert
from leangrpo_tools.status import listing, status

COMMIT = "35d64ec27a2347e76c5156077a0d6849b7f99f12"
TRL = "5e615c66457cafd5ef1105cd107c309e060d68b7"
"""Of the unpacked wheels; the tree is the one that plain git makes of the same files."""


@pytest.fixture
def toy(kit, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The toy wheel in a folder of its own; the kit pins it."""
    folder = kit.work.with_name("wheels")
    folder.mkdir()
    toywheel.pin(kit.root, toywheel.entry(toywheel.make_wheel(folder / toywheel.NAME)))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    return folder / toywheel.NAME


def pinned() -> lock.PypiEntry:
    entry = lock.load().upstreams["toy"]
    assert isinstance(entry, lock.PypiEntry)
    return entry


def kept() -> Path:
    return data.cache_dir() / "wheels" / toywheel.NAME


def fails(code: str, dest: str = "d", **options) -> KitError:
    with pytest.raises(KitError) as caught:
        apply("toy", dest, **options)
    assert caught.value.code == code, caught.value
    assert not [path for path in Path.cwd().iterdir() if path.name == dest or path.suffix == ".part"]
    return caught.value


def unpatched(dest: Path) -> dict[str, tuple[bytes, int]]:
    return {name: (data, mode & 0o777) for name, (data, mode) in contents(dest).items()}


def test_from_an_index_once(kit, toy: Path) -> None:
    """pip fetches it; the second run asks for nothing; a damaged copy in the cache is fetched again."""
    (kit.work / "pip").mkdir()  # which `python -m pip` would import from the current folder
    (kit.work / "pip/__init__.py").touch()
    (kit.work / "pip/__main__.py").write_text("import pathlib; pathlib.Path(__file__).with_name('ran').touch()\n")
    with toywheel.index(kit.work.with_name("served"), toy) as (url, seen):
        first = apply("toy", "a", source=url)
        assert first.changed and not first.notices and f"/{toywheel.NAME}" in seen
        before = len(seen)
        assert apply("toy", "b", source=url).changed
        assert len(seen) == before
        damaged = bytearray(kept().read_bytes())
        damaged[100] ^= 1
        kept().write_bytes(damaged)
        assert not fetch.cached("toy", pinned())
        assert apply("toy", "c", source=url).changed
        assert len(seen) > before
    assert apply("toy", "d").changed and not (kit.work / "pip/ran").exists()
    assert {git(kit.work / name, "rev-parse", "HEAD") for name in "abcd"} == {first.patch}
    assert [path.name for path in kept().parent.iterdir() if not path.name.endswith(".lock")] == [toywheel.NAME]


def test_what_a_checkout_holds(kit, toy: Path) -> None:
    """Bytes and modes are the wheel's on every machine, and so is the commit."""
    old = os.umask(0o077)
    try:
        apply("toy", "d", source=str(toy))
    finally:
        os.umask(old)
    dest = kit.work / "d"
    revert(dest)
    modes = {name: 0o755 if name.endswith(".sh") else 0o644 for name in toywheel.FILES}
    assert unpatched(dest) == {name: (text.encode(), modes[name]) for name, text in toywheel.FILES.items()}
    assert git(dest, "rev-parse", "HEAD") == COMMIT == git(dest, "rev-parse", "refs/leangrpo/base")
    assert git(dest, "rev-parse", "--abbrev-ref", "HEAD") == "HEAD"
    assert git(dest, "cat-file", "-s", "HEAD:toy_trainer/crlf.txt") == str(len("one\r\ntwo\r\n"))
    assert not (dest / ".leangrpo").exists()


def test_patched_like_any_other(kit, toy: Path) -> None:
    dest = apply("TOY", source=str(toy.parent)).dest
    assert dest.name == "toy" and git(dest, "rev-parse", "HEAD^") == COMMIT
    assert "    lean.flush(model, optimizer)\n    optimizer.step()\n" in (dest / "toy_trainer/train.py").read_text()
    assert "leangrpo" in (dest / ".git/info/exclude").read_text()
    assert b"+from toy_trainer._leangrpo import lean" in diff(dest).text
    assert check(dest).exit_code == 0 and status(dest)["commit"] == COMMIT
    before = snapshot(dest)
    assert not apply("toy", strict_pin=True).changed
    assert snapshot(dest) == before
    (found,) = [item for item in listing() if item["name"] == "toy"]
    assert (found["pin"], found["cached"]) == (f"sha256:{pinned().sha256}", True)
    assert found["from"] == "the package registry, Toy.Trainer 1.2"
    revert(dest)
    assert apply("toy").changed and snapshot(dest).keys() == before.keys()


def test_paths_as_sources(kit, toy: Path) -> None:
    empty = kit.work.with_name("empty")
    empty.mkdir()
    assert toywheel.NAME in str(fails("LG107", source=str(empty)))
    assert "does not exist" in str(fails("LG105", source=str(empty / "nothing.whl")))
    (empty / toywheel.NAME).mkdir()
    fails("LG105", source=str(empty))
    other = toy.with_name("other.whl")
    other.write_bytes(toy.read_bytes() + b"\0")
    error = fails("LG108", source=str(other))
    assert pinned().sha256 in error.what and toywheel.NAME in error.what and error.exit_code == 1
    assert not kept().exists() and not fetch.cached("toy", pinned())
    toy.rename(toy.with_name("renamed.whl"))
    assert apply("toy", "d", source=str(toy.with_name("renamed.whl"))).changed
    assert apply("toy", "e").changed
    # With the wheel in the cache, too: whoever names another one is told.
    assert "does not exist" in str(fails("LG105", "f", source=str(empty / "nothing.whl")))
    fails("LG108", "f", source=str(other))


def test_indexes_that_do_not_have_it(kit, toy: Path) -> None:
    with toywheel.index(kit.work.with_name("served"), toy) as (url, _):
        good = pinned()
        toywheel.pin(kit.root, toywheel.entry("a" * 64))
        error = fails("LG108", source=url)
        assert good.sha256 in error.what and "a" * 64 in error.what and "hidden" not in str(error)
        newer = toywheel.entry(good.sha256, version="1.3", filename=toywheel.NAME.replace("1.2", "1.3"))
        toywheel.pin(kit.root, newer)
        assert "Toy.Trainer 1.3" in str(fails("LG107", source=url))
    error = fails("LG104", source=url)
    assert "refused" in error.what and "--source" in error.fix and "hidden" not in str(error)


def test_without_pip(kit, toy: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    venv.create(tmp_path / "bare", with_pip=False)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bare/bin/python"))
    assert "--source" in fails("LG115").fix
    assert apply("toy", "d", source=str(toy)).changed


def test_two_runs_at_once(kit, toy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put = []  # how often the source is read says nothing: a run that comes late compares it with the cache
    real = registry._put
    monkeypatch.setattr(registry, "_put", lambda *args: (put.append(args), time.sleep(0.05), real(*args))[2])
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: registry.get("toy", pinned(), str(toy)), range(4)))
    assert len(put) == 1 and set(found) == {toy.read_bytes()}


def test_killed_in_the_cache(kit, toy: Path) -> None:
    """It has the whole wheel or none, and the next run tidies up."""
    for step in itertools.count():
        if not killed_at(step, data.cache_dir(), lambda: registry.get("toy", pinned(), str(toy))):
            break
        assert not kept().exists() or kept().read_bytes() == toy.read_bytes()
        assert registry.get("toy", pinned(), str(toy)) == toy.read_bytes()
        kept().unlink()
    assert step > 4 and not list(data.cache_dir().rglob("*.part"))


def test_killed_in_the_checkout(kit, toy: Path) -> None:
    """DEST is complete or absent, and the next run tidies up."""
    for step in itertools.count(0, 6):
        if not killed_at(step, kit.work, lambda: fetch.checkout("toy", pinned(), kit.work / "d", str(toy))):
            break
        assert not (kit.work / "d").exists()
    assert step > 18 and [path.name for path in kit.work.iterdir()] == ["d"]
    assert git(kit.work / "d", "rev-parse", "HEAD") == COMMIT


def test_a_bundle(kit, toy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "core_path", lambda: kit.root / "leangrpo_core")
    file = bundle.make("toy", kit.work / "t.bundle", str(toy)).file
    toy.unlink()
    monkeypatch.setenv("LEANGRPO_CACHE", str(kit.work.with_name("cache of another machine")))
    lacking, other = kit.work / "lacking.bundle", kit.work / "other.bundle"
    with zipfile.ZipFile(file) as old, zipfile.ZipFile(lacking, "w") as new:
        for name in old.namelist():
            text = old.read(name)
            if name == bundle.MANIFEST:
                text = text.replace(b'"upstream.whl":', b'"upstreams.whl":')
            new.writestr(name.replace("upstream.whl", "upstreams.whl"), text)
    assert "holds no upstream.whl" in str(fails("LG113", bundle=lacking))
    assert apply("toy", "d", bundle=file).changed and git(kit.work / "d", "rev-parse", "HEAD^") == COMMIT
    file.unlink()
    assert apply("toy", "e").changed
    toywheel.pin(kit.root, toywheel.entry("b" * 64))
    shutil.copy(lacking, other)
    assert f"at sha256:{'b' * 64}" not in str(fails("LG114", "f", bundle=other))


def test_a_full_disk_and_an_unwritable_cache(kit, toy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device\n"
    assert pipcmd.failure(said, None, pinned()).code == "LG106"
    monkeypatch.setenv("LEANGRPO_CACHE", str(toy))
    fails("LG112", source=str(toy))


@pytest.fixture
def site(kit, toy: Path) -> Path:
    """A folder of installed packages: the toy, and others."""
    root = kit.work / "lib/site-packages"
    with zipfile.ZipFile(toy) as found:
        found.extractall(root)
    for name in ("other/data.json", "other/deep/down.py", "other-3.0.dist-info/RECORD"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("1\n")
    return root


@contextmanager
def opened() -> Iterator[list[str]]:
    """The files and folders that are opened meanwhile."""
    paths: list[str] = []
    on = True

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if on and event in ("open", "os.scandir", "os.listdir"):
            paths.append(str(args[0]))

    sys.addaudithook(hook)
    try:
        yield paths
    finally:
        on = False


def test_installed_packages(site: Path) -> None:
    """``--tree SITE_PACKAGES``: patched in place, other packages neither read nor changed."""
    before = snapshot(site)
    with opened() as looked_at:
        result = apply("toy", tree=site, strict_pin=True)
        assert result.changed and not result.notices and check(site).exit_code == 0
        assert not apply("toy", tree=site).changed
        exported = trees.export(site, site.parent / "copies", "train")
    assert str(site / "toy_trainer") in looked_at
    assert not [path for path in looked_at if path.startswith(str(site / "other"))]
    for copy in (exported.native, exported.patched):
        assert {path.name for path in copy.iterdir()} <= {"toy_trainer", "toy_trainer-1.2.dist-info", ".leangrpo"}
    assert (exported.native / "toy_trainer/train.py").read_text() == toywheel.TRAIN
    now = snapshot(site)
    assert [name for name, item in before.items() if now[name] != item] == ["toy_trainer/train.py"]
    with opened() as looked_at:
        revert(site)
    assert not [path for path in looked_at if path.startswith(str(site / "other"))]
    assert contents(site) == {name: item[:2] for name, item in before.items()}
    shutil.copytree(exported.patched / "toy_trainer/_leangrpo", site / "toy_trainer/_leangrpo")
    with opened() as looked_at, pytest.raises(KitError) as caught:
        check(site)
    assert caught.value.code == "LG308"
    assert str(site / "other") not in looked_at


def test_another_version_is_installed(site: Path) -> None:
    (site / "toy_trainer-1.2.dist-info").rename(site / "Toy_Trainer-1.4.dist-info")
    with pytest.raises(KitError) as caught:
        apply("toy", tree=site, strict_pin=True)
    assert caught.value.code == "LG312" and "Toy.Trainer 1.4" in caught.value.what
    (notice,) = apply("toy", tree=site).notices
    assert "Toy.Trainer 1.4, the pin is Toy.Trainer 1.2" in notice
    revert(site)
    (site / "Toy_Trainer-1.4.dist-info/RECORD").unlink()
    shutil.rmtree(site / "Toy_Trainer-1.4.dist-info")
    (notice,) = apply("toy", tree=site).notices
    assert "no known version of Toy.Trainer" in notice


@pytest.mark.upstream
def test_the_real_wheel(tmp_path: Path) -> None:
    """TRL from the registry, or the cache: every byte of the wheel, at the same commit on every machine."""
    name = "trl-ddpo"
    entry = lock.load().upstreams[name]
    assert isinstance(entry, lock.PypiEntry)
    try:
        fetch.checkout(name, entry, tmp_path / "d")
    except KitError as err:
        if err.code in ("LG104", "LG115"):
            pytest.skip(str(err))
        raise
    with zipfile.ZipFile(data.cache_dir() / "wheels" / entry.filename) as found:
        expected = {item.filename: (found.read(item), 0o644) for item in found.infolist()}
    assert unpatched(tmp_path / "d") == expected and len(expected) == 148
    assert git(tmp_path / "d", "rev-parse", "HEAD") == TRL
    assert git(tmp_path / "d", "status", "--porcelain") == ""
    subprocess.run(["git", "-C", str(tmp_path / "d"), "fsck", "--strict"], check=True, capture_output=True)
