"""How weights are spread over the ranks, by upstream's flags and by accelerate's file, and what keeps nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from leangrpo_tools.errors import KitError
from leangrpo_tools.plan import Machine, PlanReport, plan, sharding
from leangrpo_tools.plan.traffic import Traffic, Wire

FLAGS = (
    "--gradient_checkpointing --train_sp_batch_size 2 --gradient_accumulation_steps 12 --sampling_steps 16 --use_group "
    "--num_generations 12 --timestep_fraction 0.6 --h 720 --w 720 --t 1"
)
P = 4 * 11_901_408_320 / 1e9
"""Gigabytes of FLUX's weights in fp32."""
UNIT = 4 * 339_831_296 / 1e9


def flagged(
    folder: Path, more: str, script: str = "flux", nodes: int = 1, upstream: str = "danceGRPO", gpu: float = 141
) -> PlanReport:
    file = folder / "launch.sh"
    start = f"torchrun --nnodes={nodes} --nproc_per_node=8"
    file.write_text(f"{start} fastvideo/train_grpo_{script}.py {FLAGS} {more}\n")
    return plan(upstream, file, machine=Machine(gpu, other_gb=10))


@pytest.mark.parametrize("upstream", ["danceGRPO", "mixGRPO"])
@pytest.mark.parametrize(
    ("flags", "nodes", "parameters", "gathered"),
    [
        ("", 1, P / 8, 4 * UNIT),
        ("--fsdp_sharding_startegy full", 2, P / 16, 4 * UNIT),
        ("--fsdp_sharding_startegy=hybrid_full", 2, P / 8, 4 * UNIT),
        ("--fsdp_sharding_startegy hybrid_full", 1, P / 8, 4 * UNIT),
        ("--fsdp_sharding_startegy hybrid_zero2", 2, P / 8, P + UNIT),
        ("--fsdp_sharding_startegy none", 1, P, P),
        ("--master_weight_type bf16", 1, P / 8, 2 * UNIT),
        ("--master_weight_type bf16 --fsdp_sharding_startegy hybrid_full", 2, P / 8, 2 * UNIT),
        ("--use_cpu_offload", 1, 0.0, 4 * UNIT),
    ],
)
def test_bytes_by_layout(
    tmp_path: Path, upstream: str, flags: str, nodes: int, parameters: float, gathered: float
) -> None:
    report = flagged(tmp_path, flags, nodes=nodes, upstream=upstream)
    assert report.ranks == 8 * nodes and report.memory
    parts = {name: size / 1e9 for name, size in report.memory.parts.items()}
    wanted = {"parameters": parameters, "gradients": parameters, "optimizer": 2 * parameters, "gathered": gathered}
    assert parts == pytest.approx(wanted | {"other": 10.0})


def test_weights_in_16_bits_are_reduced_as_upstream_does(tmp_path: Path) -> None:
    for flags, late in (("--master_weight_type bf16", False), ("--master_weight_type fp32", True)):
        report = flagged(tmp_path, flags)
        rows = [*report.table.rows, *report.table.apart]
        assert any(row.choice.sync != "upstream" for row in rows) == late
        assert any(row.choice.schedule == "reweight" for row in rows) == late
        assert ("LEANGRPO_SYNC=late" in report.table.refused) != late and report.table.recommended


def test_what_does_not_fit_unsharded(tmp_path: Path) -> None:
    """190 GB of weights, gradients and moments, and 48 of a backward's own gradient."""
    report = flagged(tmp_path, "--fsdp_sharding_startegy none")
    assert not report.table.rows and "Upstream itself does not fit" in report.render()
    assert report.to_json()["predicted"]["recommended"] is None
    assert flagged(tmp_path, "--fsdp_sharding_startegy none", gpu=288).table.recommended


def test_offloaded_weights_keep_nothing(tmp_path: Path) -> None:
    report = flagged(tmp_path, "--use_cpu_offload")
    found = report.to_json()
    assert (found["graphs_held"], found["ratio"], found["predicted"]["choices"]) == (0, 1.0, [])
    assert any(sharding.OFFLOADED in note for note in report.notes) and sharding.OFFLOADED in report.render()


def test_flags_that_a_script_does_not_read_do_not_matter(tmp_path: Path) -> None:
    """`wan_2_1` has no FSDP, and `qwenimage` sets up its own."""
    more = "--fsdp_sharding_startegy none --use_cpu_offload --master_weight_type bf16 --gradient_accumulation_steps 4"
    for script in ("wan_2_1", "qwenimage"):
        plain = flagged(tmp_path, "--gradient_accumulation_steps 4", script).to_json()
        given = flagged(tmp_path, more, script).to_json()
        for name in ("memory", "predicted", "ratio"):
            assert given[name] == plain[name], (script, name)


