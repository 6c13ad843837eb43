"""Recipes: strict, and every problem at once."""

from pathlib import Path

import pytest

from leangrpo_tools import lock, recipe
from leangrpo_tools.errors import KitError

GOOD = """\
format: 1
upstream: toy
vendor: toy/_leangrpo
families:
  one:
    parameters: [calls, network]
    edits:
      - codemod: wrap_call
        params: {function: f, call: "${network}", wrapper: lean.rollout_call, arguments: [rows, i]}
        count: "${calls}"
        reason: because it has to be
scripts:
  a:
    file: a.py
    family: one
    values: {calls: 2, network: self.net}
    rehearsal: toy_a
    updates_per_rollout: "1"
  b:
    file: b.py
    family: one
    values: {calls: 1, network: net}
    edits:
      - codemod: insert_import
        file: c.py
        params: {statement: import x}
        reason: because it has to be
    rehearsal: toy_b
    updates_per_rollout: "2"
    warnings: [careful]
"""


def load(tmp_path: Path, text: str) -> recipe.Recipe:
    (tmp_path / "recipe.yaml").write_text(text)
    return recipe.load("toy", tmp_path / "recipe.yaml")


def problems(tmp_path: Path, text: str) -> str:
    with pytest.raises(KitError) as caught:
        load(tmp_path, text)
    assert caught.value.code == "LG202"
    return caught.value.what


def test_a_family_serves_scripts_through_parameters(tmp_path: Path) -> None:
    found = load(tmp_path, GOOD)
    first, second = found.find("A"), found.find("b")
    assert first.edits[0].count == 2 and first.edits[0].params.call == "self.net"  # type: ignore[attr-defined]
    assert second.edits[0].count == 1 and second.edits[0].file == "b.py" and second.edits[1].file == "c.py"
    assert set(found.edits(["a", "b"])) == {"a.py", "b.py", "c.py"}


def test_a_shared_edit_is_made_once(tmp_path: Path) -> None:
    found = load(
        tmp_path,
        GOOD.replace("file: b.py", "file: a.py").replace("calls: 1, network: net", "calls: 2, network: self.net"),
    )
    assert len(found.edits(["a", "b"])["a.py"]) == 1


def test_unknown_script(tmp_path: Path) -> None:
    with pytest.raises(KitError) as caught:
        recipe.load("DanceGRPO").find("flx")
    assert caught.value.code == "LG203" and "did you mean flux?" in caught.value.what


def test_a_script_that_is_left_alone(tmp_path: Path) -> None:
    reason = "its network is sampled by a program of its own, which no edit reaches"
    text = GOOD + f"refused:\n  c: {{file: c.py, reason: {reason!r}}}\n"
    found = load(tmp_path, text)
    with pytest.raises(KitError) as caught:
        found.find("C")
    assert caught.value.code == "LG210" and caught.value.what.endswith("toy's c (c.py) is left alone")
    assert caught.value.cause == reason
    assert set(found.scripts) == {"a", "b"}
    assert "refused.a: is among the scripts, too" in problems(tmp_path, text.replace("  c: {file", "  a: {file"))
    assert "at least 40 characters" in problems(tmp_path, text.replace(reason, "it does not work"))


def test_every_problem_at_once(tmp_path: Path) -> None:
    text = GOOD.replace("codemod: insert_import", "codemod: insert_imports")
    text = text.replace('call: "${network}"', 'call: "${netwrk}"').replace("calls: 1, ", "")
    text = text.replace("arguments: [rows, i]", "arguments: [rows, 'i +'], more: 1")
    found = problems(tmp_path, text)
    for part in (
        "there is no codemod 'insert_imports'",
        "no value for ${netwrk}",
        "scripts.b.values: calls is missing",
        "params.arguments.1: not a Python expression",
        "params.more: Extra inputs are not permitted",
    ):
        assert part in found, part


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("vendor: toy/_leangrpo", "vendor: ../_leangrpo", "inside the tree"),
        ("upstream: toy", "upstream: other", "belongs to 'toy'"),
        ("family: one", "family: two", "there is no family 'two'"),
        ("reason: because it has to be", "reason: so", "at least 10 characters"),
        ("statement: import x", "statement: x = 1", "must be an import statement"),
        ("calls: 2", "calls: 0", "at least 1"),
        ("    family: one\n    values: {calls: 2, network: self.net}\n", "", "neither a family nor edits"),
        ("format: 1", "format: one", "format"),
        ("    rehearsal: toy_a\n", "", "must have a rehearsal, or not_rehearsed"),
        (
            "    rehearsal: toy_a\n",
            "    rehearsal: toy_a\n    not_rehearsed: no time for it\n",
            "must have a rehearsal, or",
        ),
        (
            "    parameters: [calls, network]\n",
            "    parameters: [calls, network]\n    defaults: {call: 1}\n",
            "families.one.defaults: call is not a parameter",
        ),
    ],
)
def test_each_kind_of_problem(tmp_path: Path, old: str, new: str, words: str) -> None:
    assert words in problems(tmp_path, GOOD.replace(old, new))


def test_a_family_knows_what_scripts_need_not_say(tmp_path: Path) -> None:
    text = GOOD.replace("    edits:\n", "    defaults: {calls: 3, network: other}\n    edits:\n", 1)
    found = load(tmp_path, text.replace("calls: 1, network: net", "network: net"))
    assert [found.find(name).edits[0].count for name in "ab"] == [2, 3]
    assert [found.find(name).edits[0].params.call for name in "ab"] == ["self.net", "net"]  # type: ignore[attr-defined]


def test_a_script_without_a_rehearsal_says_why(tmp_path: Path) -> None:
    found = load(tmp_path, GOOD.replace("rehearsal: toy_a", "not_rehearsed: its network is in a wheel for CUDA"))
    assert not found.find("a").rehearsal and "for CUDA" in found.find("a").not_rehearsed
    assert found.find("b").rehearsal and not found.find("b").not_rehearsed


def test_a_family_without_scripts(tmp_path: Path) -> None:
    assert "no script uses it" in problems(tmp_path, GOOD.replace("families:\n", "families:\n  idle: {edits: []}\n"))


def test_the_shipped_recipes_are_valid_and_warn_where_they_must() -> None:
    for name in lock.load().upstreams:
        assert recipe.load(name).scripts
    dance = recipe.load("DanceGRPO")
    assert "never synchronises gradients" in dance.find("wan_2_1").warnings[0]
    assert not dance.find("flux").warnings
