"""Forks of DanceGRPO that are out there: what is patched, refused, rehearsed, and what plain `git apply` would do.

Needs local clones in the folder that LEANGRPO_FORKS names (`python tests/support/forks.py FOLDER` makes them).
"""

from __future__ import annotations

import os
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import forks
from support.forks import Fork
from support.toytree import contents, git

from leangrpo_tools import fetch, lock, recipe
from leangrpo_tools.apply import apply
from leangrpo_tools.errors import KitError
from leangrpo_tools.rehearsal import verify
from leangrpo_tools.rehearsal.session import Session
from leangrpo_tools.revert import revert
from leangrpo_tools.textdiff import diff
from leangrpo_tools.transform import Patched, transform
from leangrpo_tools.tree import Content

pytestmark = pytest.mark.upstream
FOLDER = os.environ.get("LEANGRPO_FORKS", "")
FORKS = {fork.name: fork for fork in forks.load()}
SCRIPTS = [(fork, item) for fork in FORKS.values() for item in fork.scripts]
IDS = [f"{fork.name}:{item['file']}" for fork, item in SCRIPTS]
XINRUI, PRECISIONS = "Xinrui-Yang/DanceGRPO@6246276", "Xinrui-Yang/DanceGRPO@0e3f19f"


def clone(fork: Fork) -> Path:
    found = fork.git_dir(Path(FOLDER)) if FOLDER else None
    if found is None:
        pytest.skip(f"{fork.name} is not in LEANGRPO_FORKS ({FOLDER or 'not set'}); see tests/support/forks.py")
    return found


@pytest.fixture(scope="module")
def pin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    entry = lock.load().upstreams["DanceGRPO"]
    assert isinstance(entry, lock.GitEntry)
    if not fetch.cached("DanceGRPO", entry):
        pytest.skip("DanceGRPO is not in the cache; fill it with: apply-patch DanceGRPO /tmp/x [--source PATH]")
    folder = tmp_path_factory.mktemp("pin") / "d"
    fetch.checkout("DanceGRPO", entry, folder)
    return folder


def patched(script: str, file: str, data: bytes) -> Patched | list[Any]:
    return transform(file, data, list(recipe.load("DanceGRPO").find(script).edits))


@pytest.mark.parametrize(("fork", "item"), SCRIPTS, ids=IDS)
def test_each_script_is_patched_or_refused(fork: Fork, item: dict[str, Any], pin: Path) -> None:
    source = clone(fork)
    data = fork.read(source, item["file"])
    own = recipe.load("DanceGRPO").find(item["script"])
    result = patched(item["script"], item["file"], data)
    assert (data == (pin / own.file).read_bytes()) == (item["expect"] == "same")
    if item["expect"] == "refused":
        assert isinstance(result, list)
        text = "\n".join(mismatch.text() for mismatch in result)
        assert all(anchor in text for anchor in item["anchors"]), text
        assert f"{item['file']}:" in text  # candidates with their lines
    else:
        assert isinstance(result, Patched), [mismatch.text() for mismatch in result]
        assert result.data.count(b"lean.flush(") == 1


@pytest.mark.parametrize(("fork", "item"), SCRIPTS, ids=IDS)
def test_what_plain_git_apply_does(fork: Fork, item: dict[str, Any], pin: Path, tmp_path: Path) -> None:
    """The pin's diff on the fork's file, under the file's own name."""
    before = (pin / recipe.load("DanceGRPO").find(item["script"]).file).read_bytes()
    data = fork.read(clone(fork), item["file"])
    after, ours = patched(item["script"], item["file"], before), patched(item["script"], item["file"], data)
    assert isinstance(after, Patched)
    file = tmp_path / item["file"]
    file.parent.mkdir()
    file.write_bytes(data)
    git(tmp_path, "init", "-q")
    change = diff({item["file"]: (Content(before, 0o644), Content(after.data, 0o644))})
    done = subprocess.run(["git", "-C", str(tmp_path), "apply", "-"], input=change, capture_output=True)
    found = "fails"
    if done.returncode == 0:
        found = "right" if isinstance(ours, Patched) and file.read_bytes() == ours.data else "wrong"
    assert found == item["git_apply"], done.stderr.decode()


def test_a_tree_is_patched_whole_or_not_at_all(tmp_path: Path) -> None:
    fork = FORKS["Fredreic1849/BranchGRPO@19fbb9f"]
    tree = fork.checkout(clone(fork), tmp_path / "t")
    before = contents(tree)
    with pytest.raises(KitError) as caught:
        apply("DanceGRPO", tree=tree, scripts=["flux", "wan_2_1"])
    assert caught.value.code == "LG306" and "train_grpo_wan_2_1.py" in str(caught.value)
    assert contents(tree) == before
    result = apply("DanceGRPO", tree=tree)
    assert "flux" in result.scripts and "wan_2_1" in result.absent
    revert(tree)
    assert contents(tree) == before
    assert apply("DanceGRPO", tree=tree, scripts=["flux"]).scripts == ["flux"]
    revert(tree)
    assert contents(tree) == before


def test_the_figures_of_the_readme() -> None:
    counts = Counter(item["expect"] for _, item in SCRIPTS)
    plain = Counter(item["git_apply"] for _, item in SCRIPTS)
    text = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    words = " ".join(text.split())
    assert f"{counts['same']} scripts are the pin's, {counts['patched']} differ from it and are patched" in words
    assert f"takes the pin's diff on {plain['right']} of the {counts['same'] + counts['patched']}" in words


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    with Session(tmp_path_factory.mktemp("forks") / "runs") as found:
        yield found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "script", "options"),
    [
        (XINRUI, "flux", {"ranks": 2}),
        (XINRUI, "flux_lora", {"precision": "bf16", "checkpointing": True, "updates_per_rollout": 2}),
        (XINRUI, "wan_2_1", {"ranks": 2}),
        (PRECISIONS, "wan_2_1", {"precision": "bf16"}),
        ("hokindeng/DanceGRPO@1427126", "flux", {}),
        ("Eastha0526/DanceGRPO@9e22761", "flux_lora", {}),
    ],
)
def test_rehearsals(name: str, script: str, options: dict[str, Any], session: Session, tmp_path: Path) -> None:
    tree = FORKS[name].checkout(clone(FORKS[name]), tmp_path / "t")
    apply("DanceGRPO", tree=tree, scripts=[script])
    report = verify("DanceGRPO", script=script, tree=tree, session=session, **options)
    assert report.ok, report.render()
    assert report.bound.bitwise
    assert sum(report.forwards["patched"].no_grad) < sum(report.forwards["native"].no_grad)
