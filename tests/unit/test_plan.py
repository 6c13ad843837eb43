"""`leangrpo plan`: the numbers of launch files, the ratios of the cost model, and every error."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from leangrpo_tools import data, errors
from leangrpo_tools.errors import KitError
from leangrpo_tools.plan import Machine, PlanReport, Speeds, facts, launch, options, plan
from leangrpo_tools.plan.cost import Rollout, backward_cost

FLUX = {
    "gradient_checkpointing": "", "train_sp_batch_size": 2, "gradient_accumulation_steps": 12, "sampling_steps": 16,
    "num_generations": 12, "use_group": "", "timestep_fraction": 0.6,
}  # fmt: skip


def launch_text(script: str, flags: Mapping[str, object], start: str = "torchrun --nproc_per_node=8") -> str:
    given = [f"--{name} {value}".strip() for name, value in flags.items()]
    lines = [f"{start} fastvideo/train_grpo_{script}.py", *given]
    return "export MODE=online\nmkdir images\n\n" + " \\\n    ".join(lines) + " \\\n"


def planned(folder: Path, text: str, ranks: int | None = None, upstream: str = "dancegrpo") -> PlanReport:
    file = folder / "launch.sh"
    file.write_bytes(text.encode())
    return plan(upstream, file, ranks)


def fails(folder: Path, text: str, code: str, ranks: int | None = None) -> KitError:
    with pytest.raises(KitError) as caught:
        planned(folder, text, ranks)
    assert caught.value.code == code, str(caught.value)
    assert caught.value.fix and (code in ("LG503", "LG505") or caught.value.cause)
    return caught.value


@pytest.mark.parametrize(
    ("script", "changes", "ranks", "updates", "ratio", "everything"),
    [
        ("flux", {}, 8, 2, 1.09, 1.21),
        ("flux", {"train_sp_batch_size": 1, "gradient_accumulation_steps": 4}, 16, 3, 1.06, 1.21),
        ("flux_lora", {"sampling_steps": 12}, 8, 2, 1.11, 1.24),
        ("wan_2_1", {"sampling_steps": 20, "gradient_accumulation_steps": 24}, 8, 1, 1.21, 1.21),
    ],
)
def test_shipped_presets(tmp_path, script, changes, ranks, updates, ratio, everything) -> None:
    start = "torchrun --nnodes=2 --nproc_per_node=8 --node_rank=0" if ranks == 16 else "torchrun --nproc_per_node=8"
    report = planned(tmp_path, launch_text(script, FLUX | changes, start))
    assert (report.script, report.ranks, report.rollout.updates) == (script, ranks, updates)
    assert (round(report.rollout.ratio, 2), round(report.rollout.ratio_all, 2)) == (ratio, everything)


def test_flux_8_gpus_in_numbers(tmp_path) -> None:
    size = planned(tmp_path, launch_text("flux", FLUX)).rollout
    assert (size.samples, size.steps, size.trained_steps, size.accumulation, size.leftover) == (24, 16, 9, 12, 0)
    assert size.forwards(False) == {"no_grad": 384, "grad": 216}
    assert size.forwards(True) == {"no_grad": 276, "grad": 216}
    assert size.graphs == 108


def test_rehearsal_size_matches_what_was_measured() -> None:
    size = Rollout(samples=4, trained=4, steps=6, trained_steps=3, accumulation=4, backward=2.1)
    assert size.forwards(False) == {"no_grad": 24, "grad": 12}
    assert size.forwards(True) == {"no_grad": 12, "grad": 12}


def test_cost_model_of_the_paper() -> None:
    def all_steps(training: str, checkpointed: float) -> float:
        return round(Rollout(1, 1, 10, 10, 1, backward_cost(training, checkpointed)).ratio, 2)

    assert [all_steps("full", 0), all_steps("lora", 0), all_steps("full", 1)] == [1.32, 1.45, 1.25]


def test_mini_from_its_own_launch_file() -> None:
    """Its arguments, `"$@"`, may set what it leaves to defaults."""
    file = data.data_root() / "patches/mini/tree/scripts/train.sh"
    with pytest.raises(KitError) as caught:
        plan("MINI", file)
    assert caught.value.code == "LG504" and "--set gradient_checkpointing=" in (caught.value.fix or "")
    report = plan("MINI", file, overrides=["gradient_checkpointing=false"])
    assert (report.ranks, report.rollout.updates, report.patched) == (1, 1, True)
    assert report.rollout.forwards(True) == {"no_grad": 8, "grad": 24}
    assert report.defaults_from.endswith("mini_grpo/train.py")


@pytest.mark.parametrize("value", [float("inf"), float("nan"), 1e300, -1.0])
@pytest.mark.parametrize("name", ["gpu_gb", "other_gb", "host_gb", "forward_seconds", "link_gb"])
def test_machines_that_cannot_be(tmp_path, name, value) -> None:
    speed = name in vars(Speeds())
    machine = Machine(speeds=Speeds(**{name: value})) if speed else Machine(**{name: value})
    file = tmp_path / "launch.sh"
    file.write_text(launch_text("flux", FLUX))
    with pytest.raises(KitError) as caught:
        plan("dancegrpo", file, machine=machine)
    assert caught.value.code == "LG504" and f"--{name.replace('_', '-')} is" in str(caught.value)


def test_leftover_samples_are_named(tmp_path) -> None:
    text = launch_text("flux", FLUX | {"gradient_accumulation_steps": 10})
    report = planned(tmp_path, text)
    assert (report.rollout.updates, report.rollout.leftover, report.rollout.replayed) == (2, 4, 10)
    assert "4 samples: their gradient is dropped" in report.render()
    assert "next rollout's first update" in planned(tmp_path, text.replace("_flux", "_qwenimage")).render()


def test_a_sliding_window_is_trained_in_place_of_a_fraction(tmp_path) -> None:
    flags = FLUX | {"train_sp_batch_size": 1, "gradient_accumulation_steps": 3, "sampling_steps": 25}
    for given, trained in [({}, 14), ({"training_strategy": "part"}, 4), ({"group_size": 6}, 14),
                           ({"training_strategy": "part", "group_size": 6}, 6)]:  # fmt: skip
        size = planned(tmp_path, launch_text("flux", flags | given), upstream="mixgrpo").rollout
        assert (size.trained_steps, size.updates, size.graphs) == (trained, 4, 3 * trained)


def test_change_to_one_update_per_rollout(tmp_path) -> None:
    changes = {change.flag: change for change in planned(tmp_path, launch_text("flux", FLUX)).changes}
    change = changes["--gradient_accumulation_steps 24"]
    assert round(change.ratio, 2) == 1.21 and "changes training" in change.meaning


def test_selected_samples_cannot_be_replayed(tmp_path) -> None:
    flags = FLUX | {"train_sp_batch_size": 1, "num_generations": 24, "gradient_accumulation_steps": 4, "bestofn": 8}
    report = planned(tmp_path, launch_text("hunyuan", flags))
    assert (report.rollout.samples, report.rollout.trained, report.rollout.updates) == (24, 8, 2)
    assert report.rollout.graphs == 0 and report.rollout.ratio == 1 and "nothing can be replayed" in report.render()


def test_defaults_come_from_the_script_beside_the_launch_file(tmp_path) -> None:
    text = launch_text("flux", {name: value for name, value in FLUX.items() if name != "num_generations"})
    report = planned(tmp_path, text)
    assert report.rollout.samples == 32 and "pinned commit" in report.defaults_from
    (tmp_path / "fastvideo").mkdir()
    source = 'p.add_argument("--num_generations", type=int, default=6)\np.add_argument("--use_group")'
    (tmp_path / "fastvideo/train_grpo_flux.py").write_text(source)
    report = planned(tmp_path, text)
    assert report.rollout.samples == 12 and report.defaults_from.endswith("train_grpo_flux.py")
    (tmp_path / "fastvideo/train_grpo_flux.py").write_text("def broken(:")
    assert "pinned commit" in planned(tmp_path, text).defaults_from


def test_without_groups_a_prompt_is_sampled_once(tmp_path) -> None:
    flags = {name: value for name, value in FLUX.items() if name != "use_group"}
    assert planned(tmp_path, launch_text("flux", flags | {"gradient_accumulation_steps": 2})).rollout.samples == 2


@pytest.mark.parametrize(
    ("start", "ranks"),
    [
        ("python", 1),
        ("torchrun", 1),
        ("torchrun --nproc-per-node 4", 4),
        ("NPROC=4\nexec torchrun --nproc_per_node=$NPROC", 4),
        ("python -m torch.distributed.run --nnodes 2 --nproc_per_node 4", 8),
        ("accelerate launch --num_processes 6", 6),
        ("CUDA_VISIBLE_DEVICES=0,1 torchrun --nproc_per_node=2", 2),
    ],
)
def test_ranks(tmp_path, start, ranks) -> None:
    assert planned(tmp_path, launch_text("flux", FLUX, start)).ranks == ranks


@pytest.mark.parametrize(
    "start",
    [
        "torchrun --nproc_per_node=$NPROC",
        "torchrun --nproc_per_node=gpu",
        "torchrun --nnodes=1:4 --nproc_per_node=8",
        "torchrun --nproc_per_node=$(nvidia-smi -L | wc -l)",
        "accelerate launch",
        "$LAUNCHER",
    ],
)
def test_unknown_ranks_are_asked_for(tmp_path, start) -> None:
    text = launch_text("flux", FLUX, start)
    assert "--ranks" in fails(tmp_path, text, "LG503").fix
    assert planned(tmp_path, text, ranks=3).ranks == 3


@pytest.mark.parametrize(
    ("flags", "code", "says"),
    [
        ({"sampling_steps": "$STEPS"}, "LG504", "$STEPS"),
        ({"sampling_steps": "many"}, "LG504", "many"),
        ({"sampling_steps": ""}, "LG504", "sampling_steps"),
        ({"sampling_steps": "0"}, "LG504", "at least 1"),
        ({"num_generations": "1.5"}, "LG504", "whole"),
        ({"timestep_fraction": "nan"}, "LG504", "nan"),
        ({"sampling_steps": "inf"}, "LG504", "inf"),
        ({"sampling_steps": "1" + "0" * 30}, "LG504", "2**53"),
        ({"sampling_steps": str(2**53 + 2)}, "LG504", "2**53"),
        ({"num_generations": "-1e300"}, "LG504", "2**53"),
        ({"sampling_steps": "1"}, "LG505", "trains 0 steps"),
        ({"timestep_fraction": "1.5"}, "LG505", "1.5"),
        ({"gradient_accumulation_steps": "25"}, "LG505", "no update is made"),
    ],
)
def test_flags_that_cannot_be_planned(tmp_path, flags, code, says) -> None:
    assert says in str(fails(tmp_path, launch_text("flux", FLUX | flags), code))


def test_missing_flag_without_default(tmp_path) -> None:
    flags = {name: value for name, value in FLUX.items() if name != "sampling_steps"}
    assert "--sampling_steps" in fails(tmp_path, launch_text("flux", flags), "LG504").what


def test_flag_spellings(tmp_path) -> None:
    text = launch_text("flux", FLUX | {"num_generations": 6, "sampling_steps": 16})
    spelt = text.replace("--num_generations 6", "--num_generations=12").replace("--gradient_acc", "--gradient_acc")
    assert planned(tmp_path, spelt).rollout.samples == 24
    assert planned(tmp_path, text.rstrip(" \\\n") + " --num_generations 9").rollout.samples == 18
    assert planned(tmp_path, text.replace("--num_generations", "--num_gen")).rollout.samples == 12


def test_windows_line_ends_and_hidden_flags_are_noted(tmp_path) -> None:
    text = launch_text("wan_2_1", FLUX).rstrip(" \\\n") + ' "$@" $EXTRA'
    text = text.replace(' "$@"', ' --selective_checkpointing 1.0 "$@"')
    report = planned(tmp_path, text.replace("\n", "\r\n"))
    assert report.rollout.samples == 24
    assert any("Windows" in note for note in report.notes)
    assert any("$@, $EXTRA" in note for note in report.notes)
    assert any("never synchronised" in note for note in report.notes)


def test_several_commands(tmp_path) -> None:
    both = launch_text("flux", FLUX).rstrip(" \\\n") + "\n" + launch_text("wan_2_1", FLUX)
    fix = fails(tmp_path, both, "LG502").fix or ""
    first, second = re.findall(r"\d+", fix)
    (tmp_path / "both.sh").write_text(both)
    for line, script in ((first, "flux"), (second, "wan_2_1")):
        assert plan("DanceGRPO", tmp_path / "both.sh", line=int(line)).script == script
    assert plan("DanceGRPO", tmp_path / "both.sh", script="wan_2_1").script == "wan_2_1"


def test_files_that_cannot_be_planned(tmp_path) -> None:
    with pytest.raises(KitError, match="launch") as caught:
        plan("DanceGRPO", tmp_path / "missing.sh")
    assert caught.value.code == "LG501"
    assert "Python script" in fails(tmp_path, "echo hello\n", "LG502").cause
    assert "other.py" in fails(tmp_path, "torchrun other.py --x 1\n", "LG502").cause
    assert "my_train_grpo_flux.py" in fails(tmp_path, "torchrun my_train_grpo_flux.py\n", "LG502").cause
    fails(tmp_path, "torchrun fastvideo/train_grpo_sd.py --config c.py\n", "LG506")
    fails(tmp_path, launch_text("flux", FLUX), "LG503", ranks=0)
    with pytest.raises(KitError) as caught:
        planned(tmp_path, launch_text("flux", FLUX), upstream="dance")
    assert caught.value.code == "LG102"
    (tmp_path / "binary.sh").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(KitError) as caught:
        plan("DanceGRPO", tmp_path / "binary.sh")
    assert caught.value.code == "LG501"


def test_what_is_missing_is_named() -> None:
    for upstream, missing, says in (
        ("DanceGRPO", "--launch is missing", "finetune_flux_grpo_8gpus.sh"),
        ("flowGRPO", "--launch and --preset are missing", "config/grpo.py:NAME"),
    ):
        with pytest.raises(KitError, match=missing) as caught:
            plan(upstream)
        assert caught.value.code == "LG501" and says in caught.value.fix and "settings in" in caught.value.cause
    for upstream in ("trl-ddpo", "ddpo-pytorch"):
        with pytest.raises(KitError) as caught:
            plan(upstream)
        assert caught.value.code == "LG506" and "ships no launch files" in caught.value.cause


def test_mini_refuses_leftovers(tmp_path) -> None:
    text = "torchrun -m mini_grpo.train --num_generations 6 --gradient_accumulation_steps 4 --sampling_steps 8"
    (tmp_path / "mini_grpo").mkdir()
    source = data.data_root() / "patches/mini/tree/mini_grpo/train.py"
    (tmp_path / "mini_grpo/train.py").write_bytes(source.read_bytes())
    with pytest.raises(KitError, match="divide") as caught:
        planned(tmp_path, text, upstream="mini")
    assert caught.value.code == "LG505"


def test_json_is_complete_and_plain(tmp_path) -> None:
    report = json.loads(json.dumps(planned(tmp_path, launch_text("flux", FLUX)).to_json(), allow_nan=False))
    assert report["samples_per_rank"] == 24 and report["forwards"]["patched"] == {"no_grad": 276, "grad": 216}
    assert report["recompute_free_share"] == 0.5 and report["assumptions"] and report["changes"][0]["flag"]


def test_planning_data_is_valid_and_its_codes_registered() -> None:
    for path in sorted((data.data_root() / "patches").glob("*/plan.yaml")):
        known = facts.load(path.parent.name)
        for script in known.scripts.values():
            known.flags_of(script) if known.flags else known.entries_of(script)
    assert {f"LG{code}" for code in range(501, 510)} <= set(errors.CODES)


def test_options_are_read_without_running() -> None:
    found = options.read_options(
        "raise SystemExit\nq.add_argument('--a', '-a', default=None)\nq.add_argument('--b', action='store_true')\n"
        "q.add_argument('--c', default=x)\nq.add_argument('--d', action='store_false')"
    )
    assert found is not None
    assert [(name, option.takes_value, option.default) for name, option in found.items()] == [
        ("a", True, None), ("b", False, False), ("c", True, None), ("d", False, True),
    ]  # fmt: skip


def test_a_value_that_looks_like_a_hidden_flag() -> None:
    training = launch.Training("flux", 1, [], ["--steps", "$S", "$MORE"], [])
    assert launch.FlagValues(training, None, {}).unresolved == ["$MORE"]


def test_quick_and_without_torch(tmp_path) -> None:
    (tmp_path / "launch.sh").write_text(launch_text("flux", FLUX))
    code = (
        "import sys, time; start = time.process_time()\n"
        "from pathlib import Path\nfrom leangrpo_tools.plan import plan\n"
        "plan('dancegrpo', Path('launch.sh')).render()\n"
        "assert 'torch' not in sys.modules and 'libcst' not in sys.modules\nassert time.process_time() - start < 1"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


FLUX_720 = FLUX | {"h": 720, "w": 720}


@pytest.mark.parametrize(
    ("script", "gpu", "other", "upstream", "late"),
    [("flux", 80, 0, 45, 0), ("flux", 140, 10, 92, 15), ("flux_lora", 80, 0, 64, 27), ("flux", 24, 0, 0, 0)],
)
def test_graphs_that_fit(tmp_path, script, gpu, other, upstream, late) -> None:
    """By the formula of plan/memory.py: FLUX at 720 squared on 8 ranks; what fits decides the ratio."""
    file = tmp_path / "launch.sh"
    file.write_text(launch_text(script, FLUX_720))
    report = plan("dancegrpo", file, gpu_gb=gpu, other_gb=other)
    found = report.to_json()["memory"]
    assert found["graphs_that_fit"] == {"upstream": upstream, "late": late}
    ratio = report.rollout.cost(0) / (report.rollout.cost(0) - upstream)
    assert found["ratio_with_those"]["upstream"] == pytest.approx(ratio)
    text = report.render()
    assert (f"{upstream} of 108 graphs (" in text) == (upstream > 0) and ("graphs that fit" in text) == (upstream == 0)


def test_bytes_of_a_graph_by_hand(tmp_path) -> None:
    """57 block inputs of 2537 tokens and the root's weights, in bf16; weights, gradients and moments of 12 billion."""
    file = tmp_path / "launch.sh"
    file.write_text(launch_text("flux", FLUX_720))
    found = plan("dancegrpo", file).to_json()["memory"]
    assert found["graph_bytes"] == pytest.approx(2 * (57 * (720 * 720 / 256 + 512) * 3072 + 64_124_992))
    assert found["states_bytes"] == pytest.approx(16 * 11_901_408_320 / 8)


def test_no_bytes_where_a_size_is_not_known(tmp_path) -> None:
    """A graph's bytes; those of the weights stay known."""
    plain = {k: v for k, v in FLUX_720.items() if "check" not in k}
    for script, flags, why in (
        ("flux", FLUX, "size of its samples"),
        ("qwenimage_edit", FLUX_720, "picture to edit"),
        ("skyreels_i2v", plain | {"t": 1}, "not traced"),
        ("flux", plain | {"master_weight_type": "bf16"}, "weights in fp32 only"),
    ):
        report = planned(tmp_path, launch_text(script, flags))
        assert report.memory and report.memory.graph is None and report.memory.parts["parameters"] > 1e9
        assert why in report.sized.why and "--graph-gb" in report.sized.help
        assert report.table.recommended is None and report.table.rows
        assert all(row.held.fits is None for row in report.table.rows)
