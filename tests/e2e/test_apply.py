"""apply-patch, diff-patch and revert-patch on a checkout that the kit makes."""

from __future__ import annotations

import ast
import difflib
import json
import shutil
import subprocess

import pytest
from support.toytree import FILES, contents, git, snapshot

from leangrpo_tools import journal
from leangrpo_tools.apply import apply
from leangrpo_tools.diff import diff
from leangrpo_tools.errors import KitError
from leangrpo_tools.revert import revert

FLUX = "fastvideo/train_grpo_flux.py"
WAN = "fastvideo/train_grpo_wan_2_1.py"


def test_patches_commits_and_records(kit) -> None:
    result = apply("dancegrpo")
    dest = kit.work / "DanceGRPO"
    assert result.changed and result.dest == dest and result.scripts == ["flux", "flux_lora", "wan_2_1"]
    assert any("never synchronises" in text for text in result.warnings)
    assert git(dest, "status", "--porcelain") == ""
    pin = git(kit.upstream, "rev-parse", "HEAD")
    assert git(dest, "rev-parse", "HEAD^") == pin == git(dest, "rev-parse", "refs/leangrpo/base")
    assert git(dest, "log", "-1", "--format=%an") == "leangrpo-kit"
    assert not (dest / "assets/prompts.txt").exists()
    assert (dest / "fastvideo/_leangrpo/__init__.py").is_file()
    assert "0.1.0" in (dest / "fastvideo/_leangrpo/VENDORED.txt").read_text()
    state = json.loads((dest / ".leangrpo/state.json").read_text())
    assert state["format"] == 1 and state["commit"] == pin and state["files"][FLUX]["before"]
    text = (dest / FLUX).read_text()
    for line in (
        "from fastvideo._leangrpo import lean\n",
        "        pred= lean.rollout_call(\n            transformer, lean_rows, i,\n            hidden_states=z,  # the",
        "    pred = lean.policy_call(transformer, lean_rows, lean_steps, hidden_states=latents, words=words)[0]\n",
        "    with lean.rollout(\n        rows=len(encoder_hidden_states), steps=args.sampling_steps - 1,\n",
        '    # one order each\n    perms = lean.step_order(batch_size, len(samples["timesteps"][0])).to(device)\n',
        "    samples.update(lean.identity())\n    samples_batched",
        "        if lean.layout.ends_update(i, args.gradient_accumulation_steps):\n"
        "            lean.flush(transformer, optimizer)\n            grad_norm = ",
        'lean_rows=sample["lean_row"], lean_steps=sample["lean_step"][:, _])\n',
    ):
        assert line in text, line
    assert (dest / WAN).read_text().count("lean.rollout_call(transformer, lean_rows, i, ") == 2


def test_second_run_changes_no_byte_and_no_time(kit) -> None:
    first = apply("DanceGRPO")
    before = snapshot(first.dest)
    again = apply("DANCEGRPO")
    assert not again.changed
    assert snapshot(first.dest) == before


def test_revert_restores_everything(kit) -> None:
    apply("DanceGRPO", "d", scripts=["flux"])
    dest = kit.work / "d"
    pin = git(kit.upstream, "rev-parse", "HEAD")
    expected = {name: text for name, text in FILES.items() if name != "assets/prompts.txt"}
    (dest / "fastvideo/_leangrpo/__pycache__").mkdir()
    (dest / "fastvideo/_leangrpo/__pycache__/x.pyc").write_bytes(b"1")
    revert(dest)
    assert {name: item[0].decode() for name, item in contents(dest).items()} == expected
    assert (dest / "scripts/run.sh").stat().st_mode & 0o100
    assert git(dest, "rev-parse", "HEAD") == pin
    assert git(dest, "status", "--porcelain", "--ignored") == ""
    assert not (dest / ".leangrpo").exists() and not (dest / "fastvideo/_leangrpo").exists()
    assert "leangrpo" not in (dest / ".git/info/exclude").read_text()
    with pytest.raises(KitError, match="not patched"):
        revert(dest)
    assert apply("DanceGRPO", "d").changed


