"""Error codes are distinct, each is raised somewhere, and messages have their parts."""

import ast
import re
from pathlib import Path

import pytest

import leangrpo_tools
from leangrpo_tools import errors
from leangrpo_tools.errors import CODES, KitError

SOURCES = [path for path in Path(leangrpo_tools.__file__).parent.rglob("*.py") if path.name != "errors.py"]


def test_distinct() -> None:
    tree = ast.parse(Path(errors.__file__).read_text())
    keys = [node.value for item in ast.walk(tree) if isinstance(item, ast.Dict) for node in item.keys
            if isinstance(node, ast.Constant) and str(node.value).startswith("LG")]  # fmt: skip
    assert keys and len(keys) == len(set(keys))
    titles = [code.title for code in CODES.values()]
    assert len(titles) == len(set(titles))
    with pytest.raises(ValueError, match="already means"):
        errors.register("LG101", "something else", 1)


def test_each_is_raised_and_each_that_is_raised_is_known() -> None:
    used: set[str] = set()
    registered: set[str] = set()
    for path in SOURCES:
        text = path.read_text()
        registered |= set(re.findall(r'register\(\s*"(LG\d{3})"', text))
        used |= set(re.findall(r'"(LG[1-5]\d\d)"', re.sub(r'register\(\s*"LG\d{3}"', "", text)))
    assert set(CODES) | registered == used


def test_exit_codes() -> None:
    assert {code.exit_code for code in CODES.values()} <= {1, 2, 3}


def test_text() -> None:
    err = KitError("LG102", "what", cause="why", fix="this")
    assert str(err) == "error LG102: what\ncause: why\nfix: this"
    assert err.exit_code == 2
    assert str(KitError("LG102", "what")) == "error LG102: what"
