"""Which network `leangrpo plan` counts: the one that the path names, or none; and what is not known never fits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from leangrpo_tools.cli import umbrella
from leangrpo_tools.errors import KitError
from leangrpo_tools.plan import Machine, PlanReport, facts, named, networks, plan

FLAGS = (
    "--gradient_checkpointing --train_sp_batch_size 2 --gradient_accumulation_steps 12 --sampling_steps 16 --use_group "
    "--num_generations 12 --timestep_fraction 0.6 --h 720 --w 720 --t 1"
)
PATH = "--pretrained_model_name_or_path"
FLUX = 11_901_408_320


def planned(folder: Path, path: str | None, script: str = "flux", gpu: float = 141, **more: object) -> PlanReport:
    given = "" if path is None else f" {PATH} {path}"
    file = folder / "launch.sh"
    file.write_text(f"torchrun --nproc_per_node=8 fastvideo/train_grpo_{script}.py {FLAGS}{given}\n")
    return plan("danceGRPO", file, machine=Machine(gpu, graph_gb=more.pop("graph_gb", None)), **more)  # type: ignore[arg-type]


def preset(folder: Path, monkeypatch: pytest.MonkeyPatch, path: str, script: str, **entries: object) -> PlanReport:
    """FlowGRPO's, of 4 batches of 3 samples."""
    values: dict[str, object] = {
        "sample.num_batches_per_epoch": 4, "sample.train_batch_size": 3, "sample.num_image_per_prompt": 6,
        "sample.num_steps": 10, "sample.guidance_scale": 4.5, "train.gradient_accumulation_steps": 2,
        "train.num_inner_epochs": 1, "train.timestep_fraction": 0.99, "train.beta": 0.0, "train.cfg": True,
        "use_lora": True, "mixed_precision": "bf16", "resolution": 512, "sample.sample_time_per_prompt": 1,
        "sample.kl_reward": 0.0, "height": 240, "width": 416, "frames": 33,
    }  # fmt: skip
    lines = ["import ml_collections", "def mine():", "    c = ml_collections.ConfigDict()"]
    lines += [f"    c.{name} = ml_collections.ConfigDict()" for name in ("sample", "train", "pretrained")]
    lines += [f"    c.{name} = {value!r}" for name, value in (values | entries).items()]
    lines += [f"    c.pretrained.model = {path!r}", "    return c"]
    (folder / "config").mkdir(exist_ok=True)
    (folder / "config/grpo.py").write_text(
        "\n".join([*lines, "def get_config(n):", "    return globals()[n]()"]) + "\n"
    )
    monkeypatch.chdir(folder)
    return plan("flowGRPO", preset="mine", script=script, ranks=8, gpu_gb=80)


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("black-forest-labs/FLUX.1-dev", "flux.1-dev"),
        ("Black-Forest-Labs/flux.1-DEV/", "flux.1-dev"),
        ("FLUX.1-dev", "flux.1-dev"),
        ("black-forest-labs/FLUX.1-schnell", "flux.1-schnell"),
        ("black-forest-labs/FLUX.1-Krea-dev", "flux.1-krea-dev"),
        ("data/flux", "flux.1-dev"),
        ("./data/flux/", "flux.1-dev"),
        ("/hub/models--black-forest-labs--FLUX.1-schnell/snapshots/0123abc", "flux.1-schnell"),
        (None, "flux.1-dev"),
    ],
)
def test_paths_that_name_a_network(tmp_path: Path, path: str | None, name: str) -> None:
    report = planned(tmp_path, path)
    assert report.network.name == name and report.memory and report.table.recommended
    assert report.memory.model.parameters == networks.load()[name].parameters
    found = json.loads(json.dumps(report.to_json()))["network"]
    assert (found["name"], found["given"], found["unknown"]) == (name, path, None)
    assert found["from"] == PATH if path else PATH in found["from"]
    assert f"{name}, 11.9" in report.render().replace("11.89", "11.9")


@pytest.mark.parametrize(
    ("path", "help"),
    [
        ("./ckpt/foo", "flux.1-schnell"),
        ("/models/FLUX.1-dev", "--network flux.1-dev"),  # looks like it, and may hold anything
        ("someone/FLUX.1-dev", "--network flux.1-dev"),
        ("./FLUX.1-dev", "--network flux.1-dev"),
        ("old/data/flux", "flux.1-dev"),
        ("FLUX.1", "flux.1-dev"),
        ("black-forest-labs/FLUX.1-dev-finetuned", "flux.1-dev"),
        ("black-forest-labs/FLUX.2-dev", "flux.1-dev"),
        ("/hub/models--someone--FLUX.1-dev/snapshots/0123abc", "flux.1-dev"),
        ("$MODEL", "flux.1-dev"),
        ("${MODEL_DIR}/FLUX.1-dev", "flux.1-dev"),
        ("stabilityai/stable-diffusion-3.5-large", "flux.1-dev"),  # of another class than the script loads
        ("Wan-AI/Wan2.1-T2V-14B-Diffusers", "flux.1-dev"),
    ],
)
@pytest.mark.parametrize("gpu", [24, 141, 100000])
def test_paths_that_do_not_get_no_bytes_and_no_fits(tmp_path: Path, path: str, help: str, gpu: float) -> None:
    report = planned(tmp_path, path, gpu=gpu)
    assert not report.network.name and report.network.given == path and help in report.network.help
    text, found = report.render(), json.loads(json.dumps(report.to_json(), allow_nan=False))
    assert found["memory"] is None and found["predicted"]["bytes_by_part"] is None
    assert found["bytes_unknown"]["why"] and "--network" in found["bytes_unknown"]["help"]
    nothing_fits(report)
    assert path in text and report.sized.why in text and report.sized.help in text and "Bytes per GPU" not in text


