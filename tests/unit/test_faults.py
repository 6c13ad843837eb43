"""The strength of the suite: each single fault in the runtime makes the tests named beside it fail.

A fault is a change of one place in the source of a copy of the runtime. The first test shows that the unchanged copy
passes, so that a failure means the fault.
"""

import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXACT, REFUSALS, WRAPPERS = "test_core_exact.py", "test_core_refusals.py", "test_wrappers.py"

# name, file, source before, source after, tests of which at least one must fail
FAULTS = [
    ("rollout gets the leaf itself", "tape", "leaf.detach().clone())", "leaf.detach())", [REFUSALS + "::test_in_place_on_the_output"]),
    ("update gets the leaf itself", "tape", "lambda leaf: leaf.clone())", "lambda leaf: leaf)", [REFUSALS + "::test_in_place_on_the_output"]),
    ("wrong row", "runtime", "key = (window.base + ids[0],", "key = (window.base + (ids[0] + 1) % 4,", [EXACT + "::test_bitwise"]),
    ("row ids used again", "runtime", "self._rows, self._rows + rows", "0, 0", [REFUSALS + "::test_samples_of_an_older_rollout_never_match"]),
    ("wrong step order", "runtime", "return drawn.clone()", "return drawn.flip(1)", [EXACT + "::test_bitwise"]),
    ("flush skipped", "runtime", "            replay.walk(window, wrapper, model)\n", "", [EXACT + "::test_bitwise"]),
    ("flush in reverse order", "replay", "    ready.reverse()\n", "", [EXACT + "::test_bitwise"]),
    ("mean forgotten", "sync", "        flat /= world_size()\n", "", [WRAPPERS + "::test_flat_mean_takes_every_rank_along"]),
    ("sum over ranks forgotten", "sync", "        dist.all_reduce(flat)\n", "", [WRAPPERS + "::test_flat_mean_takes_every_rank_along"]),
    ("ranks without a gradient left out", "sync", "dist.all_reduce(has, op=dist.ReduceOp.MAX)", "pass", [WRAPPERS + "::test_flat_mean_takes_every_rank_along"]),
    ("no flat reduction for DDP", "sync", '"flat" if several', '"in order" if several', [WRAPPERS + "::test_two_ranks[plain-ddp]"]),
    ("FSDP1 walked graph by graph", "sync", '"fsdp1", "joint" if several', '"fsdp1", "in order" if several', [WRAPPERS + "::test_two_ranks[plain-fsdp]"]),
    ("low-precision FSDP1 walked jointly", "sync", "in (torch.bfloat16, torch.float16)", "in ()", [WRAPPERS + "::test_refused_wrappers_recompute"]),
    ("each rank decides alone", "runtime", "wrapper.collective and sync.minimum(int(reason is None)) == 0", "False", [WRAPPERS + "::test_other_inputs_on_one_rank[ddp]", WRAPPERS + "::test_other_inputs_on_one_rank[fsdp]"]),
    ("ranks keep different prefixes", "runtime", "sync.minimum(window.prefix())", "window.prefix()", [WRAPPERS + "::test_budgets_that_differ_between_ranks"]),
    ("replicas not compared", "sync", "if len(set(sums)) > 1:", "if False:", [WRAPPERS + "::test_replicas_that_differ_stop_every_rank"]),
    ("weights not compared at the replay", "replay", "not window.replayed and changed", "False and changed", [REFUSALS + "::test_weights_changed_after_the_rollout"]),
    ("weights not compared at the flush", "replay", "sound = not changed(window, net)", "sound = True", [REFUSALS + "::test_weights_changed_before_the_flush"]),
    ("a norm instead of the checksum", "guard", "* _places(columns, bits.device)", "", [REFUSALS + "::test_weights_changed_after_the_rollout", "test_guard.py"]),
    ("inputs not compared", "replay", "differs = difference(call.inputs, args, kwargs)", "differs = None", [REFUSALS + "::test_other_inputs"]),
    ("inputs not copied", "values", "item.detach().clone() if", "item.detach() if", ["test_values.py"]),
    ("autocast not compared", "replay", "call.autocast != autocast_state", "False and autocast_state", [REFUSALS + "::test_another_autocast_state_is_recomputed"]),
    ("a zero cotangent left out", "tape", "if all(leaf.grad is None for", "if all(leaf.grad is None or not leaf.grad.any() for", [REFUSALS + "::test_zero_advantage_is_walked"]),
    ("a row consumed twice", "runtime", "window.held.pop(key)", "window.held[key]", [REFUSALS + "::test_a_row_is_consumed_once"]),
    ("two backward passes through a leaf", "tape", "        if self.seen:", "        if False:", [REFUSALS + "::test_backward_twice_is_refused"]),
    ("two calls for one step", "keep", "if key in window.held or key in window.ambiguous:", "if False:", [REFUSALS + "::test_network_called_twice_per_step"]),
    ("kept without a training window", "runtime", "window is None or window.updating or rows is None:", "window is None or window.updating:", [REFUSALS + "::test_nothing_is_kept_outside_a_window"]),
    ("a reference forward from the tape", "runtime", "or not torch.is_grad_enabled()", "", [REFUSALS + "::test_reference_forward_is_native"]),
    ("a gradient into the arguments cut off", "replay", "if needs_grad(args, kwargs):", "if False:", [REFUSALS + "::test_gradient_into_the_arguments_is_not_cut_off"]),
    ("dropout overlooked", "guard", "isinstance(module, _DropoutNd) and module.p > 0", "False", [REFUSALS + "::test_active_dropout"]),
    ("eval mode for kept calls", "keep", "    net.train()\n", "", [EXACT + "::test_a_kept_call_checkpoints_activations"]),
    ("modes not put back", "keep", "module.training = training", "pass", [EXACT + "::test_modes_are_put_back"]),
    ("autocast's cached weights shared", "keep", "torch.clear_autocast_cache()", "pass", [EXACT + "::test_cached_casts_are_forgotten_before_a_kept_call"]),
    ("budget off by one", "keep", "window.positions[key[:2]] >= window.limit", "window.positions[key[:2]] > window.limit", [EXACT + "::test_budget_keeps_a_prefix"]),
    ("graphs kept alive", "replay", "ready.append((call.release(), grads))", "ready.append((call.outs, grads)); KEEP.append(call)", [EXACT + "::test_nothing_is_held_after_the_flush"]),
    ("optimizer steps unseen", "runtime", "register_optimizer_step_pre_hook(self._before_step)", "pass", [REFUSALS + "::test_step_without_flush_is_refused"]),
    ("audit never stops", "audit", "if not difference <= tolerance:", "if False:", [REFUSALS + "::test_a_wrong_flush_is_caught_by_the_audit"]),
    ("settings of ranks not compared", "runtime", "if len(set(texts)) > 1:", "if False:", [WRAPPERS + "::test_settings_that_differ_stop_every_rank"]),
]  # fmt: skip


