"""apply-patch --tree: a user's own checkout, in any condition, and everything that must be refused."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from support.toytree import FLUX, WAN, contents, git, snapshot

from leangrpo_tools.apply import apply
from leangrpo_tools.errors import KitError
from leangrpo_tools.revert import revert

FILE = "fastvideo/train_grpo_flux.py"
OTHER = "fastvideo/train_grpo_wan_2_1.py"


def refused(code: str, tree: Path, **options) -> str:
    """Apply, expect ``code``, and check that nothing was written."""
    before = snapshot(tree)
    with pytest.raises(KitError) as caught:
        apply("DanceGRPO", tree=tree, **options)
    assert caught.value.code == code, caught.value
    assert snapshot(tree) == before
    assert not (tree / ".leangrpo").exists()
    return str(caught.value)


def test_a_dirty_checkout_on_a_branch(clone) -> None:
    (clone / "README.md").write_text("my readme\n")
    (clone / FILE).write_text(FLUX.replace("LIMIT = 3", "LIMIT = 4"))
    (clone / "new.py").write_text("x = 1\n")
    git(clone, "add", "new.py", FILE)
    (clone / FILE).write_text(FLUX.replace("LIMIT = 3", "LIMIT = 5"))
    git(clone, "checkout", "-q", "-b", "work")
    status, index = git(clone, "status", "--porcelain"), git(clone, "ls-files", "-s")
    head, before = git(clone, "rev-parse", "HEAD"), contents(clone)
    result = apply("DanceGRPO", tree=clone)
    assert any("left alone" in text for text in result.notices)
    assert git(clone, "symbolic-ref", "HEAD") == "refs/heads/work" and git(clone, "rev-parse", "HEAD") == head
    assert git(clone, "ls-files", "-s") == index
    assert "LIMIT = 5" in (clone / FILE).read_text() and "lean.flush" in (clone / FILE).read_text()
    assert "LIMIT = 5" in git(clone, "show", f"refs/leangrpo/base:{FILE}")
    assert git(clone, "rev-parse", "refs/leangrpo/base^") == head
    assert not apply("DanceGRPO", tree=clone).changed
    revert(clone)
    assert contents(clone) == before
    assert git(clone, "status", "--porcelain") == status and git(clone, "ls-files", "-s") == index
    assert git(clone, "for-each-ref", "refs/leangrpo") == ""


def test_scripts_added_later_to_a_dirty_checkout(clone) -> None:
    (clone / FILE).write_text(FLUX.replace("LIMIT = 3", "LIMIT = 5"))
    before = contents(clone)
    apply("DanceGRPO", tree=clone, scripts=["flux"])
    apply("DanceGRPO", tree=clone, scripts=["wan_2_1"])
    assert git(clone, "show", f"refs/leangrpo/base:{FILE}") == FLUX.replace("LIMIT = 3", "LIMIT = 5").strip()
    assert git(clone, "show", f"refs/leangrpo/base:{OTHER}") == WAN.strip()
    revert(clone)
    assert contents(clone) == before


def test_another_commit_is_patched_with_a_notice(clone) -> None:
    (clone / FILE).write_text("# moved by one line\n" + FLUX)
    git(clone, "commit", "-q", "-a", "-m", "mine")
    result = apply("DanceGRPO", tree=clone)
    assert any("the pin is" in text for text in result.notices)


def test_a_branch_without_commits_and_a_worktree(kit, clone) -> None:
    fresh = kit.work / "fresh"
    git(kit.work, "init", "-q", "fresh")
    for name, (data, _) in contents(clone).items():
        (fresh / name).parent.mkdir(parents=True, exist_ok=True)
        (fresh / name).write_bytes(data)
    before = contents(fresh)
    apply("DanceGRPO", tree=fresh)
    revert(fresh)
    assert contents(fresh) == before
    git(clone, "worktree", "add", "-q", str(kit.work / "side"))
    before = contents(kit.work / "side")
    apply("DanceGRPO", tree=kit.work / "side")
    revert(kit.work / "side")
    assert contents(kit.work / "side") == before


def test_modes_survive(clone) -> None:
    (clone / FILE).chmod(0o750)
    before = contents(clone)
    apply("DanceGRPO", tree=clone)
    assert (clone / FILE).stat().st_mode & 0o777 == 0o750
    revert(clone)
    assert contents(clone) == before


def test_missing_doubled_and_moved_anchors_are_all_named(clone) -> None:
    text = FLUX.replace("optimizer.step()", "engine.step()")
    text = text.replace("def grpo_one_step(", "def policy_step(")
    text = text.replace("        transformer.eval()\n", "        transformer.eval()\n        transformer(z)\n")
    (clone / FILE).write_text(text)
    message = refused("LG201", clone)
    assert f"{FILE}: insert_before: optimizer.step(...) in train_one_step: expected 1, found 0" in message
    assert "engine.step( in train_one_step" in message
    assert "def grpo_one_step: expected 1, found 0" in message and "def policy_step" in message
    assert "transformer(...) in run_sample_step: expected 1, found 2 (line " in message
    line = text[: text.index("engine.step()")].count("\n") + 1
    assert f"candidate {FILE}:{line}: engine.step(" in message


def test_one_bad_script_keeps_the_others_unwritten(clone) -> None:
    (clone / OTHER).write_text(WAN.replace("randperm", "randn"))
    refused("LG201", clone)
    assert apply("DanceGRPO", tree=clone, scripts=["flux"]).changed


def test_syntax_error(clone) -> None:
    (clone / FILE).write_text(FLUX + "def broken(:\n")
    message = refused("LG204", clone)
    assert f"{FILE}:{FLUX.count(chr(10)) + 1}" in message


def test_taken_name(clone) -> None:
    (clone / FILE).write_text(FLUX.replace("import math\n", "import math\nimport lean\n"))
    assert "'lean' is already used there, line 3" in refused("LG206", clone)


def test_missing_file(clone) -> None:
    (clone / FILE).unlink()
    assert FILE in refused("LG306", clone)


def test_taken_vendored_folder(clone) -> None:
    (clone / "fastvideo/_leangrpo").mkdir()
    (clone / "fastvideo/_leangrpo/mine.py").write_text("x = 1\n")
    refused("LG307", clone)


@pytest.mark.parametrize("what", ["file", "folder", "vendored"])
def test_symbolic_links(kit, clone, what: str) -> None:
    outside = kit.work / "outside"
    outside.mkdir()
    if what == "file":
        (clone / FILE).rename(outside / "flux.py")
        (clone / FILE).symlink_to(outside / "flux.py")
    elif what == "folder":
        (clone / "fastvideo").rename(outside / "fastvideo")
        (clone / "fastvideo").symlink_to(outside / "fastvideo")
    else:
        (clone / "fastvideo/_leangrpo").symlink_to(outside)
    before = snapshot(outside)
    refused("LG303", clone)
    assert snapshot(outside) == before


def test_a_linked_state_folder(kit, clone) -> None:
    (kit.work / "outside").mkdir()
    (clone / ".leangrpo").symlink_to(kit.work / "outside")
    with pytest.raises(KitError) as caught:
        apply("DanceGRPO", tree=clone)
    assert caught.value.code == "LG303"
    assert list((kit.work / "outside").iterdir()) == []


def test_read_only_file(clone) -> None:
    (clone / FILE).chmod(0o444)
    assert "chmod u+w" in refused("LG305", clone)


def test_names_with_dots_in_a_state_file_lead_nowhere(kit, clone) -> None:
    apply("DanceGRPO", tree=clone)
    (kit.work / "victim.py").write_text("x = 1\n")
    state = clone / ".leangrpo/state.json"
    state.write_text(state.read_text().replace(f'"{FILE}"', '"../victim.py"'))
    with pytest.raises(KitError) as caught:
        revert(clone)
    assert caught.value.code == "LG303"
    assert (kit.work / "victim.py").read_text() == "x = 1\n"


def test_a_damaged_state_file(clone) -> None:
    apply("DanceGRPO", tree=clone)
    (clone / ".leangrpo/state.json").write_text('{"format": 9}')
    before = snapshot(clone)
    for run in (lambda: revert(clone), lambda: apply("DanceGRPO", tree=clone)):
        with pytest.raises(KitError) as caught:
            run()
        assert caught.value.code == "LG308"
    assert snapshot(clone) == before


def test_another_upstream(clone) -> None:
    apply("DanceGRPO", tree=clone)
    with pytest.raises(KitError) as caught:
        apply("mini", tree=clone)
    assert caught.value.code == "LG310"


def test_no_repository_and_a_folder_inside_one(kit, clone) -> None:
    plain = kit.work / "plain"
    plain.mkdir()
    assert "init" in refused("LG304", plain)
    assert str(clone) in refused("LG304", clone / "fastvideo")
    with pytest.raises(KitError) as caught:
        apply("DanceGRPO", tree=kit.work / "nothing")
    assert caught.value.code == "LG301"


def test_a_git_folder_full_of_traps(kit, clone) -> None:
    trap = f"sh -c 'touch {kit.work}/sprung; cat'"
    for key in ("filter.t.clean", "filter.t.smudge", "diff.external", "diff.t.textconv", "core.fsmonitor",
                "core.pager", "core.sshCommand", "core.editor", "gpg.program"):  # fmt: skip
        git(clone, "config", key, trap)
    git(clone, "config", "commit.gpgsign", "true")
    git(clone, "config", "core.hooksPath", str(kit.work / "hooks"))
    (kit.work / "hooks").mkdir()
    for name in ("reference-transaction", "post-index-change", "post-commit", "pre-commit"):
        (kit.work / "hooks" / name).write_text(f"#!/bin/sh\ntouch {kit.work}/sprung\n")
        (kit.work / "hooks" / name).chmod(0o755)
    (clone / ".gitattributes").write_text("* filter=t diff=t\n")
    (clone / ".git/info/attributes").write_text("* filter=t diff=t\n")
    before = contents(clone)
    from leangrpo_tools.diff import diff
    from leangrpo_tools.status import status

    apply("DanceGRPO", tree=clone)
    assert b"lean.flush" in diff(clone).text
    assert status(clone)["edited"] == []
    revert(clone)
    assert contents(clone) == before
    assert not (kit.work / "sprung").exists()


def test_variables_of_a_surrounding_git_process(clone, kit, monkeypatch: pytest.MonkeyPatch) -> None:
    from leangrpo_tools.gitcmd import clean_environment

    monkeypatch.setenv("GIT_DIR", str(kit.upstream / ".git"))
    monkeypatch.setenv("GIT_INDEX_FILE", "/nowhere/index")
    clean_environment()
    assert "GIT_DIR" not in os.environ
    assert apply("DanceGRPO", tree=clone).changed
