"""Files edited after the patch: revert and upgrade merge, and no line of the user's is ever lost."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest
from support.toytree import FILES, FLUX, contents, git, newer, snapshot

from leangrpo_tools.apply import apply
from leangrpo_tools.check import check
from leangrpo_tools.diff import diff
from leangrpo_tools.errors import KitError
from leangrpo_tools.merge import merge
from leangrpo_tools.revert import revert

FILE = "fastvideo/train_grpo_flux.py"
MARKS = ("<<<<<<<", "=======", ">>>>>>>")
FLUSH = "            lean.flush(transformer, optimizer)\n"
ENDS = "(i+1)%args.gradient_accumulation_steps==0"
NEW_ENDS = "ends_update(i, args.gradient_accumulation_steps)"


@pytest.fixture
def plain(kit) -> Path:
    """A tree that is no git repository."""
    dest = kit.work / "plain"
    for name, text in FILES.items():
        (dest / name).parent.mkdir(parents=True, exist_ok=True)
        (dest / name).write_text(text)
    return dest


def resolve(dest: Path) -> int:
    """In each conflict, take the kit's side and the user's comments. Returns how many there were."""
    found = 0
    for path in dest.glob("fastvideo/**/*.py"):
        kept, mine = [], False
        for line in path.read_text().splitlines(True):
            if line.startswith(MARKS):
                mine = line.startswith(MARKS[0])
                found += mine
            elif mine:
                kept += [f"{comment}\n" for comment in re.findall(r"# mine.*", line)]
            else:
                kept.append(line)
        path.write_text("".join(kept))
    return found


def until_done(dest: Path, run) -> int:
    """Run a command, resolving conflicts, until it is through. Returns their number."""
    total = 0
    for _ in range(6):
        try:
            run()
            return total
        except KitError as err:
            assert err.code == "LG302", err
            total += resolve(dest)
    raise AssertionError("never done")


@pytest.mark.parametrize("seed", range(12))
def test_no_line_is_lost(small, plain, seed: int) -> None:
    """Patch, edit 20 places (half of them in or beside what the patch wrote), upgrade, revert."""
    draw = random.Random(seed)
    apply("DanceGRPO", tree=plain)
    for number in range(20):
        path = plain / draw.choice([FILE, FILE, FILE, "fastvideo/_leangrpo/errors.py"])
        lines = path.read_text().splitlines(True)
        near = [place for place, line in enumerate(lines) if "lean" in line]
        place = draw.choice(near) + draw.choice((-1, 0, 1)) if near and number % 2 else draw.randrange(len(lines))
        place = min(max(place, 0), len(lines) - 1)
        mark = f"# mine {number}!\n"
        kind = draw.randrange(3)
        if kind == 0:
            lines.insert(place, mark)
        elif kind == 1:
            lines[place] = lines[place].rstrip("\n") + "  " + mark
        else:
            lines[place:place] = ["\n", mark, "\n"]
        path.write_text("".join(lines))
    newer(small.root)
    until_done(plain, lambda: apply("DanceGRPO", tree=plain))
    assert found(plain) == set(range(20))
    assert "tag=2" in (plain / FILE).read_text() and not apply("DanceGRPO", tree=plain).changed
    until_done(plain, lambda: revert(plain))
    assert found(plain) == set(range(20))
    assert not (plain / ".leangrpo").exists()
    assert code((plain / FILE).read_text()) == code(FLUX)


def code(text: str) -> list[str]:
    """The lines without comments and empty ones."""
    return [line for line in (line.split("#")[0].rstrip() for line in text.splitlines()) if line]


def found(dest: Path) -> set[int]:
    """The numbers of the edits that are there."""
    texts = [path.read_text() for path in dest.glob("fastvideo/**/*.py")]
    return {number for number in range(20) if any(f"# mine {number}!" in text for text in texts)}


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_edits_elsewhere_merge_without_a_word(plain, end: str) -> None:
    text = ("\ufeff" + FLUX).replace("\n", end).rstrip()
    (plain / FILE).write_bytes(text.encode())
    apply("DanceGRPO", tree=plain)
    edited = (plain / FILE).read_bytes().replace(b"LIMIT = 3", b"LIMIT = 5")
    (plain / FILE).write_bytes(edited)
    assert check(plain).files[FILE] == "edited" and check(plain).exit_code == 0
    assert b"LIMIT = 5" in diff(plain).text
    result = revert(plain)
    assert (plain / FILE).read_bytes() == text.replace("LIMIT = 3", "LIMIT = 5").encode()
    assert result.merged == [FILE] and any("your edits were kept" in text for text in result.notices)


def test_conflicts_are_marked_listed_and_resumable(plain) -> None:
    apply("DanceGRPO", tree=plain)
    (plain / FILE).write_text((plain / FILE).read_text().replace(FLUSH, FLUSH[:-1] + "  # mine\n"))
    patched = contents(plain)
    with pytest.raises(KitError) as caught:
        revert(plain)
    err, lines = caught.value, (plain / FILE).read_text().splitlines()
    start, end = (1 + next(n for n, line in enumerate(lines) if line.startswith(mark)) for mark in ("<<<<", ">>>>"))
    assert err.code == "LG302" and f"{FILE}:{start}-{end}: conflict" in err.what and f"revert-patch {plain}" in err.fix
    native, new = f"        if {ENDS}:", f"        if lean.layout.{NEW_ENDS}:"
    assert lines[start - 1 : end] == [
        "<<<<<<< yours", new, FLUSH[:-1] + "  # mine", "=======", native, ">>>>>>> leangrpo-kit"
    ]  # fmt: skip
    others = {name: item for name, item in contents(plain).items() if name != FILE and "leangrpo/" not in name}
    assert others == {name: item for name, item in patched.items() if name in others}
    assert check(plain).files[FILE] == "conflicting" and check(plain).exit_code == 1
    before = snapshot(plain)
    for run in (lambda: revert(plain), lambda: apply("DanceGRPO", tree=plain)):
        with pytest.raises(KitError, match="not finished"):
            run()
    assert snapshot(plain) == before
    lines[start - 1 : end] = [native, FLUSH[:-1] + "  # mine"]
    (plain / FILE).write_text("\n".join(lines) + "\n")
    result = revert(plain)
    assert (plain / FILE).read_text() == FLUX.replace(
        "            grad_norm = ", FLUSH[:-1] + "  # mine\n            grad_norm = "
    )  # what the user chose to keep
    assert any("still calls the runtime" in text for text in result.notices)


def test_the_command_that_goes_on_is_printed_whole(small, plain) -> None:
    (plain / FILE).rename(plain / "fastvideo/my flux.py")

    def patch() -> None:
        apply("DanceGRPO", tree=plain, scripts=["wan_2_1"], script_as=["flux=fastvideo/my flux.py"])

    patch()
    text = (plain / "fastvideo/my flux.py").read_text()
    (plain / "fastvideo/my flux.py").write_text(text.replace(FLUSH, FLUSH[:-1] + "  # mine\n"))
    newer(small.root)
    with pytest.raises(KitError) as caught:
        patch()
    words = "--script wan_2_1 --script-as 'flux=fastvideo/my flux.py'"
    assert f"then run apply-patch DanceGRPO --tree {plain} {words}\n" in caught.value.fix


def test_a_merge_can_be_given_up(plain) -> None:
    apply("DanceGRPO", tree=plain)
    (plain / FILE).write_text((plain / FILE).read_text().replace(FLUSH, FLUSH[:-1] + "  # mine\n"))
    before = contents(plain)
    with pytest.raises(KitError, match="no merge is open"):
        revert(plain, abort=True)
    with pytest.raises(KitError):
        revert(plain)
    with open(plain / FILE, "a") as out:
        out.write("# later\n")
    assert f"{FILE}.unmerged" in revert(plain, abort=True).notices[0]
    assert "# later" in (plain / f"{FILE}.unmerged").read_text()
    (plain / f"{FILE}.unmerged").unlink()
    assert contents(plain) == before


def test_another_command_after_a_resolved_merge(plain) -> None:
    """A revert is resolved to the text from before; then the user wants the patch after all."""
    apply("DanceGRPO", tree=plain)
    patched = (plain / FILE).read_text()
    (plain / FILE).write_text(patched.replace(FLUSH, FLUSH[:-1] + "  # mine\n"))
    with pytest.raises(KitError):
        revert(plain)
    (plain / FILE).write_text(FLUX)
    assert apply("DanceGRPO", tree=plain).changed
    assert (plain / FILE).read_text() == patched


def test_a_file_whose_patch_was_checked_out_away_gets_it_again(clone) -> None:
    apply("DanceGRPO", tree=clone)
    patched = contents(clone)
    git(clone, "checkout", "-q", "--", FILE)
    assert check(clone).files[FILE] == "unpatched"
    assert apply("DanceGRPO", tree=clone).changed
    assert contents(clone) == patched


def test_a_file_checked_out_and_edited_gets_the_patch_merged_in(plain) -> None:
    apply("DanceGRPO", tree=plain)
    patched = (plain / FILE).read_text()
    (plain / FILE).write_text(FLUX.replace("LIMIT = 3", "LIMIT = 5"))
    assert check(plain).files[FILE] == "unpatched"
    assert apply("DanceGRPO", tree=plain).changed
    assert (plain / FILE).read_text() == patched.replace("LIMIT = 3", "LIMIT = 5")
    assert check(plain).files[FILE] == "edited" and not apply("DanceGRPO", tree=plain).changed
    revert(plain)
    assert (plain / FILE).read_text() == FLUX.replace("LIMIT = 3", "LIMIT = 5")


def test_a_newer_recipe_that_leaves_a_file_alone(small) -> None:
    dest = apply("mini", "d").dest
    file = "mini_grpo/sampling.py"
    before = (small.root / "patches/mini/tree" / file).read_text()
    (dest / file).write_text((dest / file).read_text() + "# mine\n")
    recipe = small.root / "patches/mini/recipe.yaml"
    text = recipe.read_text()
    first, last = text.index("      - codemod"), text.index("      - codemod: insert_import\n        params")
    recipe.write_text(text[:first] + text[last:])
    assert apply("mini", "d").changed
    assert (dest / file).read_text() == before + "# mine\n"
    assert file not in git(dest, "diff", "--name-only", "HEAD^", "HEAD")
    recipe.write_text(recipe.read_text().replace("  train:\n", "  other:\n"))
    with pytest.raises(KitError, match="does not know") as caught:
        apply("mini", "d")
    assert caught.value.code == "LG203"
    revert(dest)
    assert (dest / file).read_text() == before + "# mine\n"


def test_the_edited_runtime_is_kept(small, plain) -> None:
    core = plain / "fastvideo/_leangrpo"
    apply("DanceGRPO", tree=plain)
    (core / "errors.py").write_text("# mine\n" + (core / "errors.py").read_text())
    assert check(plain).files["fastvideo/_leangrpo/errors.py"] == "changed"
    newer(small.root)
    result = apply("DanceGRPO", tree=plain)
    text = (core / "errors.py").read_text()
    assert text.startswith("# mine\n") and text.endswith("# newer\n")
    assert any("errors.py: your edits were kept" in text for text in result.notices)
    (core / "added.py").write_text("x = 2\n")
    (small.root / "leangrpo_core/added.py").unlink()
    result = apply("DanceGRPO", tree=plain)
    assert any("not part of the runtime any more" in text for text in result.notices)
    result = revert(plain)
    assert any("left there: fastvideo/_leangrpo/errors.py" in text for text in result.notices)
    assert {path.name for path in core.iterdir()} == {"errors.py", "added.py"}


def test_a_merge_that_would_not_be_python_is_not_taken_for_done() -> None:
    base = b"a = (\n1,\n2,\n3,\n4,\n5,\n6)\n"
    mine = base.replace(b"(", b"[").replace(b")", b"]")
    theirs = base.replace(b"3,\n", b"3)\nb = (\n")
    made = merge("x.py", mine, base, theirs)
    assert [why for _, _, why in made.places] == ["not valid Python any more"]
    assert not merge("x.txt", mine, base, theirs).places
    assert not merge("x.py", mine + b"def\n", base, theirs).places  # it was not valid before, either


def test_what_is_no_text_is_left_alone(plain) -> None:
    apply("DanceGRPO", tree=plain)
    (plain / FILE).write_bytes(b"\0\1\2")
    before = snapshot(plain)
    with pytest.raises(KitError, match="cannot be merged"):
        revert(plain)
    assert snapshot(plain) == before


def test_committed_edits_in_a_checkout_of_the_kits(kit) -> None:
    dest = apply("DanceGRPO", "d").dest
    (dest / FILE).write_text((dest / FILE).read_text().replace("LIMIT = 3", "LIMIT = 5"))
    git(dest, "commit", "-q", "-a", "-m", "mine")
    head = git(dest, "rev-parse", "HEAD")
    revert(dest)
    assert git(dest, "rev-parse", "HEAD") == head
    assert (dest / FILE).read_text() == FLUX.replace("LIMIT = 3", "LIMIT = 5")


def test_uncommitted_edits_in_a_checkout_of_the_kits(small) -> None:
    dest = apply("DanceGRPO", "d").dest
    (dest / FILE).write_text((dest / FILE).read_text().replace("LIMIT = 3", "LIMIT = 5"))
    newer(small.root)
    apply("DanceGRPO", "d")
    assert "tag=2" in git(dest, "show", f"HEAD:{FILE}") and "LIMIT = 3" in git(dest, "show", f"HEAD:{FILE}")
    assert git(dest, "status", "--porcelain") == f"M {FILE}"
    revert(dest)
    assert git(dest, "rev-parse", "HEAD") == git(small.upstream, "rev-parse", "HEAD")
    assert (dest / FILE).read_text() == FLUX.replace("LIMIT = 3", "LIMIT = 5")
    assert git(dest, "status", "--porcelain") == f"M {FILE}"
