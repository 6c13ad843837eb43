"""Fixes of the errors of `leangrpo plan`, followed as they are printed."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from support.fixes import Shell, follows

from leangrpo_tools import data

FLAGS = """--train_sp_batch_size 2 --gradient_accumulation_steps 12 --sampling_steps 16 --num_generations 12 \\
    --use_group --gradient_checkpointing --timestep_fraction 0.6"""
FLUX = f"torchrun --nproc_per_node=8 fastvideo/train_grpo_flux.py \\\n    {FLAGS}\n"
PLAN = ("leangrpo", "plan", "danceGRPO")
PRESETS = """\
import os

import ml_collections


def mine():
    made = ml_collections.ConfigDict()
    made.sample, made.train = ml_collections.ConfigDict(), ml_collections.ConfigDict()
    made.sample.num_batches_per_epoch, made.sample.train_batch_size = 4, 3
    made.sample.num_image_per_prompt, made.sample.num_steps = 6, 10
    made.sample.guidance_scale = 4.5
    made.train.gradient_accumulation_steps, made.train.num_inner_epochs = 2, 1
    made.train.timestep_fraction, made.train.beta, made.train.cfg = 0.99, 0.0, True
    made.use_lora, made.mixed_precision, made.resolution = True, "fp16", 512
    return made


def get_config(name):
    return globals()[name]()
"""
PRESET = ("leangrpo", "plan", "flowGRPO", "--script", "sd3", "--ranks", "8")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a launch file and a config that can be planned."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.sh").write_text(FLUX)
    (tmp_path / "config").mkdir()
    (tmp_path / "config/grpo.py").write_text(PRESETS)
    return tmp_path


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


@follows("LG501")
def test_no_launch_file(here: Path, shell: Shell) -> None:
    said = shell.fails("LG501", *PLAN)
    assert said.options("--launch") == ["--launch", "PATH/TO/FILE"] and "scripts/" in said.fix
    assert shell.fails("LG501", *PLAN, "--launch", "rum.sh").options("--launch")[1].endswith(".sh")
    shell.works(*PLAN, "--launch", "run.sh")


@follows("LG502")
def test_a_launch_file_of_something_else(here: Path, shell: Shell) -> None:
    edit(here / "run.sh", "train_grpo_flux.py", "serve.py")
    said = shell.fails("LG502", *PLAN, "--launch", "run.sh")
    program = re.search(r"flux \((\S+?)\)", said.fix)
    assert program
    edit(here / "run.sh", "fastvideo/serve.py", program[1])
    shell.works(*PLAN, "--launch", "run.sh")


@follows("LG503")
def test_ranks_that_are_not_known(here: Path, shell: Shell) -> None:
    edit(here / "run.sh", "nproc_per_node=8", "nproc_per_node=$GPUS")
    said = shell.fails("LG503", *PLAN, "--launch", "run.sh")
    assert said.options("--ranks") == ["--ranks", "N"]
    shell.works(*PLAN, "--launch", "run.sh", "--ranks", "8")


@follows("LG504")
@pytest.mark.parametrize("value", ["$STEPS", "sixteen"])
def test_a_flag_whose_value_is_not_known(here: Path, shell: Shell, value: str) -> None:
    edit(here / "run.sh", "--sampling_steps 16", f"--sampling_steps {value}")
    said = shell.fails("LG504", *PLAN, "--launch", "run.sh")
    option, given = said.options("--set")
    assert given == "sampling_steps=VALUE"
    shell.works(*PLAN, "--launch", "run.sh", option, given.replace("VALUE", "16"))


@follows("LG505")
@pytest.mark.parametrize(
    ("old", "flag"),
    [
        ("--gradient_accumulation_steps 12", "--gradient_accumulation_steps 1000"),
        ("--sampling_steps 16", "--sampling_steps 1"),
    ],
)
def test_a_launch_that_makes_no_update(here: Path, shell: Shell, old: str, flag: str) -> None:
    edit(here / "run.sh", old, flag)
    said = shell.fails("LG505", *PLAN, "--launch", "run.sh")
    name, wrong = flag.split()
    edit(here / "run.sh", f"{name} {wrong}", " ".join(said.options(name)))
    shell.works(*PLAN, "--launch", "run.sh")


@follows("LG506")
def test_a_script_that_cannot_be_planned(here: Path, shell: Shell) -> None:
    said = shell.fails("LG506", "leangrpo", "plan", "trl-ddpo", "--launch", "run.sh")
    assert "updates per rollout" in said.fix and "ddpo" in shell.paste("leangrpo list").out
    shell.works(*PLAN, "--launch", "run.sh")  # one of those that the fix names
    assert "DanceGRPO" in said.fix


@follows("LG507")
def test_planning_data_that_is_damaged(here: Path, shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    root = here / "kit"
    shutil.copytree(data.data_root() / "patches", root / "patches", ignore=shutil.ignore_patterns("tree"))
    shutil.copy(data.data_root() / "upstreams.lock", root)
    monkeypatch.setattr(data, "data_root", lambda: root)
    path = root / "patches/DanceGRPO/plan.yaml"
    before = path.read_text()
    path.write_text(before.replace("scripts:", "scirpts:", 1))
    said = shell.fails("LG507", *PLAN, "--launch", "run.sh")
    assert str(path) in said.what and "correct the file" in said.fix
    path.write_text(before)
    shell.works(*PLAN, "--launch", "run.sh")


@follows("LG508")
def test_a_preset_that_is_not_there(here: Path, shell: Shell) -> None:
    said = shell.fails("LG508", *PRESET, "--preset", "config/grpo.py:yours")
    assert said.options("--preset") == ["--preset", "FILE:NAME"] and "mine" in said.err
    shell.works(*PRESET, "--preset", "config/grpo.py:mine")


@follows("LG509")
def test_an_entry_that_only_a_run_knows(here: Path, shell: Shell) -> None:
    edit(
        here / "config/grpo.py", "made.sample.num_steps = 6, 10", 'made.sample.num_steps = 6, int(os.environ["STEPS"])'
    )
    said = shell.fails("LG509", *PRESET, "--preset", "config/grpo.py:mine")
    option, value = said.options("--set")
    shell.works(*PRESET, "--preset", "config/grpo.py:mine", option, value.replace("VALUE", "10"))
