"""apply-patch --tree: a user's own checkout, in any condition, and everything that must be refused."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from support.toytree import FLUX, WAN, contents, git, snapshot

from leangrpo_tools.apply import apply
from leangrpo_tools.check import check
from leangrpo_tools.diff import diff
from leangrpo_tools.errors import KitError
from leangrpo_tools.rehearsal.trees import export
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


def test_scripts_that_the_tree_does_not_have(clone) -> None:
    """Nobody asked for them: what is there is patched. Asked for by name or by the pin, they are an error."""
    (clone / FILE).unlink()
    git(clone, "commit", "-q", "-a", "-m", "older")
    for options in (
        {"scripts": ["flux"]},
        {"scripts": ["flux", "wan_2_1"]},
        {"scripts": ["flux"], "allow_partial": True},
    ):
        assert FILE in refused("LG201" if "allow_partial" in options else "LG306", clone, **options)
    before = contents(clone)
    for partial in (False, True):
        result = apply("DanceGRPO", tree=clone, allow_partial=partial)
        assert result.scripts == ["flux_lora", "wan_2_1"] and result.absent == {"flux": FILE}
        assert result.exit_code == 0 and any(FILE in text for text in result.notices)
        assert not apply("DanceGRPO", tree=clone, allow_partial=partial).changed
        assert check(clone).exit_code == 0
        revert(clone)
        assert contents(clone) == before
    git(clone, "checkout", "-q", "HEAD~", "--", FILE)
    assert apply("DanceGRPO", tree=clone).absent == {}
    (clone / FILE).unlink()
    revert(clone)


def test_the_pin_has_every_script(clone) -> None:
    (clone / FILE).unlink()
    assert FILE in refused("LG306", clone, strict_pin=True)


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
    for scripts in ([], ["flux"]):  # mini has no script of that name
        with pytest.raises(KitError) as caught:
            apply("mini", tree=clone, scripts=scripts)
        assert caught.value.code == "LG310" and "is patched for DanceGRPO" in caught.value.what
    with pytest.raises(KitError) as caught:
        export(clone, clone.parent / "copies", "train", upstream="mini")
    assert caught.value.code == "LG310" and not (clone.parent / "copies").exists()


def test_the_tree_of_another_upstream_is_named(clone) -> None:
    """Before any patch: by the files that are there."""
    before = snapshot(clone)
    for scripts, partial in ((None, False), (["flux"], False), (None, True)):
        with pytest.raises(KitError) as caught:
            apply("mini", tree=clone, scripts=scripts, allow_partial=partial)
        assert caught.value.code == "LG310" and snapshot(clone) == before
        assert "looks like DanceGRPO, not mini" in caught.value.what
        assert caught.value.fix == f"apply-patch DanceGRPO --tree {clone}"
    (clone / "mini_grpo").mkdir()  # something of mini's own: nothing is said of another upstream
    with pytest.raises(KitError) as caught:
        apply("mini", tree=clone)
    assert caught.value.code == "LG306"


def test_what_is_no_tree(kit, clone) -> None:
    plain = kit.work / "plain"
    plain.mkdir()
    refused("LG306", plain)
    assert str(clone) in refused("LG306", clone / "fastvideo")
    with pytest.raises(KitError) as caught:
        apply("DanceGRPO", tree=kit.work / "nothing")
    assert caught.value.code == "LG301"


def test_a_tree_without_git(kit, clone) -> None:
    shutil.rmtree(clone / ".git")
    before = contents(clone)
    result = apply("DanceGRPO", tree=clone)
    assert result.base is None and any("not known" in text for text in result.notices)
    after = snapshot(clone)
    assert b"lean.flush" in diff(clone).text and check(clone).exit_code == 0
    assert not apply("DanceGRPO", tree=clone).changed and snapshot(clone) == after
    git(clone, "init", "-q")  # later it becomes one
    git(clone, "add", "-A")
    assert ".leangrpo" not in git(clone, "status", "--porcelain")
    assert not apply("DanceGRPO", tree=clone).changed
    revert(clone)
    assert contents(clone) == before


def test_a_repository_that_is_gone_by_the_time_of_the_revert(clone) -> None:
    before = contents(clone)
    apply("DanceGRPO", tree=clone)
    shutil.rmtree(clone / ".git")
    revert(clone)
    assert contents(clone) == before


def test_two_trees_in_one_repository(kit, clone) -> None:
    big = kit.work / "big"
    git(kit.work, "init", "-q", "big")
    for name in ("one", "two"):
        shutil.copytree(clone, big / name, ignore=shutil.ignore_patterns(".git"))
    git(big, "add", "-A")
    git(big, "commit", "-q", "-m", "both")
    apply("DanceGRPO", tree=big / "one", scripts=["flux"])
    status = git(big, "status", "--porcelain").splitlines()
    assert status == [f"M one/{FILE}", "?? one/fastvideo/_leangrpo/"]
    revert(big / "one")
    assert git(big, "status", "--porcelain", "--ignored") == ""


OURS = "fastvideo/train_flux_ours.py"


@pytest.mark.parametrize("repository", [True, False])
def test_a_script_under_another_name(clone, repository: bool) -> None:
    if not repository:
        shutil.rmtree(clone / ".git")
    (clone / FILE).rename(clone / OURS)
    before = contents(clone)
    result = apply("DanceGRPO", tree=clone, script_as=[f"flux={OURS}"])
    assert result.scripts == ["flux"] and "lean.flush" in (clone / OURS).read_text()
    assert "from fastvideo._leangrpo import lean" in (clone / OURS).read_text()
    assert not apply("DanceGRPO", tree=clone).changed
    assert not apply("DanceGRPO", tree=clone, scripts=["flux"]).changed
    assert not apply("DanceGRPO", tree=clone, script_as=[f"FLUX={OURS}"]).changed
    assert OURS.encode() in diff(clone).text
    assert apply("DanceGRPO", tree=clone, scripts=["wan_2_1"]).scripts == ["flux", "wan_2_1"]
    (clone / FILE).write_text(FLUX)
    with pytest.raises(KitError) as caught:
        apply("DanceGRPO", tree=clone, script_as=[f"flux={FILE}"])
    assert caught.value.code == "LG311"
    (clone / FILE).unlink()
    revert(clone)
    assert contents(clone) == before


def test_bad_names_for_scripts(clone) -> None:
    for text in ("flux=../x.py", "flux=/etc/x.py", "flux=.GIT/config", "flux", "flux="):
        refused("LG311", clone, script_as=[text])
    refused("LG311", clone, script_as=[f"flux={OTHER}"], scripts=["wan_2_1"])
    refused("LG311", clone, script_as=[f"flux={OTHER}", f"wan_2_1={OTHER}"])
    refused("LG203", clone, script_as=["nothing=x.py"])
    assert "fastvideo/nothing.py" in refused("LG306", clone, script_as=["flux=fastvideo/nothing.py"])


def test_a_package_under_another_name(clone) -> None:
    (clone / "fastvideo").rename(clone / "video")
    assert "no folder fastvideo" in refused("LG306", clone, script_as=["flux=video/train_grpo_flux.py"])


def doubled(clone) -> tuple[int, int]:
    """A second call of the network in the update. Returns both lines."""
    call = "    pred = transformer(hidden_states=latents, words=words)[0]\n"
    text = FLUX.replace(call, f"    if args.other:\n        return transformer(latents)[0].mean()\n{call}")
    (clone / FILE).write_text(text)
    lines = text.splitlines()
    return lines.index("        return transformer(latents)[0].mean()") + 1, lines.index(call.rstrip()) + 1


def test_an_anchor_chosen_by_hand(clone) -> None:
    first, second = doubled(clone)
    message = refused("LG201", clone)
    assert "expected 1, found 2" in message
    for line, words in ((first, "return transformer(latents)[0].mean()"), (second, "pred = transformer(hidden")):
        assert f"found {FILE}:{line}: {words}" in message and f"--anchor flux.policy={line}\n" in message
    before = contents(clone)
    apply("DanceGRPO", tree=clone, anchors=[f"flux.policy={second}"])
    text = (clone / FILE).read_text()
    assert "return transformer(latents)" in text and text.count("lean.policy_call(") == 1
    after = snapshot(clone)
    assert not apply("DanceGRPO", tree=clone).changed
    assert not apply("DanceGRPO", tree=clone, anchors=[f"flux.policy={second}"]).changed
    assert snapshot(clone) == after
    assert apply("DanceGRPO", tree=clone, anchors=[f"flux.policy={first},{second}"]).changed
    assert (clone / FILE).read_text().count("lean.policy_call(") == 2
    revert(clone)
    assert contents(clone) == before
    assert apply("DanceGRPO", tree=clone, scripts=["flux"], anchors=[f"policy={first}"]).changed


def test_bad_anchors(clone) -> None:
    first, second = doubled(clone)
    message = refused("LG201", clone, anchors=["flux.policy=3"])
    assert "chosen by --anchor: 3" in message and f"--anchor flux.policy={first}\n" in message
    assert "flux.policy or flux_lora.policy or wan_2_1.policy" in refused("LG209", clone, anchors=[f"policy={second}"])
    for text in ("flux.nothing=3", "flux.policy", "flux.policy=x", "flux.policy=0"):
        refused("LG209", clone, anchors=[text])


def test_allow_partial(clone) -> None:
    (clone / OTHER).write_text(WAN.replace("randperm", "randn"))
    before = contents(clone)
    result = apply("DanceGRPO", tree=clone, allow_partial=True)
    assert result.scripts == ["flux", "flux_lora"] and result.exit_code == 1 and result.to_json()["ok"] is False
    assert "randperm" in str(result.skipped["wan_2_1"]["what"])
    assert "lean.flush" in (clone / FILE).read_text() and (clone / OTHER).read_bytes() == before[OTHER][0]
    after = snapshot(clone)
    again = apply("DanceGRPO", tree=clone, allow_partial=True)
    assert not again.changed and again.exit_code == 1 and snapshot(clone) == after
    assert apply("DanceGRPO", tree=clone, allow_partial=True, scripts=["flux"]).exit_code == 0
    (clone / OTHER).write_text(WAN)
    result = apply("DanceGRPO", tree=clone, allow_partial=True)
    assert result.changed and result.exit_code == 0
    revert(clone)
    (clone / FILE).unlink()
    (clone / FILE.replace("flux", "flux_lora")).unlink()
    (clone / OTHER).write_text("def broken(:\n")
    message = refused("LG201", clone, allow_partial=True)
    assert "flux: LG306" not in message and "wan_2_1: LG204" in message
    assert "flux: LG306" in refused("LG201", clone, allow_partial=True, scripts=["flux", "wan_2_1"])


def test_strict_pin(kit, clone) -> None:
    (clone / FILE).write_text("# edited\n" + FLUX)
    assert apply("DanceGRPO", tree=clone, strict_pin=True).changed
    assert not apply("DanceGRPO", tree=clone, strict_pin=True).changed
    revert(clone)
    git(clone, "commit", "-q", "-a", "-m", "mine")
    assert git(clone, "rev-parse", "HEAD") in refused("LG312", clone, strict_pin=True)
    shutil.rmtree(clone / ".git")
    refused("LG312", clone, strict_pin=True)
    for _ in range(2):
        apply("DanceGRPO", "made", strict_pin=True)


@pytest.mark.parametrize("damage", ["removed", "changed"])
def test_check_sees_that_the_texts_from_before_are_lost(clone, damage: str) -> None:
    shutil.rmtree(clone / ".git")
    apply("DanceGRPO", tree=clone)
    assert check(clone).exit_code == 0
    for text in (clone / ".leangrpo/store").iterdir():
        text.unlink() if damage == "removed" else text.write_bytes(text.read_bytes() + b"x")
    result = check(clone)
    assert result.exit_code == 1 and f"{FILE}: its text from before the patch is lost" in "\n".join(result.problems)


def test_check(clone) -> None:
    assert check(clone).problems == ["not patched"]
    apply("DanceGRPO", tree=clone)
    assert check(clone).exit_code == 0 and check(clone).kit == "0.1.0"
    (clone / FILE).write_text(
        (clone / FILE).read_text().replace("            lean.flush(transformer, optimizer)\n", "")
    )
    assert check(clone).files[FILE] == "changed" and check(clone).exit_code == 1
    (clone / FILE).unlink()
    assert check(clone).files[FILE] == "missing"


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


def test_a_partial_clone_fetches_nothing(kit, clone) -> None:
    """Fetching what is missing would run a command from the repository's configuration."""
    git(clone, "config", "extensions.partialClone", "origin")
    git(clone, "config", "remote.origin.promisor", "true")
    git(clone, "config", "remote.origin.uploadpack", f"touch {kit.work}/sprung; git-upload-pack")
    before = contents(clone)
    apply("DanceGRPO", tree=clone)
    for path in (clone / ".git/objects").glob("??/*"):  # packed objects stay
        path.unlink()
    shutil.rmtree(clone / ".leangrpo/store")
    with pytest.raises(KitError) as caught:
        revert(clone)
    assert caught.value.code == "LG308"
    assert not (kit.work / "sprung").exists() and set(before) < set(contents(clone))


