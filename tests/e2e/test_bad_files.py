"""Files of the user that are none, or have no end: a code at once, and not a byte more read than is of use."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from leangrpo_tools import bundle, cli, lock
from leangrpo_tools import recipe as recipes
from leangrpo_tools.apply import apply
from leangrpo_tools.errors import KitError
from leangrpo_tools.reading import read_regular, read_text


@pytest.fixture(autouse=True)
def at_once() -> Iterator[None]:
    """Ends a test that waits for a pipe, or takes gigabytes."""

    def late(*_: object) -> None:
        raise AssertionError("still waiting")

    old = signal.signal(signal.SIGALRM, late)
    signal.alarm(60)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, old)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 600 << 10  # KiB


def endless(path: Path) -> None:
    path.symlink_to("/dev/zero")


def large(path: Path) -> None:
    with open(path, "wb") as out:
        out.truncate(3 << 30)  # takes no room


KINDS: dict[str, Callable[[Path], object]] = {
    "a pipe": os.mkfifo, "a device": endless, "a folder": Path.mkdir, "3 GiB": large,
}  # fmt: skip
kinds = pytest.mark.parametrize("kind", KINDS)


def put(kind: str, path: Path) -> Path:
    if path.exists():
        path.unlink()
    path.parent.mkdir(parents=True, exist_ok=True)
    KINDS[kind](path)
    return path


def code(*argv: object) -> str:
    """The code that a command ends with, and that its exit status is that of the code; "" for 0."""
    old = sys.argv
    sys.argv = ["leangrpo", *map(str, argv), "--json", "said.json"]
    try:
        cli.leangrpo()
    except SystemExit as err:
        status = err.code
    finally:
        sys.argv = old
    said = json.loads(Path("said.json").read_text())
    Path("said.json").unlink()
    if not status:
        return ""
    from leangrpo_tools.errors import CODES

    assert CODES[said["error"]["code"]].exit_code == status
    return said["error"]["code"]


@kinds
def test_reading(tmp_path: Path, kind: str) -> None:
    with pytest.raises(OSError, match=r"not a regular file|larger than 0\.5 MiB"):
        read_regular(put(kind, tmp_path / "x"), 1 << 19)


def test_reading_what_is_there(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"a\r\nb\rc\n")
    assert read_regular(path, 7) == b"a\r\nb\rc\n" and read_text(path, 7) == path.read_text() == "a\nb\nc\n"
    for limit, name in ((6, path), (99, tmp_path / "none"), (99, tmp_path / "a\0b")):
        with pytest.raises(OSError) as caught:
            read_regular(name, limit)
        assert caught.value.strerror


@kinds
def test_a_bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.chdir(tmp_path)
    assert code("apply", "mini", "d", "--bundle", put(kind, tmp_path / "b")) == "LG113"
    assert os.listdir() == ["b"]


def test_a_bundle_that_unpacks_to_gigabytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("upstream.pack", bundle.MANIFEST):
        for says in (3 << 30, 64 << 20):
            with zipfile.ZipFile("b", "w", zipfile.ZIP_DEFLATED) as out:
                with out.open(name, "w") as member:
                    for _ in range(64):
                        member.write(bytes(1 << 20))
                if name != bundle.MANIFEST:
                    out.writestr(bundle.MANIFEST, "{}")
                out.infolist()[0].file_size = says
            assert code("apply", "mini", "d", "--bundle", "b") == "LG113"
    assert os.listdir() == ["b"]


@kinds
def test_files_of_a_patched_tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.chdir(tmp_path)
    root = apply("mini", "first").dest
    script = recipes.load("mini").find("train").file
    for name, wanted in ((".leangrpo/state.json", "LG308"), (script, "LG208" if kind == "3 GiB" else "LG306")):
        shutil.copytree(root, "d")
        put(kind, Path("d") / name)
        seen = {verb: code(verb, "d") for verb in ("status", "check", "revert")}
        seen["apply"] = code("apply", "mini", "--tree", "d")
        seen["again"] = code("apply", "mini", "d")
        seen["verify"] = code("verify", "mini", "--script", "train", "--tree", "d")
        if kind == "a device" and name == script:
            wanted = "LG303"  # it is a link
        assert set(seen.values()) == {wanted}, seen
        shutil.rmtree("d")
    for name in (".leangrpo/journal.json", ".leangrpo/config.yaml"):
        shutil.copytree(root, "d")
        put(kind, Path("d") / name)
        assert code("status", "d") == "" and code("apply", "mini", "d") in ("", "LG308")
        shutil.rmtree("d")
    shutil.copytree(root, "d")
    for path in Path("d/.leangrpo/store").iterdir():
        put(kind, path)
    shutil.rmtree("d/.git")
    assert code("revert", "d") == ("LG303" if kind == "a device" else "LG308")


@kinds
def test_files_that_plan_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.chdir(tmp_path)
    bad = put(kind, tmp_path / "config/bad.py")
    assert code("plan", "flowGRPO", "--launch", bad) == "LG501"
    assert code("plan", "flowGRPO", "--preset", f"{bad}:p", "--ranks", "1") == "LG508"
    program = next(iter(recipes.load("DanceGRPO").scripts.values())).file
    put(kind, tmp_path / program)
    Path("go.sh").write_text(f"torchrun --nproc_per_node 8 {program}\n")
    assert code("plan", "DanceGRPO", "--launch", "go.sh").startswith("LG5")
    shutil.rmtree("config")
    put(kind, tmp_path / "acc.yaml")
    Path("go.sh").write_text(f"accelerate launch --config_file acc.yaml {program}\n")
    assert code("plan", "DanceGRPO", "--launch", "go.sh").startswith("LG5")


@kinds
def test_sources_and_wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LEANGRPO_CACHE", str(tmp_path / "cache"))
    entry = lock.load().upstreams["trl-ddpo"]
    assert isinstance(entry, lock.PypiEntry)
    bad = put(kind, tmp_path / "w" / entry.filename)
    assert code("apply", "trl-ddpo", "d", "--source", bad) == ("LG107" if kind == "a folder" else "LG105")
    assert code("apply", "trl-ddpo", "d", "--source", bad.parent) == "LG105"
    assert code("apply", "DanceGRPO", "d", "--source", bad) == "LG105"


@kinds
def test_the_lock_and_recipes(kit, kind: str) -> None:
    put(kind, kit.root / "patches/mini/recipe.yaml")
    with pytest.raises(KitError) as caught:
        apply("mini", "d")
    assert caught.value.code == "LG202"
    put(kind, kit.root / "upstreams.lock")
    with pytest.raises(KitError) as caught:
        apply("mini", "d")
    assert caught.value.code == "LG101"


@pytest.mark.parametrize("name", ["a\0b", "a/\0", "n" * 256, "é" * 128 + "/x"])
def test_names_in_files_that_no_file_can_have(kit, name: str) -> None:
    with pytest.raises(ValueError):
        lock.inside(name)
    root = apply("mini", "d").dest
    state = json.loads((root / ".leangrpo/state.json").read_text())
    state["files"][name] = next(iter(state["files"].values()))
    (root / ".leangrpo/state.json").write_text(json.dumps(state))
    with pytest.raises(KitError) as caught:
        apply("mini", "d")
    assert caught.value.code == "LG303"