def test_offline_after_the_first_time(kit) -> None:
    apply("DanceGRPO", "a")
    kit.upstream.rename(kit.upstream.with_name("gone"))
    assert apply("DanceGRPO", "b").changed
    assert contents(kit.work / "a") == contents(kit.work / "b")
    assert git(kit.work / "a", "rev-parse", "HEAD") == git(kit.work / "b", "rev-parse", "HEAD")


def test_scripts_can_be_added_later(kit) -> None:
    apply("DanceGRPO", "d", scripts=["wan_2_1"])
    assert "lean" not in (kit.work / "d" / FLUX).read_text()
    both = apply("DanceGRPO", "d", scripts=["FLUX"])
    assert both.changed and both.scripts == ["flux", "wan_2_1"]
    apply("DanceGRPO", "e", scripts=["flux", "wan_2_1"])
    assert git(kit.work / "d", "rev-parse", "HEAD^{tree}") == git(kit.work / "e", "rev-parse", "HEAD^{tree}")
    assert not apply("DanceGRPO", "d").changed


def test_a_newer_kit_replaces_its_own_unedited_files(kit, monkeypatch: pytest.MonkeyPatch) -> None:
    dest = apply("DanceGRPO", "d").dest
    monkeypatch.setattr("leangrpo_tools.vendor.__version__", "0.2.0")
    assert apply("DanceGRPO", "d").changed
    assert "0.2.0" in (dest / "fastvideo/_leangrpo/VENDORED.txt").read_text()
    assert git(dest, "status", "--porcelain") == ""


def test_edited_files_are_left_alone_by_a_second_run(kit) -> None:
    dest = apply("DanceGRPO", "d").dest
    with open(dest / FLUX, "a") as out:
        out.write("# mine\n")
    before = snapshot(dest)
    again = apply("DanceGRPO", "d")
    assert not again.changed and FLUX in again.notices[0]
    assert snapshot(dest) == before


def test_deleted_files_come_back_or_stay_away(kit) -> None:
    dest = apply("DanceGRPO", "d").dest
    patched = contents(dest)
    shutil.rmtree(dest / "fastvideo/_leangrpo")
    (dest / WAN).unlink()
    assert apply("DanceGRPO", "d").changed
    assert contents(dest) == patched
    shutil.rmtree(dest / "fastvideo/_leangrpo")
    (dest / FLUX).unlink()
    revert(dest)
    assert (dest / FLUX).read_text() == FILES[FLUX]
    assert git(dest, "status", "--porcelain", "--ignored") == ""


def test_two_runs_at_once(kit) -> None:
    from concurrent.futures import ThreadPoolExecutor

    dest = apply("DanceGRPO", "d").dest
    patched = contents(dest)
    revert(dest)
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda _: apply("DanceGRPO", dest), range(4)))
    assert sum(result.changed for result in results) == 1
    assert contents(dest) == patched


def test_a_damaged_journal(kit) -> None:
    dest = apply("DanceGRPO", "d").dest
    for text in ("{", '{"kind": "apply", "operations": [], "vendor": "x", "refs": {"refs/heads/main": null}}'):
        (dest / ".leangrpo/journal.json").write_text(text)
        with pytest.raises(KitError) as caught:
            apply("DanceGRPO", "d")
        assert caught.value.code == "LG308"


def test_the_diff_is_what_git_applies(kit) -> None:
    dest = apply("DanceGRPO", "d").dest
    short, full = diff(dest), diff(dest, everything=True)
    assert b"_leangrpo/" not in short.text.replace(b"fastvideo._leangrpo", b"") and short.left_out
    patch = kit.work / "p.diff"
    patch.write_bytes(full.text)
    git(kit.work, "clone", "-q", str(kit.upstream), "plain")
    git(kit.work / "plain", "apply", str(patch))
    for name in (FLUX, WAN, "fastvideo/_leangrpo/VENDORED.txt"):
        assert (kit.work / "plain" / name).read_bytes() == (dest / name).read_bytes()
    stat = diff(dest, stat=True).text.decode()
    assert "3 files changed" in stat


