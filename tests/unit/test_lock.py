"""upstreams.lock: strict, and every problem at once."""

from pathlib import Path

import pytest

from leangrpo_tools import data, lock
from leangrpo_tools.errors import KitError

GOOD = """\
format: 1
upstreams:
  One:
    kind: git
    url: "https://example.org/one"
    commit: "0123456789012345678901234567890123456789"
    tree: "0123456789012345678901234567890123456789"
    exclude: ["big.txt", "data/"]
    licence: MIT
  two:
    kind: embedded
    path: patches/two/tree
    sha256: "0123456789012345678901234567890123456789012345678901234567890123"
    licence: MIT
"""


def problems(tmp_path: Path, text: str) -> str:
    path = tmp_path / "upstreams.lock"
    path.write_text(text)
    with pytest.raises(KitError) as caught:
        lock.load(path)
    assert caught.value.code == "LG101"
    return caught.value.what


def test_good(tmp_path: Path) -> None:
    (tmp_path / "l").write_text(GOOD)
    entry = lock.load(tmp_path / "l").upstreams["One"]
    assert isinstance(entry, lock.GitEntry)
    assert entry.excluded("big.txt") and entry.excluded("data/x/y") and not entry.excluded("data.py")


def test_every_problem_at_once_with_its_line(tmp_path: Path) -> None:
    text = GOOD.replace("https://example.org/one", "--upload-pack=x").replace('"big.txt"', '"../big.txt"')
    text = (
        text.replace("    tree: ", "    wood: ")
        .replace("kind: embedded", "kind: embeded")
        .replace("1\n", "1\nmore: 2\n", 1)
    )
    found = problems(tmp_path, text)
    assert "5 problems" in found or "6 problems" in found
    for part in (
        "upstreams.lock:2: more: unknown name",
        "upstreams.lock:6: upstreams.One.url: must be a URL or a path",
        "upstreams.lock:8: upstreams.One.wood: unknown name",
        "upstreams.One.tree: missing",
        "upstreams.lock:9: upstreams.One.exclude[0]: must be a relative path inside the tree",
        "upstreams.two",
    ):
        assert part in found, part


def test_unquoted_numbers_doubled_keys_and_short_hashes(tmp_path: Path) -> None:
    text = GOOD.replace('commit: "0123456789012345678901234567890123456789"', "commit: 1234567")
    text = text.replace("    licence: MIT\n  two", "    licence: MIT\n    licence: BSD\n  two")
    found = problems(tmp_path, text)
    assert "put it in quotes" in found and "licence: given twice" in found
    assert "commit" in problems(tmp_path, GOOD.replace('commit: "0123', 'commit: "123'))


@pytest.mark.parametrize(
    "text", ["", "format: [\n", "- 1\n", "a: b: c\n", "\tformat: 1\n", "format: 2\nupstreams: {}\n"]
)
def test_broken_files(tmp_path: Path, text: str) -> None:
    assert "upstreams.lock" in problems(tmp_path, text)


def test_not_utf8(tmp_path: Path) -> None:
    (tmp_path / "l").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(KitError):
        lock.load(tmp_path / "l")


def test_names_in_two_cases(tmp_path: Path) -> None:
    assert "more than one case" in problems(tmp_path, GOOD.replace("  two:", "  one:"))


def test_find_in_any_case_and_the_nearest_name() -> None:
    known = lock.load()
    for name in ("danceGRPO", "DanceGRPO", "dancegrpo", "DANCEGRPO"):
        assert known.find(name) == "DanceGRPO"
    with pytest.raises(KitError) as caught:
        known.find("dancgrpo")
    assert caught.value.code == "LG102"
    assert "did you mean DanceGRPO?" in caught.value.what and "mini" in caught.value.cause


def test_the_shipped_lock_pins_what_is_shipped() -> None:
    """After a deliberate change of the embedded tree: python -m leangrpo_tools.lock --write"""
    for name, entry in lock.load().upstreams.items():
        assert data.recipe_path(name).is_file()
        if isinstance(entry, lock.EmbeddedEntry):
            assert lock.content_hash(data.data_root() / entry.path) == entry.sha256


def test_every_patch_folder_is_locked() -> None:
    folders = {path.name for path in (data.data_root() / "patches").iterdir() if path.is_dir()}
    assert folders == set(lock.load().upstreams)