@pytest.mark.parametrize("linked", [".leangrpo/stage", ".leangrpo/store", ".leangrpo/journal.json.new", ".git/info",
                                    ".git/info/exclude", ".git/info/exclude.new", ".git/leangrpo.lock"])  # fmt: skip
def test_links_in_the_kits_own_places(kit, clone, linked: str) -> None:
    outside = kit.work / "outside"
    outside.mkdir()
    (outside / "exclude").write_text("theirs\n")
    names = {"stage": "", "store": "", "info": "", "leangrpo.lock": "not there"}
    target = outside / names.get(Path(linked).name, "exclude")
    path = clone / linked
    path.parent.mkdir(exist_ok=True)
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    path.symlink_to(target)
    try:
        apply("DanceGRPO", tree=clone)
        revert(clone)
    except KitError as err:
        assert err.code in ("LG112", "LG303", "LG110"), err
    assert {item.name: item.read_text() for item in outside.iterdir()} == {"exclude": "theirs\n"}


def test_submodules(kit, clone) -> None:
    """The package may not be a repository of its own; other submodules, and being one, do no harm."""
    outer = kit.work / "outer"
    git(kit.work, "init", "-q", "outer")
    git(outer, "-c", "protocol.file.allow=always", "submodule", "--quiet", "add", str(kit.upstream), "inner")
    before = contents(outer / "inner")
    apply("DanceGRPO", tree=outer / "inner")
    revert(outer / "inner")
    assert contents(outer / "inner") == before
    git(clone, "-c", "protocol.file.allow=always", "submodule", "--quiet", "add", str(kit.upstream), "third")
    apply("DanceGRPO", tree=clone)
    revert(clone)
    git(clone / "fastvideo", "init", "-q")
    assert "fastvideo is a repository of its own" in refused("LG303", clone)