def test_only_anchored_lines_differ(kit) -> None:
    dest = apply("DanceGRPO", "d").dest
    for name in (FLUX, WAN):
        old, new = FILES[name].splitlines(), (dest / name).read_text().splitlines()
        heads = (ast.If, ast.For)  # of which one line
        spans = [range(node.lineno - 1, node.lineno if isinstance(node, heads) else node.end_lineno or node.lineno)
                 for node in ast.walk(ast.parse(FILES[name]))
                 if isinstance(node, heads) or ((isinstance(node, ast.stmt) and not hasattr(node, "body"))
                 and any(word in (ast.get_source_segment(FILES[name], node) or "")
                         for word in ("transformer(", "run_sample_step(", "grpo_one_step(", "sample_reference_model(",
                                      "torch.randperm", "zero_grad", "gather_tensor(", "get_rank()==0",
                                      "group_rewards.", "enumerate(", "%args.", "grad_norm.item",
                                      "train_one_step(", "flux_step(", "all_rewards.append(")))]  # fmt: skip
        functions = [node.lineno for node in ast.walk(ast.parse(FILES[name])) if isinstance(node, ast.FunctionDef)]
        allowed = {line for span in spans for line in span} | set(functions) | {line - 1 for line in functions}
        for kind, start, end, _, _ in difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
            if kind in ("replace", "delete"):
                assert set(range(start, end)) <= allowed, (name, old[start:end])


def test_dry_run_writes_nothing(kit) -> None:
    result = apply("DanceGRPO", "d", dry_run=True)
    assert result.changed and b"+from fastvideo._leangrpo import lean" in result.diff
    assert list(kit.work.iterdir()) == []
    apply("DanceGRPO", "d", scripts=["wan_2_1"])
    before = snapshot(kit.work / "d")
    assert b"train_grpo_flux" in apply("DanceGRPO", "d", scripts=["flux"], dry_run=True).diff
    assert snapshot(kit.work / "d") == before


def test_embedded_upstream(kit) -> None:
    result = apply("MINI")
    dest = result.dest
    assert dest.name == "mini" and git(dest, "status", "--porcelain") == ""
    before = git(dest, "rev-parse", "HEAD^")
    revert(dest)
    assert git(dest, "rev-parse", "HEAD") == before
    apply("mini", "second")
    assert git(kit.work / "second", "rev-parse", "HEAD^") == before


def test_embedded_upstream_is_pinned(kit) -> None:
    (kit.root / "patches/mini/tree/extra.py").write_text("x = 1\n")
    with pytest.raises(KitError) as caught:
        apply("mini")
    assert caught.value.code == "LG108" and "--write" in caught.value.fix
    assert list(kit.work.iterdir()) == []


class Killed(BaseException):
    """Stands for SIGKILL: nothing may catch it."""


def test_a_file_edited_between_the_kill_and_the_next_run(kit, monkeypatch: pytest.MonkeyPatch) -> None:
    dest = kit.work / "d"
    with monkeypatch.context() as patch:
        patch.setattr(journal, "_carry_out", lambda *_: (_ for _ in ()).throw(Killed()))
        with pytest.raises(Killed):
            apply("DanceGRPO", dest)
    text = (dest / WAN).read_text()
    (dest / WAN).write_text("# mine\n")
    with pytest.raises(KitError) as caught:
        apply("DanceGRPO", dest)
    assert caught.value.code == "LG309" and WAN in str(caught.value)
    assert (dest / WAN).read_text() == "# mine\n"
    (dest / WAN).write_text(text)
    assert "completed" in apply("DanceGRPO", dest).notices[0]


def test_the_patched_script_runs_no_user_code(kit) -> None:
    (kit.upstream / "fastvideo/__init__.py").write_text("raise SystemExit('imported')\n")
    hooks = kit.upstream / ".git/hooks"
    hooks.mkdir(exist_ok=True)
    for name in ("post-checkout", "reference-transaction", "post-index-change"):
        (hooks / name).write_text(f"#!/bin/sh\ntouch {kit.work}/ran\n")
        (hooks / name).chmod(0o755)
    clone = kit.work / "mine"
    subprocess.run(["cp", "-r", str(kit.upstream), str(clone)], check=True)
    apply("DanceGRPO", tree=clone)
    revert(clone)
    assert not (kit.work / "ran").exists()