def copy_runtime(folder: Path) -> Path:
    shutil.copytree(ROOT / "leangrpo_core", folder / "leangrpo_core", ignore=shutil.ignore_patterns("__pycache__"))
    return folder / "leangrpo_core"


def run_tests(folder: Path, tests: list[str]) -> subprocess.CompletedProcess[str]:
    """The given tests against the runtime in `folder`; stops at the first failure."""
    names = [str(ROOT / "tests" / "unit" / test) for test in tests]
    code = (
        "import sys, pytest, leangrpo_core\n"
        f"assert leangrpo_core.__file__.startswith({str(folder)!r}), leangrpo_core.__file__\n"
        f"sys.exit(pytest.main(['-x', '-q', '-p', 'no:cacheprovider', '-c', {str(ROOT / 'pyproject.toml')!r}, "
        f"'--rootdir', {str(ROOT)!r}, *{names!r}]))"
    )
    return subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, subprocess.CompletedProcess[str]]:
    """Each fault's run of its tests, two at a time: they wait for process groups more than they compute."""

    def run(fault: tuple[str, str, str, str, list[str]]) -> subprocess.CompletedProcess[str]:
        _, name, before, after, tests = fault
        folder = tmp_path_factory.mktemp("fault")
        source = copy_runtime(folder) / f"{name}.py"
        text = source.read_text(encoding="utf-8")
        assert before in text, f"{name}.py no longer has {before!r}"
        source.write_text(text.replace(before, after) + "\n\nKEEP: list = []\n", encoding="utf-8")
        return run_tests(folder, tests)

    with ThreadPoolExecutor(2) as pool:
        return dict(zip((fault[0] for fault in FAULTS), pool.map(run, FAULTS), strict=True))


def test_the_unchanged_copy_passes(tmp_path: Path) -> None:
    copy_runtime(tmp_path)
    done = run_tests(tmp_path, [EXACT + "::test_bitwise", REFUSALS + "::test_other_inputs", "test_guard.py"])
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


@pytest.mark.slow
@pytest.mark.parametrize("name", [fault[0] for fault in FAULTS])
def test_fault_is_caught(name: str, outcomes: dict[str, subprocess.CompletedProcess[str]]) -> None:
    done = outcomes[name]
    text = done.stdout[-3000:] + done.stderr[-1000:]
    assert done.returncode == 1 and "failed" in done.stdout, f"the suite passes with this fault\n{text}"
