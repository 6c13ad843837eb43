"""`leangrpo plan` for FlowGRPO's shape: presets of a Python config, their numbers, overrides, and every error."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from leangrpo_tools import recipe
from leangrpo_tools.cli import umbrella
from leangrpo_tools.errors import KitError
from leangrpo_tools.plan import PlanReport, facts, plan
from leangrpo_tools.plan.cost import Rollout

VALUES: dict[str, object] = {
    "sample.num_batches_per_epoch": 4, "sample.train_batch_size": 3, "sample.num_image_per_prompt": 6,
    "sample.num_steps": 10, "sample.guidance_scale": 4.5, "sample.sde_window_size": 2,
    "sample.sde_window_range": (0, 5), "train.gradient_accumulation_steps": 2, "train.num_inner_epochs": 1,
    "train.timestep_fraction": 0.99, "train.beta": 0.0, "train.cfg": True, "use_lora": True,
    "mixed_precision": "fp16", "resolution": 512, "note": None,
}  # fmt: skip
FAST = {"sample.sde_type": "cps"}
WAN = {
    "sample.sample_time_per_prompt": 2, "sample.kl_reward": 0.0, "height": 240, "width": 416, "frames": 33,
    "mixed_precision": "bf16",
}  # fmt: skip


load_once, scripts_once = functools.cache(facts.load), functools.cache(recipe.scripts_of)


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tree with a config whose preset `mine` has these values. The kit's data is read once for all tests."""
    monkeypatch.setattr(facts, "load", load_once)
    monkeypatch.setattr(recipe, "scripts_of", scripts_once)
    (tmp_path / "config").mkdir()
    write(tmp_path, {})
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(tree: Path, changes: dict[str, object], more: str = "", file: str = "grpo.py") -> None:
    lines = ["import ml_collections", "import os", "def mine():", "    gpu_number = 8"]
    lines += ["    made = ml_collections.ConfigDict()"]
    lines += ["    made.sample = ml_collections.ConfigDict()", "    made.train = ml_collections.ConfigDict()"]
    lines += [f"    made.{name} = {value!r}" for name, value in (VALUES | changes).items()]
    lines += [f"    {line}" for line in more.splitlines()]
    lines += ["    return made", "def get_config(name):", "    return globals()[name]()"]
    (tree / "config" / file).write_text("\n".join(lines) + "\n")


def planned(script: str = "sd3", *overrides: str, ranks: int | None = None) -> PlanReport:
    return plan("flowgrpo", ranks=ranks, preset="mine", script=script, overrides=overrides)


def launched(tree: Path, command: str, **more: object) -> PlanReport:
    (tree / "scripts").mkdir(exist_ok=True)
    for script in facts.load("flowGRPO").scripts.values():
        (tree / script.program).touch()
    (tree / "scripts/go.sh").write_text(f"export X=1\n{command}\n")
    return plan("flowGRPO", tree / "scripts/go.sh", **more)  # type: ignore[arg-type]


def fails(code: str, says: str, *given: object, **named: object) -> KitError:
    with pytest.raises(KitError, match=says) as caught:
        planned(*given, **named)  # type: ignore[arg-type]
    assert caught.value.code == code and caught.value.fix, str(caught.value)
    assert code in ("LG503", "LG505") or caught.value.cause
    return caught.value


def test_a_file_without_the_name_of_a_preset(tree) -> None:
    with pytest.raises(KitError, match="no preset name") as caught:
        plan("flowgrpo", ranks=4, preset=str(tree / "config/grpo.py"), script="sd3")
    assert caught.value.code == "LG508" and caught.value.fix


def test_sd3_in_numbers(tree) -> None:
    report = planned()
    size = report.rollout
    assert (size.samples, size.steps, size.trained_steps, size.updates, size.accumulation) == (12, 10, 9, 2, 6)
    assert size.forwards(False) == {"no_grad": 120, "grad": 108}
    assert size.forwards(True) == {"no_grad": 66, "grad": 108}
    assert size.network_calls(False) == {"no_grad": 40, "grad": 36} and size.graphs == 18
    assert size.network_calls(True) == {"no_grad": 22, "grad": 36}
    # by hand: 12 samples of 10 + 9 * 2.24 forwards, 6 of which save 9
    assert size.ratio == pytest.approx(12 * (10 + 9 * 2.24) / (12 * (10 + 9 * 2.24) - 54))
    assert (report.ranks, report.training, report.preset) == (8, "lora", "config/grpo.py:mine")
    assert "18 per rank at the end of the rollout, each of 3 samples" in report.render()


