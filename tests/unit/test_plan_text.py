"""What `leangrpo plan` prints: it adds up, says a thing once, and names what it takes for granted; README shows it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from leangrpo_tools import data
from leangrpo_tools.errors import KitError
from leangrpo_tools.plan import Machine, plan
from leangrpo_tools.plan.choice import Case, Choice
from leangrpo_tools.plan.cost import Rollout
from leangrpo_tools.plan.held import hold
from leangrpo_tools.plan.memory import Memory
from leangrpo_tools.plan.networks import Model

FLAGS = (
    "--gradient_checkpointing --train_sp_batch_size 2 --gradient_accumulation_steps 12 --sampling_steps 16 --use_group "
    "--num_generations 12 --timestep_fraction 0.6 --h 720 --w 720 --selective_checkpointing 1.0"
)
WHOLE = "1 whole gradient (47.6 GB)"  # 11.9 billion weights in fp32


@pytest.fixture
def launch(tmp_path: Path) -> Path:
    """As DanceGRPO's finetune_flux_grpo_8gpus.sh."""
    file = tmp_path / "launch.sh"
    file.write_text(f"torchrun --nproc_per_node=8 fastvideo/train_grpo_flux.py {FLAGS}\n")
    return file


def text(launch: Path, gpu: float, other: float = 0.0) -> str:
    return plan("danceGRPO", launch, machine=Machine(gpu, other_gb=other)).render()


def rows(printed: str) -> list[str]:
    """Those of both tables."""
    return [line for line in printed.splitlines() if re.match(r"  (retain|reweight|recompute)\b", line)]


def test_rows_that_reduce_late_say_that_they_hold_a_whole_gradient(launch: Path) -> None:
    found = rows(text(launch, 141, 10))
    late = [row for row in found if " late " in row]
    assert len(late) >= 6 and {row.split()[0] for row in late} == {"retain", "reweight", "recompute"}
    assert all((WHOLE in row) == (" late " in row) for row in found)
    assert any("16 of 27 graphs (16.3 GB), " + WHOLE in row for row in late)
    [only] = [row for row in rows(text(launch, 80)) if "recompute" in row]
    assert only.endswith("  1 graph at a time (1.02 GB), " + WHOLE) and "all weights are gathered" not in text(
        launch, 80
    )
    assert "Of a whole gradient 1/8 is counted above" in text(launch, 80)
    assert "With retain all weights are gathered beside it (47.6 GB)." in text(launch, 141, 10)
    assert "whole gradient" not in text(launch, 60)


@pytest.mark.parametrize(("gpu", "other"), [(80, 0), (141, 10), (60, 2.5)])
def test_parts_and_what_is_left_add_up_to_the_gpu(launch: Path, gpu: float, other: float) -> None:
    [line] = [line for line in text(launch, gpu, other).splitlines() if f"left of {gpu}" in line]
    assert f"5 % kept free {0.05 * gpu:.3g}" in line
    parts, _, left = line.partition("; left of")
    figures = [float(part.split()[-1]) for part in parts.split(",")]
    assert sum(figures) + float(left.split(":")[1]) == pytest.approx(gpu, abs=0.1)


def test_recommendations_say_that_nothing_else_is_counted(launch: Path) -> None:
    alone = text(launch, 80)
    for name in ("Recommended", "Runner-up"):
        assert re.search(rf"^{name} \(ratio .*\), if nothing else is on the GPU \(--other-gb\):$", alone, re.MULTILINE)
    assert "the peak memory of a run without the kit, less parameters" in alone and "nvidia-smi" in alone
    told = text(launch, 80, 10)
    assert "if nothing else" not in told and "nvidia-smi" not in told


def test_a_budget_that_is_not_known_is_a_comment_of_its_own_line(launch: Path) -> None:
    lines = [line.strip() for line in text(launch, 80).splitlines()]
    place = lines.index("# export LEANGRPO_BUDGET_GB=46.7")
    assert lines[place - 1].startswith(
        "# The first rollout and its update keep nothing and measure the room on the GPU"
    )
    assert not any("#" in line[1:] for line in lines)
    assert "export LEANGRPO_BUDGET_GB=16.8" in [line.strip() for line in text(launch, 141, 10).splitlines()]


