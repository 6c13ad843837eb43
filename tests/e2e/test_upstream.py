"""The real DanceGRPO, FlowGRPO and MixGRPO, where they are in the cache."""

from __future__ import annotations

import ast
import re
import time
from pathlib import Path
from typing import Any

import pytest
from support.toytree import contents, git

from leangrpo_core.values import uncomparable
from leangrpo_tools import fetch, lock, recipe
from leangrpo_tools.apply import ApplyResult, apply
from leangrpo_tools.diff import diff
from leangrpo_tools.errors import KitError
from leangrpo_tools.plan import plan
from leangrpo_tools.revert import revert

pytestmark = pytest.mark.upstream
EXPECTED = {
    "fastvideo/train_grpo_flux.py": {"rollout": 1, "policy": 1},
    "fastvideo/train_grpo_flux_lora.py": {"rollout": 1, "policy": 1},
    "fastvideo/train_grpo_wan_2_1.py": {"rollout": 2, "policy": 2},
    "fastvideo/train_grpo_qwenimage.py": {"rollout": 1, "policy": 1},
    "fastvideo/train_grpo_qwenimage_edit.py": {"rollout": 1, "policy": 1},
    "fastvideo/train_grpo_skyreels_i2v.py": {"rollout": 2, "policy": 2},
    "fastvideo/train_grpo_hunyuan.py": {"rollout": 1, "policy": 1},
}
"""Network calls of the rollout and of the update, by script; `sd` is shaped otherwise."""


FLOW = {
    "train_sd3": ("sd3_pipeline_with_logprob", 2, True),
    "train_sd3_GRPO_Guard": ("sd3_pipeline_with_logprob", 2, True),
    "train_sd3_fast": ("sd3_pipeline_with_logprob_fast", 2, False),
    "train_flux": ("flux_pipeline_with_logprob", 1, True),
    "train_flux_fast": ("flux_pipeline_with_logprob_fast", 1, False),
    "train_flux_kontext": ("flux_kontext_pipeline_with_logprob", 1, True),
    "train_wan2_1": ("wan_pipeline_with_logprob", 3, True),
    "train_qwenimage": ("qwenimage_pipeline_with_logprob", 1, False),
    "train_qwenimage_edit": ("qwenimage_edit_pipeline_with_logprob", 1, False),
}
"""Script: its pipeline's file, network calls of the update, whether it shuffles its samples."""


def real(upstream: str, folder: Path):
    entry = lock.load().upstreams[upstream]
    assert isinstance(entry, lock.GitEntry)
    if not fetch.cached(upstream, entry):
        pytest.skip(f"{upstream} is not in the cache; fill it with: apply-patch {upstream} /tmp/x [--source PATH]")
    return apply(upstream, folder / "d")


@pytest.fixture(scope="module")
def patched(tmp_path_factory: pytest.TempPathFactory):
    return real("DanceGRPO", tmp_path_factory.mktemp("real"))


def test_flowgrpo_changes_few_lines_and_nothing_but_training_opens_a_window(tmp_path: Path) -> None:
    done = real("flowGRPO", tmp_path)
    for script, (pipeline, calls, shuffled) in FLOW.items():
        text = (done.dest / "scripts" / f"{script}.py").read_text()
        assert text.count("lean.policy_call(") == calls
        assert text.count("lean.row_order(") == shuffled
        for call in ("lean.rollout_batch(", "lean.identity(", "lean.flush(transformer, optimizer)"):
            assert text.count(call) == 1, (script, call)
        # Only where no sample is left out or moved to another batch.
        assert text.count("whole=True") == ("qwen" in script)
        assert text.index("def eval(") < text.index("def main(") < text.index("lean.rollout_batch(")
        sampler = (done.dest / "flow_grpo/diffusers_patch" / f"{pipeline}.py").read_text()
        assert sampler.count("lean.rollout_call(") == (2 if "wan" in script else 1)
        assert sampler.count("lean.scored(sde_step_with_logprob,") + sampler.count("sde_step_with_logprob,\n") == 1
        # Wan's KL reward evaluates the reference in the rollout.
        assert sampler.count("self.transformer(") == (1 if "wan" in script else 0)
    assert_bagel_is_what_is_said_of_it(done)
    assert "17 files changed" in diff(done.dest, stat=True).text.decode()
    assert git(done.dest, "status", "--porcelain") == ""
    after = contents(done.dest)
    revert(done.dest)
    apply("flowGRPO", done.dest)
    assert contents(done.dest) == after


def test_bagel_is_refused_before_anything_is_fetched(tmp_path: Path) -> None:
    with pytest.raises(KitError) as caught:
        apply("flowGRPO", tmp_path / "none", scripts=["bagel"])
    assert caught.value.code == "LG210" and "scripts/train_bagel.py" in caught.value.what
    assert not (tmp_path / "none").exists()


