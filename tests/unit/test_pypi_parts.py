"""Wheels that must not be unpacked, what pip's words mean, and entries of the lock that make no sense."""

from __future__ import annotations

import io
import stat
import zipfile
from pathlib import Path

import pytest
from support import toywheel

from leangrpo_tools import lock, pipcmd, wheel
from leangrpo_tools.errors import KitError

ENTRY = toywheel.entry("0" * 64)


def packed(*members: zipfile.ZipInfo) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for item in members:
            archive.writestr(item, b"" if item.is_dir() else b"x")
    return out.getvalue()


def refused(content: bytes) -> str:
    with pytest.raises(KitError) as caught:
        wheel.unpack(content, ENTRY)
    assert caught.value.code == "LG116", caught.value
    return caught.value.what


@pytest.mark.parametrize(
    "name",
    [
        "/etc/passwd", "../x", "a/../../x", "a/./x", "a//x", "..", "C:\\x", "c:/x", "a\\..\\x", ".git/config",
        "a/.GIT/hooks/x", "-x", "a\nb", '"a"', "a?", "a|b",
    ],
)  # fmt: skip
def test_names_that_leave_the_tree_or_fit_nowhere(name: str) -> None:
    assert repr(name) in refused(packed(toywheel.member("fine.py"), toywheel.member(name)))


def test_a_name_with_a_zero_byte() -> None:
    """zipfile shortens it: ``x.py`` would be written, a name that the checks have not seen."""
    refused(packed(toywheel.member("x.pyQy")).replace(b"x.pyQ", b"x.py\0"))


@pytest.mark.parametrize("kind", [stat.S_IFLNK, stat.S_IFIFO, stat.S_IFCHR, stat.S_IFDIR])
def test_only_regular_files(kind: int) -> None:
    what = refused(packed(toywheel.member("a", kind | 0o777)))
    assert ("symbolic link" in what) == (kind == stat.S_IFLNK)


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize("names", [("a", "a"), ("a/B.py", "A/b.py"), ("a", "a/b"), ("a/b", "a"), ("a", "a/")])
def test_names_given_twice(names: tuple[str, str]) -> None:
    refused(packed(*(toywheel.member(name, stat.S_IFDIR if name[-1] == "/" else stat.S_IFREG) for name in names)))


def test_damaged_archives() -> None:
    whole = packed(toywheel.member("a"))
    for content in (b"", b"no zip", whole[:-10], whole.replace(b"x", b"y", 1)):
        refused(content)


def test_files_and_modes() -> None:
    modes = {"a": 0, "b": stat.S_IFREG | 0o4777, "c": stat.S_IFREG | 0o600, "d/": stat.S_IFDIR | 0o777, "d/e": 0o100444}
    found = wheel.unpack(packed(*(toywheel.member(name, mode) for name, mode in reversed(modes.items()))), ENTRY)
    assert [(name, item.mode) for name, item in found.items()] == [
        ("a", 0o644), ("b", 0o755), ("c", 0o644), ("d/e", 0o644)
    ]  # fmt: skip
    assert {item.data for item in found.values()} == {b"x"}


@pytest.mark.parametrize(
    ("said", "code"),
    [
        ("/usr/bin/python3: No module named pip", "LG115"),
        ("ERROR: [Errno 122] Disk quota exceeded", "LG106"),
        ("WARNING: Retrying (Retry(total=0)) after connection broken by 'ProxyError('no')': /simple/x/\n"
         "ERROR: No matching distribution found for x==1", "LG104"),
        ("ERROR: THESE PACKAGES DO NOT MATCH THE HASHES FROM THE REQUIREMENTS FILE.", "LG108"),
        ("ERROR: No matching distribution found for x==1", "LG107"),
        ("WARNING: The repository located at x is not a trusted or secure host and is being ignored.\n"
         "ERROR: No matching distribution found for x==1", "LG105"),
        ("ERROR: ResolutionImpossible", "LG105"),
        ("", "LG105"),
    ],
)  # fmt: skip
def test_what_pip_says(said: str, code: str) -> None:
    error = pipcmd.failure(said, "https://me:secret@example.org/simple", ENTRY)
    assert error.code == code and "secret" not in str(error)


def test_what_is_installed(tmp_path: Path) -> None:
    assert wheel.installed_version(tmp_path, ENTRY) is None and wheel.top_names(tmp_path, ENTRY) is None
    (tmp_path / "toy_trainer_more-9.dist-info").mkdir()
    (tmp_path / "Toy.Trainer-1.3.post1.dist-info").mkdir()
    assert wheel.installed_version(tmp_path, ENTRY) == "1.3.post1" and wheel.top_names(tmp_path, ENTRY) is None
    record = 'toy/a.py,sha256=x,1\n"toy/b,c.py",,\n../../bin/toy,,\none.py,,\n/abs/x,,\n'
    (tmp_path / "Toy.Trainer-1.3.post1.dist-info/RECORD").write_text(record)
    assert wheel.top_names(tmp_path, ENTRY) == {"toy", "one.py"}


GOOD = """\
format: 1
upstreams:
  toy:
    kind: pypi
    project: Toy.Trainer
    version: "1.2"
    filename: toy_trainer-1.2-py3-none-any.whl
    sha256: "0000000000000000000000000000000000000000000000000000000000000000"
    licence: MIT
"""


def test_a_good_entry(tmp_path: Path) -> None:
    (tmp_path / "l").write_text(GOOD)
    assert lock.load(tmp_path / "l").upstreams["toy"] == ENTRY


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ('"1.2"', "1.2", "l:6: upstreams.toy.version: Input should be a valid string (found 1.2: put it in quotes)"),
        ('"1.2"', '">=1.2"', "l:6: upstreams.toy.version: must be one version, such as 0.23.1"),
        ('"1.2"', '"1.*"', "l:6: upstreams.toy.version: must be one version"),
        ('"1.2"', '"1.3"', "upstreams.toy: filename: toy_trainer 1.2, but the entry pins Toy.Trainer 1.3"),
        ("toy_trainer-1", "other-1", "upstreams.toy: filename: other 1.2, but the entry pins Toy.Trainer 1.2"),
        ("project: Toy.Trainer", "project: '--index-url x'", "l:5: upstreams.toy.project: must be the name of a proj"),
        ("none-any.whl", "none-linux.whl", "l:7: upstreams.toy.filename: must be a wheel for every machine"),
        ("toy_trainer-1.2-", "../toy_trainer-1.2-", "l:7: upstreams.toy.filename: must be a wheel for every machine"),
        ('"000', '"00', "l:8: upstreams.toy.sha256: String should match pattern"),
        ("    licence: MIT\n", "", "upstreams.toy.licence: missing"),
        ("    licence", "    url: x\n    licence", "l:9: upstreams.toy.url: unknown name"),
    ],
)
def test_entries_that_make_no_sense(tmp_path: Path, old: str, new: str, problem: str) -> None:
    assert old in GOOD
    (tmp_path / "l").write_text(GOOD.replace(old, new, 1))
    with pytest.raises(KitError) as caught:
        lock.load(tmp_path / "l")
    assert caught.value.code == "LG101" and problem in caught.value.what, caught.value.what