def test_a_setting_has_one_ratio(launch: Path) -> None:
    """Above the table only ratios that are labelled as those of compute alone."""
    for gpu, other in ((80, 0), (141, 10), (24, 0)):
        before = text(launch, gpu, other).split("Bytes per GPU")[0]
        assert "LEANGRPO_" not in before
        labelled = [line for line in before.splitlines() if re.search(r"\bratios?\b", line)]
        assert "of compute alone, if all graphs fit" in labelled[0]
        assert labelled[1] == "Flags of upstream that would change it (ratios of compute alone, if all graphs fit):"
        assert all(line.startswith("  ") and "gradient" in line for line in labelled[2:])
    assert "(ratios with communication, of what fits)" in text(launch, 80)


def test_where_upstream_does_not_fit_nothing_is_recommended(launch: Path) -> None:
    report = plan("danceGRPO", launch, machine=Machine(24))
    after = report.render().split("Bytes per GPU, by formula (GB):\n")[1].splitlines()
    assert after[3] == "Upstream itself does not fit, by formula: it lacks 7.46 GB of 24."
    assert "Recommended" not in report.render() and "Runner-up" not in report.render()
    assert json.loads(json.dumps(report.to_json()))["predicted"]["recommended"] is None


def test_a_reweighted_rollout_leaves_room_for_the_gradient_of_what_it_recomputes() -> None:
    """A gradient of 4 GB, 0.9 GB of graphs: with `late` samples that have no room add up 3.5 GB beside the others."""
    model = Model(parameters=1e9, patch=1, text_tokens=0, blocks=1, width=500)
    case = Case(Rollout(24, 24, 16, 9, 12, 3.0), 8, "fsdp", prompts=2, generations=12)

    def count(sync: str, room: float) -> float:
        return hold(case, Choice("reweight", sync=sync), Memory(model, 1e9, 8, 1e5, (room + 2e9) / 0.95)).gradients

    assert [count("upstream", room) for room in (10e9, 49.5e9)] == [2, 12]
    assert [count("late", room) for room in (7e9, 10e9, 11.6e9, 49.5e9)] == [0, 1, 2, 12]
    assert hold(case, Choice("reweight", sync="late"), None).gradients == 12


def test_a_preset_that_is_nowhere_is_answered_with_those_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    (tmp_path / "config").mkdir()
    (tmp_path / "config/grpo.py").write_text(
        "def mine():\n    return 1\n\n\ndef get_config(name):\n    return mine()\n"
    )
    monkeypatch.chdir(tmp_path)
    for given in ("nosuch", f"{tmp_path}/config/grpo.py:nosuch"):
        with pytest.raises(KitError, match="there is no preset nosuch") as caught:
            plan("flowGRPO", preset=given)
        assert caught.value.code == "LG508" and caught.value.cause == "it has mine"
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
    with pytest.raises(KitError, match="which script") as caught:
        plan("flowGRPO", preset="nosuch")
    assert caught.value.code == "LG502" and "there is no config/grpo.py here" in caught.value.cause
    assert all(name in caught.value.cause for name in ("general_ocr_sd3_4gpu", "pickscore_flux"))


def test_readme_shows_what_is_printed(launch: Path) -> None:
    """Each line of its excerpt, in this order."""
    readme = (data.data_root() / "README.md").read_text(encoding="utf-8")
    shown = readme.split("`--gpu-gb 141 --other-gb 10`")[1].split("\nand the runner-up")[0]
    excerpt = [line[4:] for line in shown.splitlines() if line.startswith("    ")]
    printed = iter(text(launch, 141, 10).splitlines())
    assert len(excerpt) > 10 and all(line in printed for line in excerpt)
    assert "5 % kept free" in shown and WHOLE in shown
