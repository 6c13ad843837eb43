"""One file for machines without network, and trees that import an installed runtime."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from support.toytree import contents, git, snapshot

from leangrpo_tools import bundle, data, fetch, lock
from leangrpo_tools import state as states
from leangrpo_tools.apply import apply
from leangrpo_tools.diff import diff
from leangrpo_tools.errors import KitError
from leangrpo_tools.revert import revert
from leangrpo_tools.tree import Tree

FLUX = "fastvideo/train_grpo_flux.py"


@pytest.fixture
def made(kit, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A bundle of the toy upstream on a machine that reaches neither the upstream nor the cache it was made from."""
    monkeypatch.setattr(data, "core_path", lambda: kit.root / "leangrpo_core")
    result = bundle.make("dancegrpo", kit.work / "d.bundle")
    assert result.bytes == result.file.stat().st_size and not list(kit.work.glob("*.part"))
    kit.upstream.rename(kit.upstream.with_name("out of reach"))
    monkeypatch.setenv("LEANGRPO_CACHE", str(kit.work.with_name("cache of another machine")))
    return result.file


def repacked(file: Path, **changes: bytes | None) -> Path:
    """The bundle with members replaced, or left out (None), and the manifest as given or unchanged."""
    other = file.with_name("other.bundle")
    with zipfile.ZipFile(file) as old, zipfile.ZipFile(other, "w") as new:
        for name in old.namelist():
            content = changes.get(name.replace(".", "_").replace("/", "_"), old.read(name))
            if content is not None:
                new.writestr(name, content)
    return other


def fails(code: str, file: Path, name: str = "DanceGRPO", **options) -> str:
    before = snapshot(file.parent)
    with pytest.raises(KitError) as caught:
        apply(name, "d", bundle=file, **options)
    assert caught.value.code == code, caught.value
    assert snapshot(file.parent) == before
    return str(caught.value)


def test_the_same_tree_without_network(kit, made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(KitError, match="does not exist"):
        apply("DanceGRPO", "nowhere")
    result = apply("DanceGRPO", "d", bundle=made)
    assert result.changed and git(result.dest, "status", "--porcelain") == ""
    monkeypatch.setenv("LEANGRPO_CACHE", str(kit.work.with_name("cache")))
    online = apply("DanceGRPO", "online")
    assert contents(result.dest) == contents(online.dest)
    assert git(result.dest, "rev-parse", "HEAD") == git(online.dest, "rev-parse", "HEAD")


def test_later_runs_need_neither_network_nor_bundle(kit, made: Path) -> None:
    apply("DanceGRPO", "a", bundle=made)
    made.unlink()
    assert not apply("DanceGRPO", "a").changed
    assert apply("DanceGRPO", "b").changed
    revert(kit.work / "b")
    assert apply("DanceGRPO", "b").changed


def test_the_bundle_brings_the_kit_along(kit, made: Path, tmp_path: Path) -> None:
    """As on a machine that has the dependencies, but not the kit."""
    (tmp_path / "elsewhere").mkdir()
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, str(made), "apply", "DanceGRPO", "d", "--bundle", str(made), "--json", "a.json"]
    done = subprocess.run(command, cwd=tmp_path / "elsewhere", env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "elsewhere/a.json").read_text())["changed"]
    assert (tmp_path / "elsewhere/d/fastvideo/_leangrpo/__init__.py").is_file()


def test_damaged_bundles(kit, made: Path) -> None:
    whole = made.read_bytes()
    other = made.with_name("other.bundle")
    for content in (whole[: len(whole) // 2], b"", b"no zip file at all"):
        other.write_bytes(content)
        assert "damaged" in fails("LG113", other)
    with zipfile.ZipFile(made) as found:
        at = found.getinfo(bundle.PACK).header_offset + 200
    other.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
    fails("LG113", other)
    assert "another hash" in fails("LG113", repacked(made, kit_upstreams_lock=b"format: 1\n"))
    assert "upstream.pack" in fails("LG113", repacked(made, upstream_pack=None))
    fails("LG113", repacked(made, bundle_json=b"{}"))
    fails("LG113", repacked(made, bundle_json=None))
    other.unlink()
    assert "cannot be read" in fails("LG113", kit.work / "nothing.bundle")


def test_a_manifest_that_fits_does_not_make_other_files_pass(made: Path) -> None:
    """Whoever writes the manifest too still meets the hashes of upstreams.lock."""
    import hashlib

    with zipfile.ZipFile(made) as found:
        manifest = json.loads(found.read(bundle.MANIFEST))
    empty = b"PACK" + (2).to_bytes(4, "big") + (0).to_bytes(4, "big")
    empty += hashlib.sha1(empty).digest()
    manifest["files"][bundle.PACK] = hashlib.sha256(empty).hexdigest()
    fails("LG108", repacked(made, upstream_pack=empty, bundle_json=json.dumps(manifest).encode()))
    del manifest["files"][bundle.PACK]
    fails("LG113", repacked(made, bundle_json=json.dumps(manifest).encode()))


def test_bundles_that_do_not_fit(kit, made: Path) -> None:
    assert "it holds DanceGRPO, not mini" in fails("LG114", made, "mini")
    recipe = kit.root / "patches/DanceGRPO/recipe.yaml"
    recipe.write_text(recipe.read_text() + "# newer\n")
    assert "its kit" in fails("LG114", made) and "python" in fails("LG114", made)
    path = kit.root / "upstreams.lock"
    entry = lock.load(path).upstreams["DanceGRPO"]
    assert isinstance(entry, lock.GitEntry)
    path.write_text(path.read_text().replace(entry.commit, "b" * 40))
    assert f"at {entry.commit}" in fails("LG114", made)
    fails("LG103", made, source=str(kit.upstream))
    fails("LG103", made, tree=kit.work)


def test_an_embedded_upstream(kit, made: Path) -> None:
    file = bundle.make("mini", kit.work / "m.bundle").file
    assert apply("mini", "m", bundle=file).changed
    entry = lock.load().upstreams["DanceGRPO"]
    assert isinstance(entry, lock.GitEntry) and not fetch.cached("DanceGRPO", entry)


def test_an_installed_runtime(kit) -> None:
    result = apply("DanceGRPO", "d", vendored=False)
    assert not (result.dest / "fastvideo/_leangrpo").exists() and set(result.files.values()) == {"edited"}
    assert "from leangrpo_core import lean\n" in (result.dest / FLUX).read_text()
    assert states.require(Tree(result.dest)).vendored is False
    before = snapshot(result.dest)
    assert not apply("DanceGRPO", "d").changed and not apply("DanceGRPO", "d", vendored=False).changed
    assert snapshot(result.dest) == before
    assert diff(result.dest).text and not diff(result.dest).left_out
    revert(result.dest)
    assert git(result.dest, "status", "--porcelain") == "" and not (result.dest / ".leangrpo").exists()


def test_from_a_copy_to_an_installed_runtime_and_back(kit) -> None:
    first = contents(apply("DanceGRPO", "d").dest)
    assert apply("DanceGRPO", "d", vendored=False).changed
    assert not (kit.work / "d/fastvideo/_leangrpo/__init__.py").exists()
    assert contents(apply("DanceGRPO", "other", vendored=False).dest) == contents(kit.work / "d")
    assert apply("DanceGRPO", "d", vendored=True).changed
    assert contents(kit.work / "d") == first