def nothing_fits(report: PlanReport) -> None:
    """No row says that anything fits, and nothing is recommended, in text and JSON."""
    text, found = report.render(), report.to_json()["predicted"]
    rows = [*found["choices"], *found["choices_that_change_the_algorithm"], found["native"]]
    assert len(rows) > 1 and all(row["fits"] is None and row["held"]["fit"] is None for row in rows)
    assert found["recommended"] is None and found["runner_up"] is None
    assert not any("BUDGET" in line for row in rows for line in row["settings"])
    assert "graphs (" not in text and " fit: " not in text and "export" not in text
    assert text.count("whether they fit is not known") >= 1 and "Recommended: not known" in text


def test_the_option_wins_over_the_path(tmp_path: Path) -> None:
    for name in ("flux.1-dev", "FLUX.1-dev", "black-forest-labs/FLUX.1-dev"):
        report = planned(tmp_path, "./ckpt/foo", network=name)
        assert (report.network.name, report.network.source) == ("flux.1-dev", "--network")
        assert report.memory and report.memory.parts["parameters"] == pytest.approx(4 * FLUX / 8)
        assert report.table.recommended


@pytest.mark.parametrize(
    ("name", "fix"), [("flux.1-deev", "--network flux.1-dev,"), ("nothing", "flux.1-schnell"), ("sd3.5-large", "flux")]
)
def test_options_that_are_no_network_of_the_script(tmp_path: Path, name: str, fix: str) -> None:
    with pytest.raises(KitError) as caught:
        planned(tmp_path, None, network=name)
    assert caught.value.code == "LG504" and fix in caught.value.fix and caught.value.cause


def test_of_two_flags_the_one_that_the_script_prefers_counts(tmp_path: Path) -> None:
    report = planned(tmp_path, "data/HunyuanVideo --bestofn 24 --dit_model_name_or_path ./mine", "hunyuan")
    assert not report.network.name and report.network.given == "./mine"


def test_presets_name_their_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights on every rank, in fp32: 57 GB for Wan 14B where 1.3B has 5.68, 32 GB for SD3.5-large."""
    for path, script, name, gigabytes in (
        ("Wan-AI/Wan2.1-T2V-14B-Diffusers", "wan2_1", "wan2.1-t2v-14b", 57.15),
        ("hf_cache/Wan2.1-T2V-14B-Diffusers", "wan2_1", "wan2.1-t2v-14b", 57.15),
        ("Wan-AI/Wan2.1-T2V-1.3B-Diffusers", "wan2_1", "wan2.1-t2v-1.3b", 5.676),
        ("stabilityai/stable-diffusion-3.5-large", "sd3", "sd3.5-large", 32.23),
        ("stabilityai/stable-diffusion-3-medium-diffusers", "sd3", "sd3-medium", 8.113),
        ("stabilityai/stable-diffusion-3.5-medium", "sd3", "sd3.5-medium", 8.973),
    ):
        report = preset(tmp_path, monkeypatch, path, script)
        assert (report.network.name, report.network.source) == (name, "pretrained.model")
        assert report.memory and report.memory.parts["parameters"] / 1e9 == pytest.approx(gigabytes, rel=2e-4)
    for path in (
        "/local/Wan2.1-T2V-14B-Diffusers",
        "runwayml/stable-diffusion-v1-5",
        "Wan-AI/Wan2.2-T2V-A14B-Diffusers",
    ):
        report = preset(tmp_path, monkeypatch, path, "wan2_1")
        assert report.memory is None and path in report.sized.why
        nothing_fits(report)


def test_wan_s_exports_are_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under bf16 upstream rounds its inputs, and nothing is kept unless that is allowed."""
    path = "Wan-AI/Wan2.1-T2V-1.3B-Diffusers"
    found = preset(tmp_path, monkeypatch, path, "wan2_1").to_json()["predicted"]["recommended"]
    assert "export LEANGRPO_INPUTS=rounded" in found
    found = preset(tmp_path, monkeypatch, path, "wan2_1", mixed_precision="no").to_json()["predicted"]["recommended"]
    assert "export LEANGRPO_INPUTS=rounded" not in found


