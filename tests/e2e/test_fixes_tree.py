"""Fixes of the errors about recipes and the tree that is patched, followed as they are printed."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from support.fixes import Shell, follows
from support.killer import killed_at
from support.toytree import FLUX, WAN, contents, git, newer

from leangrpo_tools.apply import apply

FILE = "fastvideo/train_grpo_flux.py"
OTHER = "fastvideo/train_grpo_wan_2_1.py"
CALL = "    pred = transformer(hidden_states=latents, words=words)[0]\n"
pytestmark = pytest.mark.usefixtures("small")


def on(clone: Path) -> tuple[str, ...]:
    return ("apply-patch", "DanceGRPO", "--tree", str(clone))


def patched(clone: Path, file: str = FILE) -> bool:
    return "lean.flush" in (clone / file).read_text()


@follows("LG201")
def test_more_places_than_expected(clone, shell: Shell) -> None:
    (clone / FILE).write_text(FLUX.replace(CALL, f"    if args.other:\n        return transformer(latents)\n{CALL}"))
    said = shell.fails("LG201", *on(clone))
    shell.works(*on(clone), *said.options("--anchor"))
    assert (clone / FILE).read_text().count("lean.policy_call(") == 2


@follows("LG201")
def test_fewer_places_than_expected(clone, shell: Shell) -> None:
    (clone / FILE).write_text(
        FLUX.replace("        if args.another_judge:\n            all_rewards.append(kept.max())\n", "")
    )
    said = shell.fails("LG201", *on(clone))
    shell.works(*on(clone), *said.options("--anchor"))
    assert (clone / FILE).read_text().count("lean.rewarded(") == 1


@follows("LG201")
@pytest.mark.parametrize("follow", ["leave out", "restore", "partial"])
def test_a_place_that_is_not_there(clone, shell: Shell, follow: str) -> None:
    (clone / OTHER).write_text(WAN.replace("randperm", "randn"))
    said = shell.fails("LG201", *on(clone))
    if follow == "leave out":
        shell.works(*on(clone), *said.options("--script"))
    elif follow == "restore":
        assert "restore" in said.fix
        (clone / OTHER).write_text(WAN)
        shell.works(*on(clone))
    else:
        said = shell(*on(clone), "--allow-partial")
        assert said.status == 1 and "skipped wan_2_1: LG201" in said.out
    assert patched(clone) and patched(clone, OTHER) == (follow == "restore")


@follows("LG201")
def test_no_script_can_be_patched(clone, shell: Shell) -> None:
    (clone / FILE).write_text(FLUX.replace("randperm", "randn"))
    said = shell.fails("LG201", *on(clone), "--script", "flux", "--allow-partial")
    assert "--anchor" in shell.paste(said.command("leangrpo")).out


@follows("LG202")
def test_a_recipe_that_is_invalid(kit, clone, shell: Shell) -> None:
    recipe = kit.root / "patches/DanceGRPO/recipe.yaml"
    before = recipe.read_text()
    recipe.write_text(before.replace("codemod: wrap_call", "codemod: wrap_cal", 1))
    assert "correct the recipe" in shell.fails("LG202", *on(clone)).fix
    recipe.write_text(before)
    shell.works(*on(clone))


@follows("LG203")
def test_an_unknown_script(clone, shell: Shell) -> None:
    said = shell.fails("LG203", *on(clone), "--script", "wan")
    assert "wan_2_1" in shell.paste(said.command("leangrpo")).out
    shell.works(*on(clone), "--script", "wan_2_1")


@follows("LG204")
def test_a_syntax_error(kit, clone, shell: Shell) -> None:
    (clone / FILE).write_text(FLUX + "def broken(:\n")
    said = shell.fails("LG204", *on(clone))
    shown = shell.paste(said.command("python"), cwd=kit.work)
    line = re.search(r"line (\d+)", shown.err)
    assert line and shown.status
    lines = (clone / FILE).read_text().splitlines(keepends=True)
    del lines[int(line[1]) - 1]
    (clone / FILE).write_text("".join(lines))
    shell.works(*on(clone))


@follows("LG205")
def test_bytes_that_cannot_be_kept(clone, shell: Shell) -> None:
    (clone / FILE).write_bytes(FLUX.encode() + b"# \xff\n")
    said = shell.fails("LG205", *on(clone))
    assert "UTF-8" in said.fix
    (clone / FILE).write_text(FLUX, encoding="utf-8")
    shell.works(*on(clone))


@follows("LG206")
def test_a_name_that_is_taken(clone, shell: Shell) -> None:
    (clone / FILE).write_text(FLUX.replace("LIMIT = 3", "lean = 3"))
    assert "rename" in shell.fails("LG206", *on(clone)).fix
    (clone / FILE).write_text(FLUX.replace("LIMIT = 3", "meagre = 3"))
    shell.works(*on(clone))


@follows("LG208")
def test_a_file_that_is_too_large(clone, shell: Shell) -> None:
    (clone / FILE).write_text(FLUX + f'DATA = """{"x" * (9 << 20)}"""\n')
    said = shell.fails("LG208", *on(clone))
    assert shell.paste(said.command("ls")).status == 0
    (clone / FILE).write_text(FLUX)
    shell.works(*on(clone))


@follows("LG209")
def test_an_anchor_that_names_no_place(clone, shell: Shell) -> None:
    (clone / FILE).write_text(FLUX.replace(CALL, f"    if args.other:\n        return transformer(latents)\n{CALL}"))
    said = shell.fails("LG209", *on(clone), "--anchor", "polcy=40")
    assert "without --anchor" in said.fix
    shell.works(*on(clone), *shell.fails("LG201", *on(clone)).options("--anchor"))


@follows("LG210")
def test_a_script_that_is_left_alone(kit, clone, shell: Shell) -> None:
    with (kit.root / "patches/DanceGRPO/recipe.yaml").open("a") as out:
        reason = "what it computes in its update is nothing that its rollout has computed"
        out.write(f"\nrefused:\n  alone: {{file: fastvideo/train_alone.py, reason: {reason}}}\n")
    (clone / "fastvideo/train_alone.py").write_text("x = 1\n")
    said = shell.fails("LG210", *on(clone), "--script", "alone")
    assert "train it as it is" in said.fix
    shell.works(*on(clone))
    assert patched(clone) and (clone / "fastvideo/train_alone.py").read_text() == "x = 1\n"


@follows("LG301")
def test_a_tree_that_is_not_patched(clone, shell: Shell) -> None:
    said = shell.fails("LG301", "revert-patch", clone)
    assert shell.paste(said.command("apply-patch").replace("NAME", "DanceGRPO")).status == 0
    shell.works("revert-patch", clone)
    said = shell.fails("LG301", *on(clone.with_name("mnie")))
    assert shell.paste(said.command("ls").replace("mnie", clone.name)).status == 0


def conflict(kit, clone: Path) -> None:
    """An edit inside the patch, and a newer kit that changes the same line."""
    apply("DanceGRPO", tree=clone, scripts=["flux"])
    text = (
        (clone / FILE)
        .read_text()
        .replace("lean.flush(transformer, optimizer)", "lean.flush(transformer, optimizer)  # mine")
    )
    (clone / FILE).write_text(text)
    newer(kit.root)


@follows("LG302")
@pytest.mark.parametrize("follow", ["edit", "abort"])
def test_edits_where_the_patch_changes(kit, clone, shell: Shell, follow: str) -> None:
    conflict(kit, clone)
    before = contents(clone)
    said = shell.fails("LG302", *on(clone))
    if follow == "abort":
        assert shell.paste(said.command("revert-patch")).status == 0
        assert contents(clone)[FILE] == before[FILE]
        return
    lines = (clone / FILE).read_text().splitlines(keepends=True)
    marks = [n for n, line in enumerate(lines) if line.startswith(("<<<<<<<", "=======", ">>>>>>>"))]
    assert len(marks) == 3
    (clone / FILE).write_text("".join(lines[: marks[0]] + lines[marks[1] + 1 : marks[2]] + lines[marks[2] + 1 :]))
    assert shell.paste(said.command("apply-patch")).status == 0
    assert "tag=2" in (clone / FILE).read_text()


@follows("LG303")
@pytest.mark.parametrize("what", ["file", "folder", "repository", "state"])
def test_a_path_that_leaves_the_tree(kit, clone, shell: Shell, what: str) -> None:
    outside = kit.work / "outside"
    outside.mkdir()
    tree = clone
    if what == "file":
        (clone / FILE).rename(outside / "flux.py")
        (clone / FILE).symlink_to(outside / "flux.py")
    elif what == "folder":
        (clone / "fastvideo").rename(outside / "fastvideo")
        (clone / "fastvideo").symlink_to(outside / "fastvideo")
    elif what == "repository":
        git(clone / "fastvideo", "init", "-q")
    else:
        (clone / ".leangrpo").symlink_to(outside)
    before = contents(outside)
    said = shell.fails("LG303", *on(clone))
    assert shell.paste(said.command("rm" if what == "state" else "cp"), cwd=kit.work).status == 0
    if what == "repository":
        tree = Path(said.command("cp").split()[-1].removesuffix("/fastvideo/.git"))
    shell.works(*on(tree))
    assert patched(tree) and contents(outside) == before


@follows("LG305")
def test_a_file_that_cannot_be_written(clone, shell: Shell) -> None:
    (clone / FILE).chmod(0o444)
    said = shell.fails("LG305", *on(clone))
    assert shell.paste(said.command("chmod")).status == 0
    shell.works(*on(clone))


@follows("LG307")
def test_a_folder_where_the_runtime_goes(clone, shell: Shell) -> None:
    (clone / "fastvideo/_leangrpo").mkdir()
    (clone / "fastvideo/_leangrpo/mine.py").write_text("x = 1\n")
    said = shell.fails("LG307", *on(clone))
    folder = Path(said.fix.rpartition("rename ")[2])
    folder.rename(folder.with_name("mine"))
    shell.works(*on(clone))


@follows("LG308")
@pytest.mark.parametrize("git_is_there", [True, False])
def test_a_state_that_is_lost(clone, shell: Shell, git_is_there: bool) -> None:
    if not git_is_there:
        shutil.rmtree(clone / ".git")
    before = contents(clone)
    shell.works(*on(clone), "--script", "flux")
    (clone / ".leangrpo/state.json").unlink()
    said = shell.fails("LG308", *on(clone))
    if git_is_there:
        line = said.fix.partition("edits of patched files, then: ")[2].partition("; then apply-patch")[0]
        assert shell.paste(line).status == 0
    else:
        assert shell.paste(said.command("cp")).status == 0
    assert contents(clone) == before
    shell.works(*on(clone))


@follows("LG309")
@pytest.mark.parametrize("dry", [True, False])
def test_an_interrupted_run_and_edits_since(small, shell: Shell, dry: bool) -> None:
    clone = small.work / "mine"
    git(small.work, "clone", "-q", str(small.upstream), "mine")
    for step in range(60):
        if (clone / ".leangrpo/journal.json").exists() and (clone / FILE).read_text() == FLUX:
            break
        shutil.rmtree(clone)
        git(small.work, "clone", "-q", str(small.upstream), "mine")
        assert killed_at(step, clone, lambda: apply("DanceGRPO", tree=clone, scripts=["flux"]))
    if dry:
        assert "without --dry-run" in shell.fails("LG309", *on(clone), "--dry-run").fix
        shell.works(*on(clone))
        shell.works(*on(clone), "--dry-run")
        return
    (clone / FILE).write_text("# mine\n" + FLUX)
    said = shell.fails("LG309", *on(clone))
    assert said.fix.startswith("move the edited files aside")
    aside = (clone / FILE).rename(small.work / "aside.py")
    shell.works(*on(clone))
    assert patched(clone)
    (clone / FILE).write_text("# mine\n" + (clone / FILE).read_text())
    shell.works("revert-patch", clone)
    assert (clone / FILE).read_text() == aside.read_text()


@follows("LG310")
@pytest.mark.parametrize("before", [True, False], ids=["patched", "not yet"])
def test_the_tree_of_another_upstream(clone, shell: Shell, before: bool) -> None:
    if before:
        shell.works(*on(clone), "--script", "flux")
    said = shell.fails("LG310", "apply-patch", "mini", "--tree", clone)
    assert shell.paste(said.command("revert-patch" if before else "apply-patch")).status == 0
    assert patched(clone) != before


@follows("LG311")
def test_a_script_under_another_name(clone, shell: Shell) -> None:
    (clone / FILE).rename(clone / "fastvideo/ours.py")
    said = shell.fails("LG311", *on(clone), "--script-as", "flux:fastvideo/ours.py")
    assert said.options("--script-as") == ["--script-as", "SCRIPT=FILE"]
    shell.works(*on(clone), "--script-as", "flux=fastvideo/ours.py")
    (clone / "fastvideo/ours.py").rename(clone / "fastvideo/theirs.py")
    said = shell.fails("LG311", *on(clone), "--script-as", "flux=fastvideo/theirs.py")
    (clone / "fastvideo/theirs.py").rename(clone / "fastvideo/ours.py")
    assert shell.paste(said.command("revert-patch")).status == 0
    (clone / "fastvideo/ours.py").rename(clone / "fastvideo/theirs.py")
    assert shell.paste(said.command("apply-patch")).status == 0
    assert patched(clone, "fastvideo/theirs.py")


@follows("LG312")
@pytest.mark.parametrize("follow", ["leave out", "check out"])
def test_another_commit_than_the_pin(clone, shell: Shell, follow: str) -> None:
    git(clone, "commit", "-q", "--allow-empty", "-m", "mine")
    said = shell.fails("LG312", *on(clone), "--strict-pin")
    if follow == "leave out":
        assert said.fix.startswith("leave --strict-pin out")
        shell.works(*on(clone))
    else:
        assert shell.paste(said.command("git")).status == 0
        shell.works(*on(clone), "--strict-pin")