def test_values_that_are_none_and_those_that_are_not_known(tmp_path: Path) -> None:
    with pytest.raises(KitError, match="hybrid_zero2") as caught:
        flagged(tmp_path, "--fsdp_sharding_startegy zero3")
    assert caught.value.code == "LG504"
    for flags in ("--fsdp_sharding_startegy $S", "--master_weight_type $W"):
        report = flagged(tmp_path, flags)
        assert report.memory is None and flags.split()[0] in report.sized.why and report.table.recommended is None


def test_ranks_of_a_node() -> None:
    assert sharding.node_of(["torchrun", "--nnodes", "2", "--nproc-per-node=4"]) == 4
    assert sharding.node_of(["accelerate", "launch", "--num_machines", "4", "--num_processes", "32"]) == 8
    assert sharding.node_of(["accelerate", "launch"], 16, 2) == 8
    assert sharding.node_of(["mpirun", "-np", "16"]) is None
    assert sharding.node_of(["torchrun", "--nproc_per_node=$N"]) is None
    assert sharding.of("HYBRID_SHARD", 16, None, low=False, offloaded=False).why
    assert sharding.of("FULL_SHARD", 16, None, low=False, offloaded=False).shards == 16


def test_bytes_on_the_wire_of_a_hybrid() -> None:
    """Gathered and scattered among 8, then averaged over 2: 7/8 of each gather, 7/8 + 2 * 1/2 / 8 of each reduction."""
    assert Traffic(10, 3).bytes(1e9, 1e8, 16, Wire(), 8) == pytest.approx(0.875 * 40e9 + (0.875 + 0.125) * 1.2e9)
    assert Traffic(10, 3).bytes(1e9, 1e8, 8, Wire(), 1) == pytest.approx(2 * 7 / 8 * 1.2e9)  # nothing is gathered


MINE = """
import ml_collections
def mine():
    gpu_number = 8
    c = ml_collections.ConfigDict()
    c.sample = ml_collections.ConfigDict()
    c.train = ml_collections.ConfigDict()
    c.pretrained = ml_collections.ConfigDict()
    c.pretrained.model = "MODEL"
    c.sample.num_batches_per_epoch = 4
    c.sample.train_batch_size = ROWS
    c.sample.num_image_per_prompt = ROWS
    c.sample.num_steps = 10
    c.sample.guidance_scale = 4.5
    c.train.gradient_accumulation_steps = 2
    c.train.num_inner_epochs = 1
    c.train.timestep_fraction = 0.99
    c.train.beta = 0.0
    c.train.cfg = True
    c.use_lora = True
    c.mixed_precision = "PRECISION"
    c.resolution = 512
    return c
def get_config(name):
    return globals()[name]()
"""
FSDP = {"distributed_type": "FSDP", "num_processes": 8, "num_machines": 1}
SD3, FLUX = "stabilityai/stable-diffusion-3.5-medium", "black-forest-labs/FLUX.1-dev"


def launched(
    folder: Path, content: dict, script: str = "sd3", model: str = SD3, rows: int = 3, precision: str = "fp16",
    gpu: float = 80,
) -> PlanReport:  # fmt: skip
    for part in ("config", "scripts/accelerate_configs"):
        (folder / part).mkdir(parents=True, exist_ok=True)
    text = MINE.replace("MODEL", model).replace("ROWS", str(rows)).replace("PRECISION", precision)
    (folder / "config/grpo.py").write_text(text)
    (folder / f"scripts/train_{script}.py").touch()
    (folder / "mine.yaml").write_text(yaml.safe_dump(content))
    file = folder / "go.sh"
    file.write_text(
        f"accelerate launch --config_file mine.yaml scripts/train_{script}.py --config config/grpo.py:mine\n"
    )
    return plan("flowGRPO", file, machine=Machine(gpu))