def test_graphs_that_no_formula_gives_can_be_measured(tmp_path: Path) -> None:
    """SkyReels without checkpointing: weights are known, a graph is not till it is said."""
    file = tmp_path / "launch.sh"
    flags = FLAGS.replace("--gradient_checkpointing ", "")
    file.write_text(f"torchrun --nproc_per_node=8 fastvideo/train_grpo_skyreels_i2v.py {flags}\n")
    report = plan("danceGRPO", file, machine=Machine(141))
    assert report.memory and report.memory.parts["parameters"] == pytest.approx(4 * 12_821_209_152 / 8)
    nothing_fits(report)
    report = plan("danceGRPO", file, machine=Machine(141, graph_gb=20.0))
    assert report.memory and report.memory.graph == 20e9 and report.table.recommended
    assert "of 108 graphs (100 GB)" in report.render()
    with pytest.raises(KitError) as caught:
        plan("danceGRPO", file, machine=Machine(141, graph_gb=0.0))
    assert caught.value.code == "LG504"


@pytest.mark.parametrize(
    ("gpu", "fits"), [(24, False), (80, False), (81, False), (85, False), (90, True), (141, True), (192, True)]
)
def test_a_native_call_has_a_graph_too(tmp_path: Path, gpu: float, fits: bool) -> None:
    """FLUX without checkpointing: 23.8 GB of states, 5.4 of units and a graph of 51.7 need 85.2 GB with what is kept
    free; nothing may be recommended that upstream itself has no room for."""
    file = tmp_path / "launch.sh"
    file.write_text(
        f"torchrun --nproc_per_node=8 fastvideo/train_grpo_flux.py {FLAGS.replace('--gradient_checkpointing', '')}\n"
    )
    report = plan("danceGRPO", file, machine=Machine(gpu))
    found = report.to_json()["predicted"]
    assert found["native"]["fits"] == fits and (fits or found["recommended"] is None)
    assert found["recommended"] or gpu < 141  # a graph or two gain less than 1 %
    assert ("Upstream itself does not fit" in report.render()) != fits
    for row in report.table.rows:
        assert report.memory and report.memory.left(gradients=row.choice.sync != "upstream") >= 0


# Gigabytes of one policy call's graph, traced over diffusers' own classes at their true configurations, and within how
# many per cent the formula gives them.
TRACED = {
    ("flux", "plain", 720): (52.0, 2), ("flux", "checkpointed", 720): (1.053, 4),
    ("flux_lora", "plain", 720): (33.3, 2), ("wan_2_1", "plain", 512): (9.62, 5),
}  # fmt: skip


@pytest.mark.parametrize(("script", "kind", "side"), TRACED)
def test_graphs_against_what_was_traced(tmp_path: Path, script: str, kind: str, side: int) -> None:
    flags = FLAGS.replace("720", str(side))
    flags = flags if kind == "checkpointed" else flags.replace("--gradient_checkpointing", "")
    file = tmp_path / "launch.sh"
    file.write_text(f"torchrun --nproc_per_node=8 fastvideo/train_grpo_{script}.py {flags}\n")
    memory = plan("danceGRPO", file).memory
    traced, per_cent = TRACED[script, kind, side]
    assert memory and memory.graph == pytest.approx(1e9 * traced, rel=per_cent / 100)


@pytest.mark.parametrize(("script", "rows", "traced"), [("sd3", 9, 45.9), ("flux", 1, 25.4)])
def test_graphs_of_presets_against_what_was_traced(tmp_path, monkeypatch, script, rows, traced) -> None:
    path = {"sd3": "stabilityai/stable-diffusion-3.5-medium", "flux": "black-forest-labs/FLUX.1-dev"}[script]
    entries = {"sample.train_batch_size": rows, "sample.num_image_per_prompt": rows}
    memory = preset(tmp_path, monkeypatch, path, script, **entries).memory
    assert memory and memory.graph == pytest.approx(1e9 * traced, rel=0.02)


def test_every_script_has_a_network_that_the_kit_knows() -> None:
    known = networks.load()
    for upstream in ("DanceGRPO", "MixGRPO", "flowGRPO"):
        for name, script in facts.load(upstream).scripts.items():
            if script.unreadable:
                continue
            assert script.network in known, name
            kind = known[script.network].kind
            for other in (*script.graphs, *script.folders.values()):
                assert known[other].kind == kind, (name, other)
    repositories = [repository.lower() for network in known.values() for repository in network.repositories]
    assert len(repositories) == len(set(repositories))
    assert all(named.by_path(r, "", n.kind, {}).network is n for n in known.values() for r in n.repositories)


def test_command_line(tmp_path: Path) -> None:
    planned(tmp_path, "./ckpt/foo")
    words = ["plan", "danceGRPO", "--launch", str(tmp_path / "launch.sh")]
    assert "--network flux.1-dev |" in " ".join(CliRunner().invoke(umbrella(), words).stdout.split())
    done = CliRunner().invoke(umbrella(), [*words, "--network", "flux.1-dev", "--graph-gb", "2"])
    assert done.exit_code == 0 and "2 GB each graph" in done.stdout and "--network" in done.stdout
