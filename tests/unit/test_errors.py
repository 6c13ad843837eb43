"""Error codes are distinct, each is raised somewhere, and messages have their parts."""

import ast
import re
from pathlib import Path

import pytest

import leangrpo_tools
from leangrpo_core import errors as runtime_errors
from leangrpo_tools import errors, explain
from leangrpo_tools.errors import CODES, KitError

SOURCES = [
    path for path in Path(leangrpo_tools.__file__).parent.rglob("*.py") if path.name not in ("errors.py", "explain.py")
]


def test_distinct() -> None:
    tree = ast.parse(Path(errors.__file__).read_text())
    keys = [node.value for item in ast.walk(tree) if isinstance(item, ast.Dict) for node in item.keys
            if isinstance(node, ast.Constant) and str(node.value).startswith("LG")]  # fmt: skip
    assert keys and len(keys) == len(set(keys))
    titles = [code.title for code in CODES.values()]
    assert len(titles) == len(set(titles))


def test_each_is_raised_and_each_that_is_raised_is_known() -> None:
    used: set[str] = set()
    for path in SOURCES:
        used |= set(re.findall(r'"(LG[1-5]\d\d)"', path.read_text()))
    assert set(CODES) == used | {"LG120"}


def test_the_runtime_has_its_own_range() -> None:
    used: set[str] = set()
    for path in Path(runtime_errors.__file__).parent.rglob("*.py"):
        if path.name != "errors.py":
            used |= set(re.findall(r'"(LG\d{3})"', path.read_text()))
    assert set(runtime_errors.CODES) == used and all(code.startswith("LG6") for code in used)


def test_each_is_explained() -> None:
    assert set(explain.EXPLAINED) == set(CODES) | set(runtime_errors.CODES) == set(explain.titles())
    for code in explain.EXPLAINED:
        text = explain.explain(code.lower())
        assert text.startswith(f"{code}: ") and "\n\ncause: " in text and "\n\nwhat to do: " in text
    with pytest.raises(KitError) as caught:
        explain.explain("LG999")
    assert caught.value.code == "LG120" and "LG201" in caught.value.cause


def test_no_sentence_of_an_explanation_is_long() -> None:
    """At most 30 words, so that it is read at once."""
    for code, parts in explain.EXPLAINED.items():
        sentences = [words for text in parts for words in re.split(r"(?<=[.!?])\s+", text)]
        assert all(len(words.split()) <= 30 for words in sentences), code
        assert all(text.endswith((".", "leangrpo-kit")) for text in parts), code


def test_exit_codes() -> None:
    assert {code.exit_code for code in CODES.values()} <= {1, 2, 3}


def test_text() -> None:
    err = KitError("LG102", "what", cause="why", fix="this")
    assert str(err) == "error LG102: what\ncause: why\nfix: this"
    assert err.exit_code == 2
    assert str(KitError("LG102", "what")) == "error LG102: what"


def test_what_plan_and_recipes_refuse_has_a_cause_of_its_own() -> None:
    """Not only a code and a way out: the reader learns why it is so here."""
    wanted = {"LG210", "LG501", "LG502", "LG504", "LG506", "LG508"}
    seen: set[str] = set()
    for path in SOURCES:
        for call in (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)):
            code = call.args[0].value if call.args and isinstance(call.args[0], ast.Constant) else None
            if code in wanted and isinstance(call.func, ast.Name) and call.func.id == "KitError":
                seen.add(str(code))
                assert any(word.arg == "cause" for word in call.keywords), (path.name, call.lineno)
    assert seen == wanted