def test_a_huge_file(clone) -> None:
    with open(clone / "data.bin", "wb") as out:
        out.truncate(1 << 40)  # sparse; it is never read
    apply("DanceGRPO", tree=clone)
    revert(clone)
    (clone / "data.bin").unlink()
    with open(clone / FILE, "ab") as out:
        out.truncate(9 << 20)
    message = refused("LG208", clone)
    assert FILE in message and "9 MiB" in message


def test_a_read_only_folder(clone) -> None:
    if os.geteuid() == 0:
        pytest.skip("root may write everywhere")
    (clone / "fastvideo").chmod(0o555)
    try:
        refused("LG305", clone)
    finally:
        (clone / "fastvideo").chmod(0o755)


def test_names_that_differ_in_case_only(clone) -> None:
    others = ["fastvideo/TRAIN_grpo_flux.py", "fastvideo/_LeanGRPO/__init__.py", ".LEANGRPO/state.json"]
    for name in others:
        (clone / name).parent.mkdir(exist_ok=True)
        (clone / name).write_text("theirs\n")
    if (clone / FILE).read_text() == "theirs\n":
        pytest.skip("this file system does not tell them apart")
    git(clone, "add", "-A", "-f")
    git(clone, "commit", "-q", "-m", "case")
    git(clone, "config", "core.ignorecase", "true")
    before = contents(clone)
    apply("DanceGRPO", tree=clone)
    assert FLUX.strip() == git(clone, "show", f"refs/leangrpo/base:{FILE}")
    assert all((clone / name).read_text() == "theirs\n" for name in others)
    revert(clone)
    assert contents(clone) == before