@pytest.mark.parametrize(
    ("fsdp", "parameters", "gathered"),
    [
        ({}, 8.973 / 8, 2.243 * 2 + 0.0376),  # one unit
        ({"fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}, 8.973 / 8, 6 * 0.10151 + 0.0376),
        ({"fsdp_sharding_strategy": "NO_SHARD"}, 8.973, 2.243 * 2 + 0.0376),
        ({"fsdp_sharding_strategy": 2}, 8.973 / 8, 2.243 * 2 + 0.0376),
        ({"fsdp_version": 2, "fsdp_reshard_after_forward": True}, 8.973 / 8, 2.243 * 2 + 0.0376),
    ],
)
def test_accelerate_s_fsdp(tmp_path: Path, fsdp: dict, parameters: float, gathered: float) -> None:
    """Weights are spread; calls of several samples are not kept, since the update mixes batches."""
    report = launched(tmp_path, FSDP | {"fsdp_config": fsdp})
    parts = report.memory.parts if report.memory else {}
    assert parts["parameters"] / 1e9 == pytest.approx(parameters, rel=1e-3)
    assert parts["gathered"] / 1e9 == pytest.approx(gathered, rel=1e-3)
    assert report.rollout.graphs == 0 and report.rollout.ratio == 1.0 and not report.table.rows
    assert any("3 samples" in note and "mixes" in note for note in report.notes)
    assert report.instead and report.instead.rollout.graphs == 18


def test_single_samples_are_kept_under_accelerate_s_fsdp(tmp_path: Path) -> None:
    checkpointed = {"fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "fsdp_activation_checkpointing": True}
    report = launched(tmp_path, FSDP | {"fsdp_config": checkpointed}, rows=1)
    assert report.rollout.graphs == 18 and report.instead is None and report.checkpointed == 1.0
    assert report.memory and report.memory.graph and report.memory.graph < 1e9
    offloaded = launched(tmp_path, FSDP | {"fsdp_config": {"fsdp_offload_params": True}}, rows=1)
    assert offloaded.rollout.graphs == 0 and any(sharding.OFFLOADED in note for note in offloaded.notes)


@pytest.mark.parametrize(("gpu", "fits"), [(80, 0), (97, 1), (141, 2), (1000, 18)])
def test_what_ddp_would_give_in_place_of_deepspeed(tmp_path: Path, gpu: float, fits: int) -> None:
    """FLUX: 47.6 GB of weights on every rank, 41.4 of a graph of 3 samples; with what upstream's rounding needs."""
    report = launched(tmp_path, {"distributed_type": "DEEPSPEED", "num_processes": 8}, "flux", FLUX, 3, "bf16", gpu)
    assert report.rollout.ratio == 1.0 and report.memory is None
    found = json.loads(json.dumps(report.to_json(), allow_nan=False))["instead"]
    assert found["bytes_by_part"]["parameters"] / 1e9 == pytest.approx(P)
    assert found["graphs"] == 18 and found["graphs_that_fit"] == min(
        int((0.95 * gpu - P - 12 * 0.179306496) // 41.427), 18
    )
    assert found["graphs_that_fit"] >= min(fits, 1) and found["ratio_if_all_fit"] == pytest.approx(
        launched(tmp_path, {"distributed_type": "MULTI_GPU", "num_processes": 8}, "flux", FLUX, 3, "no").rollout.ratio
    )
    assert found["ratio"] == 1.0 if not fits else found["ratio"] > 1.0
    assert found["settings"] == ["export LEANGRPO_INPUTS=rounded", "export LEANGRPO_SCHEDULE=retain"]
    assert found["gpu_gb_for_upstream"] == pytest.approx((P + 12 * 0.179306496 + 41.427) / 0.95, rel=1e-3)
    assert ("on GPUs with more memory" in report.render()) == (gpu < found["gpu_gb_for_upstream"])
    written = yaml.safe_load(found["yaml"])
    assert (written["distributed_type"], written["num_processes"]) == ("MULTI_GPU", 8)


def test_the_file_that_is_printed_is_one_that_gains(tmp_path: Path) -> None:
    """What is printed is taken as the launch file's own, and then nothing else is printed."""
    zero = {"distributed_type": "DEEPSPEED", "num_processes": 8}
    first = launched(tmp_path, zero)
    assert first.instead and first.instead.file == "" and "with this as ddp.yaml:" in first.render()
    second = launched(tmp_path, yaml.safe_load(first.instead.yaml))
    assert second.instead is None and second.rollout.ratio == first.instead.rollout.ratio > 1.05
    upstreams = tmp_path / "scripts/accelerate_configs/multi_gpu.yaml"
    upstreams.write_text("distributed_type: MULTI_GPU\nnum_processes: 8\n")
    third = launched(tmp_path, zero)
    assert third.instead and third.instead.file == "scripts/accelerate_configs/multi_gpu.yaml"
    assert "in place of mine.yaml" in third.render() and "ddp.yaml" not in third.render()