def test_the_reference_is_counted_and_stays(tree) -> None:
    size = planned("sd3", "train.beta=0.04").rollout
    assert size.reference_forwards == 108 and size.cost(0) == pytest.approx(12 * (10 + 9 * 3.24))
    assert size.ratio < planned().rollout.ratio
    assert "108, natively and patched" in planned("sd3", "train.beta=0.04").render()


@pytest.mark.parametrize(
    ("script", "changes", "steps"),
    [
        ("sd3", {"train.timestep_fraction": 0.5, "sample.num_steps": 7}, 3),
        ("sd3", {"train.timestep_fraction": 1.0}, 10),
        ("sd3_fast", FAST, 2),
        ("sd3_fast", FAST | {"sample.sde_window_size": 0}, 9),
        ("flux_fast", FAST | {"mixed_precision": "no", "train.timestep_fraction": 0.1}, 2),
        ("sd3_GRPO_Guard", {"rationorm": True, "run_project": "p"}, 9),
    ],
)
def test_trained_steps_by_script(tree, script, changes, steps) -> None:
    write(tree, changes)
    if script == "sd3_GRPO_Guard":
        write(tree, changes, file="grpo_guard.py")
    size = planned(script).rollout
    assert size.trained_steps == steps and size.forwards(False)["grad"] == 12 * steps
    assert size.graphs == 2 * steps


def test_wan_has_two_calls_per_step_and_repeats(tree) -> None:
    write(tree, WAN)
    size = planned("wan2_1").rollout
    assert (size.samples, size.calls, size.backward, size.updates) == (24, 2, 2.2, 4)
    assert size.network_calls(False) == {"no_grad": 160, "grad": 144} and size.graphs == 36
    assert planned("wan2_1", "sample.kl_reward=0.1").rollout.reference_forwards == 240
    assert planned("wan2_1", "sample.guidance_scale=1", "train.cfg=False").rollout.calls == 1


def test_inner_epochs_train_every_sample_again(tree) -> None:
    size = planned("sd3", "train.num_inner_epochs=2").rollout
    assert (size.updates, size.replayed, size.forwards(False)["grad"]) == (4, 6, 216)
    both = planned("sd3", "train.num_inner_epochs=2", "train.gradient_accumulation_steps=8").rollout
    assert (both.updates, both.replayed) == (1, 12)
    assert both.ratio_all == pytest.approx(both.cost(0) / (both.cost(0) - 216))


def test_leftover_batches_are_carried(tree) -> None:
    report = planned("sd3", "train.gradient_accumulation_steps=3")
    assert (report.rollout.updates, report.rollout.leftover) == (1, 3)
    assert "next rollout's first update" in report.render()


def test_full_fine_tuning_costs_more_and_its_graphs_are_not_known(tree) -> None:
    report = planned("sd3", "use_lora=False")
    assert (report.training, report.rollout.backward) == ("full", 2.1)
    assert report.memory and report.memory.graph is None and "another way of training" in report.sized.why
    assert report.memory.states == pytest.approx(16 * 2_243_171_520)


@pytest.mark.parametrize(
    ("script", "overrides", "says"),
    [
        ("sd3", ["train.cfg=False"], "the rollout evaluates the unconditional input and the update does not"),
        ("sd3", ["sample.guidance_scale=1.0"], "the update evaluates"),
        ("flux", ["mixed_precision=bf16"], "rounds the network's input"),
    ],
)
def test_what_cannot_be_replayed_is_said(tree, script, overrides, says) -> None:
    report = planned(script, *overrides)
    assert report.rollout.graphs == 0 and report.rollout.ratio == 1 and says in report.render()
    assert not any("accumulation" in change.flag for change in report.changes)