def assert_bagel_is_what_is_said_of_it(done: ApplyResult) -> None:
    """It is left alone for what its files say, and the runtime would keep nothing."""
    assert any(text.startswith("bagel (scripts/train_bagel.py) is left alone: ") for text in done.notices)
    base = git(done.dest, "diff", "--name-only", "HEAD^").splitlines()
    assert "scripts/train_bagel.py" not in base and not any("bagel" in name for name in base)
    model = done.dest / "flow_grpo/bagel/modeling/bagel"
    tree = ast.parse((model / "qwen2_navit.py").read_text())
    cache = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "NaiveCache")
    names: dict[str, Any] = {}
    exec(compile(ast.Module([cache], []), "cache", "exec"), names)
    assert uncomparable((), {"past_key_values": names["NaiveCache"](2)})
    text = (model / "bagel.py").read_text()
    calls = text[text.index("def _forward_flow") :]
    assert "past_key_values=past_key_values," in calls and "accelerator.backward(loss)" in text
    assert "transformer.module.training = False" in (done.dest / "scripts/train_bagel.py").read_text()
    forward = (model / "qwen2_navit.py").read_text().split("class Qwen2ForCausalLM")[1]
    assert "if self.training:" in forward and "self.forward_inference(" in forward


def test_mixgrpo_changes_few_lines_and_its_launch_files_are_read(tmp_path: Path) -> None:
    done = real("MixGRPO", tmp_path)
    script, sampler = (done.dest / "fastvideo" / name for name in ("train_grpo_flux.py", "utils/sampling_utils.py"))
    text = script.read_text()
    for call in ("lean.rollout(", "lean.step_order(", "lean.identity()", "lean.flush(transformer, optimizer)",
                 "lean.policy_call(", "lean_rows=batch_idx"):  # fmt: skip
        assert text.count(call) == 1, call
    assert sampler.read_text().count("lean.rollout_call(") == 1 and "lean_rows=None," in sampler.read_text()
    assert "lean" not in (done.dest / "fastvideo/sample/sample_flux.py").read_text()
    # The training command is handed to the machines as one quoted text, its flags are variables of the launch file.
    launch_files = recipe.load("MixGRPO").find("flux").launch
    assert len(launch_files) == 3
    for file in launch_files:
        found = plan("MixGRPO", done.dest / file)
        size = found.rollout
        assert (found.ranks, size.samples, size.steps, size.trained_steps, size.updates) == (32, 12, 25, 4, 4)
        assert size.graphs == 12 and set(found.defaults) == {"selective_checkpointing"}
    assert "2 files changed" in diff(done.dest, stat=True).text.decode()
    assert git(done.dest, "status", "--porcelain") == ""
    after = contents(done.dest)
    revert(done.dest)
    apply("MixGRPO", done.dest)
    assert contents(done.dest) == after


def test_every_anchor_matches_and_only_few_lines_change(patched) -> None:
    for name, count in EXPECTED.items():
        text = (patched.dest / name).read_text()
        assert text.count("lean.rollout_call(") == count["rollout"]
        assert len(re.findall(r"lean\.scored\(flux_step, (model_)?pred, ", text)) == 1
        assert text.count("lean.rewarded(all_rewards.append, batch_idx, ") == text.count("all_rewards.append")
        # HunyuanVideo has two rewards per sample, which are not told.
        assert ("all_rewards.append" in text) != ("hunyuan" in name)
        assert text.count("lean.policy_call(") == count["policy"]
        for call in ("lean.rollout(", "lean.step_order(", "lean.identity()", "lean.flush(transformer, optimizer)"):
            assert text.count(call) == 1, call
        assert text.count("lean_rows=batch_idx") == 1
        assert text.count("best_of=") == text.count("lean.drawn(") == ("hunyuan" in name)
    text = (patched.dest / "fastvideo/train_grpo_sd.py").read_text()
    assert text.count("lean.policy_call(") == 2
    for call in ("lean.rollout_batch(", "lean.step_order(", "lean.identity()", "lean.flush(unet, optimizer)"):
        assert text.count(call) == 1, call
    sampler = (patched.dest / "fastvideo/models/stable_diffusion/pipeline_with_logprob.py").read_text()
    assert sampler.count("lean.rollout_call(") == 1 and "self.unet(" not in sampler
    stat = diff(patched.dest, stat=True).text.decode()
    assert "9 files changed" in stat
    assert git(patched.dest, "status", "--porcelain") == ""


@pytest.mark.parametrize("upstream", ["DanceGRPO", "flowGRPO"])
def test_launch_files_of_the_recipe_exist(upstream: str, tmp_path: Path) -> None:
    dest = real(upstream, tmp_path).dest
    for script in recipe.load(upstream).scripts.values():
        for launch in script.launch:
            assert Path(script.file).name in (dest / launch).read_text()


def test_round_trip_and_time(patched, tmp_path: Path) -> None:
    first = apply("DanceGRPO", tmp_path / "d")
    after = contents(first.dest)
    revert(first.dest)
    before = contents(first.dest)
    assert git(first.dest, "rev-parse", "HEAD") == git(patched.dest, "rev-parse", "HEAD^")
    start = time.process_time()
    apply("DanceGRPO", tmp_path / "d")
    assert time.process_time() - start <= 4.0  # nine files
    assert contents(first.dest) == after
    revert(first.dest)
    assert contents(first.dest) == before