def test_rounded_inputs_are_a_setting(tree) -> None:
    report = planned("flux")
    [setting] = report.settings
    assert setting.flag == "LEANGRPO_INPUTS=rounded"
    assert setting.ratio == planned("flux", "mixed_precision=no").rollout.ratio > 1.1
    assert "0 of 18 graphs fit into 80 GB: ratio 1.00" in setting.meaning
    assert len(planned("flux", "sample.guidance_scale=1", "train.cfg=True").notes) == 2


def test_launch_file_in_a_tree(tree) -> None:
    (tree / "a").mkdir()
    (tree / "a/ddp.yaml").write_text("distributed_type: MULTI_GPU\nnum_processes: 4\n")
    start = "accelerate launch --config_file a/ddp.yaml --num_processes=16 scripts/train_sd3.py"
    report = launched(tree, f"{start} --config config/grpo.py:mine --config.train.beta=0.1 --noconfig.train.cfg \\\n"
                      "  --config.sample.guidance_scale 1")  # fmt: skip
    assert (report.ranks, report.script, report.line) == (16, "sd3", 2) and report.patched
    assert report.rollout.reference == 1 and report.rollout.graphs == 18
    assert report.overridden == {"train.beta": "0.1", "train.cfg": "false", "sample.guidance_scale": "1"}
    assert "written for 8 ranks and planned for 16" in report.render() and "2 times the samples" in report.render()
    report = launched(tree, start.replace("--num_processes=16 ", "") + " --config=config/grpo.py:mine")
    assert report.ranks == 4 and report.rollout.reference == 0
    assert launched(tree, start + " --config=config/grpo.py:mine", overrides=["train.beta=1"]).rollout.reference == 1
    assert launched(tree, start + " --config=$C", preset="mine").rollout.samples == 12


def test_deepspeed_is_seen_in_the_launcher_s_file(tree) -> None:
    (tree / "zero.yaml").write_text("distributed_type: DEEPSPEED\nnum_processes: 8\n")
    command = "accelerate launch --config_file zero.yaml scripts/train_sd3.py --config config/grpo.py:mine"
    report = launched(tree, command)
    [change] = report.changes
    assert report.ranks == 8 and report.rollout.graphs == 0
    assert "MULTI_GPU" in change.flag and change.ratio == pytest.approx(planned().rollout.ratio)
    flux = launched(tree, command.replace("sd3", "flux"))
    assert "Only together with LEANGRPO_INPUTS=rounded" in flux.changes[0].meaning
    assert "Only together with --config_file" in flux.settings[0].meaning
    gone = launched(tree, command.replace("zero.yaml", "x/deepspeed_zero2.yaml --num_processes 8"))
    assert gone.rollout.graphs == 0


@pytest.mark.parametrize(
    ("script", "gpu", "fit", "graph"),
    [
        ("sd3", 80, 3, 6 * (1024 * 2.008e6 + 205 * 1.614e6) + 2.911e9),
        ("wan2_1", 24, 16, 3 * 30 * 3510 * 1536 * 2 + 2 * 25_775_680),
    ],
)
def test_bytes_by_hand(tree, script, gpu, fit, graph) -> None:
    """SD3: 3 samples with and without prompt; Wan: block inputs of 15 x 26 x 9 tokens. Weights on every rank."""
    write(tree, WAN if script == "wan2_1" else {})
    report = plan("flowGRPO", preset="mine", script=script, gpu_gb=gpu)
    found = report.to_json()["memory"]
    states = {"sd3": 4 * 2_243_171_520 + 12 * 18_776_064, "wan2_1": 4 * 1_418_996_800 + 12 * 23_592_960}[script]
    assert found["graph_bytes"] == pytest.approx(graph, rel=2e-3) and found["states_bytes"] == pytest.approx(states)
    assert int((0.95 * gpu * 1e9 - states) // found["graph_bytes"]) == found["graphs_that_fit"]["upstream"]
    assert f"{found['graphs_that_fit']['upstream']} of {report.rollout.graphs} graphs (" in report.render()
    saved = found["graphs_that_fit"]["upstream"] * 3 / report.rollout.calls
    ratio = report.rollout.cost(0) / (report.rollout.cost(0) - saved)
    assert found["ratio_with_those"]["upstream"] == pytest.approx(ratio) and ratio < report.rollout.ratio


def test_unguided_graphs_are_half_as_large(tree) -> None:
    guided, plain = planned().memory, planned("sd3", "train.cfg=False", "sample.guidance_scale=1").memory
    assert guided and plain and guided.graph and plain.graph
    assert (guided.graph - 2.911e9) == pytest.approx(2 * (plain.graph - 2.911e9))


def test_one_update_per_rollout(tree) -> None:
    [change] = planned().changes
    assert change.flag == "--config.train.gradient_accumulation_steps=4"
    assert change.ratio == planned("sd3", "train.gradient_accumulation_steps=4").rollout.ratio
    assert "36 graphs" in change.meaning and not planned("sd3", "train.gradient_accumulation_steps=4").changes


@pytest.mark.parametrize(
    ("override", "code", "says"),
    [
        ("train.gradient_accumulation_steps=0", "LG504", "at least 1"),
        ("train.gradient_accumulation_steps=5", "LG505", "exceeds the 4 batches"),
        ("sample.num_batches_per_epoch=0", "LG504", "at least 1"),
        ("train.timestep_fraction=0.05", "LG505", "trains 0 steps"),
        ("train.timestep_fraction=1.5", "LG505", "trains 15 steps"),
        ("train.timestep_fraction=nan", "LG504", "not a number"),
        ("sample.num_steps=ten", "LG504", "has a int there"),
        ("sample.num_steps=2.5", "LG504", "has a int there"),
        ("train.cfg=maybe", "LG504", "has a bool there"),
        ("train=1", "LG504", "group of entries"),
        ("train.betta=1", "LG504", "no entry train.betta"),
        ("nothing.beta=1", "LG504", "no entry nothing.beta"),
        ("train.beta", "LG504", "no value"),
    ],
)
def test_overrides_that_cannot_be_planned(tree, override, code, says) -> None:
    fails(code, says, "sd3", override)


def test_overrides_take_the_kind_of_the_entry(tree) -> None:
    report = planned("sd3", "config.train.cfg=0", "--config.sample.guidance_scale=1", "note=x", "sample.num_steps=4")
    assert report.rollout.steps == 4 and report.rollout.graphs == 6
    assert planned("sd3", "sample.sde_window_range=[1, 2]").rollout.steps == 10


def test_groups_need_enough_ranks(tree) -> None:
    assert "a multiple of 2 ranks" in fails("LG505", "7 ranks of 3 samples", "sd3", ranks=7).fix
    assert planned("sd3", ranks=6).ranks == 6
    fails("LG503", "--ranks is 0", "sd3", ranks=0)


def test_missing_entries_stop_upstream(tree) -> None:
    error = fails("LG505", "no sample.sde_type", "sd3_fast")
    assert "train_sd3_fast.py reads it" in error.cause
    fails("LG505", "no sample.sample_time_per_prompt|no sample.kl_reward", "wan2_1")


def test_an_entry_that_is_not_known_matters_only_if_it_is_needed(tree) -> None:
    write(tree, {}, "made.note = os.environ['X']\nmade.sample.num_steps = int(os.environ['STEPS'])")
    error = fails("LG509", "sample.num_steps is not known: `os.environ\\['STEPS'\\]`", "sd3")
    line = (
        (tree / "config/grpo.py").read_text().split("\n").index("    made.sample.num_steps = int(os.environ['STEPS'])")
    )
    assert f"grpo.py:{line + 1}: " in error.what and "--set sample.num_steps=VALUE" in error.fix
    assert planned("sd3", "sample.num_steps=5").rollout.trained_steps == 4


def test_ranks_and_scripts_that_are_not_known(tree) -> None:
    write(tree, {}, "gpu_number = int(os.environ['N'])")
    fails("LG503", "how many ranks", "sd3")
    assert planned("sd3", ranks=4).ranks == 4
    with pytest.raises(KitError, match="which script") as caught:
        plan("flowGRPO", preset="mine")
    assert caught.value.code == "LG502" and "sd3_fast" in caught.value.fix
    fails("LG502", "no script 'sd4'", "sd4")


def test_where_presets_are_looked_for(tree, monkeypatch, tmp_path_factory) -> None:
    (tree / "scripts").mkdir()
    monkeypatch.chdir(tree / "scripts")
    assert planned().rollout.samples == 12
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    monkeypatch.chdir(elsewhere)
    fails("LG508", "no config/grpo.py here", "sd3")
    report = plan("flowGRPO", preset=f"{tree}/config/grpo.py:mine", script="sd3")
    assert report.preset == "config/grpo.py:mine" and report.rollout.samples == 12
    (elsewhere / "flowGRPO").symlink_to(tree)
    assert planned().rollout.samples == 12
    for given, says in ((f"{tree}/none.py:mine", "none.py"), (f"{tree}/config/grpo.py:yours", "yours")):
        with pytest.raises(KitError, match=says):
            plan("flowGRPO", preset=given, script="sd3")


def test_upstream_s_names_know_their_script(tree) -> None:
    text = (tree / "config/grpo.py").read_text()
    (tree / "config/grpo.py").write_text(text.replace("def mine", "def geneval_sd3"))
    report = plan("flowGRPO", preset="geneval_sd3")
    assert report.script == "sd3" and report.line == 3
    presets = [name for script in facts.load("flowGRPO").scripts.values() for name in script.presets]
    assert len(presets) == len(set(presets))


def test_presets_are_for_upstreams_with_a_config(tree) -> None:
    with pytest.raises(KitError, match="not in presets") as caught:
        plan("DanceGRPO", preset="mine")
    assert caught.value.code == "LG501"
    with pytest.raises(KitError, match="--config is not given"):
        launched(tree, "accelerate launch --num_processes 8 scripts/train_sd3.py")
    with pytest.raises(KitError, match="which is not known") as caught:
        launched(tree, "accelerate launch --num_processes 8 scripts/train_sd3.py --config $PRESET")
    assert caught.value.code == "LG504" and "--preset" in caught.value.fix


def test_command_line(tree) -> None:
    words = ["plan", "flowGRPO", "--preset", "mine", "--script", "sd3", "--gpus", "4", "--set", "train.beta=0.1"]
    done = CliRunner().invoke(umbrella(), words)
    assert done.exit_code == 0 and "108, natively and patched" in done.stdout, done.output
    assert "planned for 4" in " ".join(done.stdout.split())
    done = CliRunner().invoke(umbrella(), [*words, "--set", "train.cfg=maybe"])
    assert done.exit_code == 2 and "LG504" in done.output


def test_json_is_complete_and_plain(tree) -> None:
    report = json.loads(json.dumps(planned("sd3", "train.beta=0.1").to_json(), allow_nan=False))
    assert report["preset"] == "config/grpo.py:mine" and report["overridden"] == {"train.beta": "0.1"}
    assert report["network_calls"]["patched"] == {"no_grad": 22, "grad": 36} and report["samples_per_call"] == 3
    assert report["reference_forwards"] == 108 and report["settings"] == []


def test_one_sample_per_call_counts_as_before() -> None:
    size = Rollout(samples=24, trained=24, steps=16, trained_steps=9, accumulation=12, backward=3.0)
    assert size.graphs == size.saved == 108 and size.network_calls(True) == size.forwards(True)
    assert size.ratio_with(50) == pytest.approx(size.cost(0) / (size.cost(0) - 50))


def test_launch_files_that_a_shell_works_out(tree) -> None:
    start = (
        "accelerate launch --config_file $1 --num_processes $((N*2)) scripts/train_sd3.py --config config/grpo.py:mine"
    )
    report = launched(tree, f"N=4\n{start} --config.sample.sde_window_range=$SPAN")
    plain = launched(tree, start.replace("$((N*2))", "8"))
    assert report.ranks == plain.ranks == 8 and report.rollout == plain.rollout
    assert any("DeepSpeed" in note for note in report.notes)
