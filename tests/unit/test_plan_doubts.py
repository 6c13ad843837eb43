"""What a launch file leaves open: it is asked for by an option that answers it, and no default stands in for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from leangrpo_tools.errors import KitError
from leangrpo_tools.plan import PlanReport, accelerate, launch, plan, slurm

RUN = "fastvideo/train_grpo_flux.py"
SIZES = "--train_sp_batch_size 2 --gradient_accumulation_steps 12 --sampling_steps 16"
GROUPS = "--use_group --num_generations 12 --timestep_fraction 0.6"
GO = "torchrun --nproc_per_node=8"


def planned(folder: Path, text: str, upstream: str = "DanceGRPO", **asked) -> PlanReport:
    file = folder / "start.sh"
    file.write_text(text.replace("{run}", f"{RUN} {SIZES} {GROUPS}"))
    return plan(upstream, file, **asked)


def refused(folder: Path, text: str, upstream: str = "DanceGRPO", **asked) -> KitError:
    with pytest.raises(KitError) as caught:
        planned(folder, text, upstream, **asked)
    return caught.value


RANKS = {
    "torchrun's variables": ("export PET_NPROC_PER_NODE=8 PET_NNODES=2\ntorchrun {run}", 16),
    "of this command": ("PET_NPROC_PER_NODE=8 torchrun {run}", 8),
    "by env": ("env PET_NPROC_PER_NODE=8 torchrun {run}", 8),
    "options before variables": ("export PET_NPROC_PER_NODE=8\ntorchrun --nproc_per_node=4 {run}", 4),
    "nice": ("mpirun -np 8 nice -n 10 python {run}", 8),
    "taskset": ("mpirun -np 8 --mca btl tcp,self taskset -c 4 python {run}", 8),
    "numactl": ("srun --nodes=2 --ntasks-per-node=8 numactl -N 1 -m 1 python {run}", 16),
    "xvfb-run": ("srun -n 8 xvfb-run -n 99 python {run}", 8),
    "job": ("#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=8\nsrun python {run}", 16),
    "tasks of a job": ("#SBATCH -n 6\nsrun python {run}", 6),
    "nodes of a job": ("#SBATCH -N 4\ntorchrun --nnodes=${SLURM_NNODES:-1} --nproc_per_node=8 {run}", 32),
    "job in a string": ("#SBATCH -N4\nsrun bash -c 'torchrun --nnodes=${SLURM_JOB_NUM_NODES:-1} {run}'", 4),
    "GPUs": ("#SBATCH --gres=gpu:h100:4\ntorchrun --nproc_per_node=$SLURM_GPUS_ON_NODE {run}", 4),
    "tools that read": (f"sha256sum {RUN}\npython -m py_compile {RUN} || exit\nwc -l {RUN}\n{GO} {{run}}", 8),
    "same in branches": (f"if a; then {GO} {{run}}\nelse {GO} --standalone {{run}}; fi", 8),
}  # fmt: skip


@pytest.mark.parametrize("name", RANKS)
def test_ranks(name: str, tmp_path: Path) -> None:
    text, expected = RANKS[name]
    report = planned(tmp_path, text)
    assert (report.ranks, report.rollout.samples, report.rollout.updates) == (expected, 24, 2)


NO_RANKS = {
    "torchrun's variable from outside": "export PET_NPROC_PER_NODE=$1\ntorchrun {run}",
    "torchrun's variable, perhaps": "if a; then export PET_NPROC_PER_NODE=8; fi\ntorchrun {run}",
    "several programs": "mpirun -np 8 -host a python {run} : -np 8 -host b python {run}",
    "own wrapper": "mpirun ./bind.sh -np 8 python {run}",
    "SLURM's default": "torchrun --nnodes=${SLURM_NNODES:-1} --nproc_per_node=8 {run}",
    "in a function": "go() { torchrun --nnodes=${SLURM_NNODES:-1} --nproc_per_node=8 {run}; }",
    "another entry of the job": "#SBATCH -N 2\ntorchrun --nproc_per_node=${SLURM_GPUS_ON_NODE:-8} {run}",
    "job of another size": "#SBATCH --ntasks=4\nsrun -N 2 --ntasks-per-node=8 python {run}",
    "range": "#SBATCH --nodes=2-4\ntorchrun --nnodes=${SLURM_NNODES:-1} --nproc_per_node=8 {run}",
}


@pytest.mark.parametrize("name", NO_RANKS)
def test_ranks_that_are_open(name: str, tmp_path: Path) -> None:
    err = refused(tmp_path, NO_RANKS[name])
    assert err.code == "LG503" and (err.fix or "").endswith("--ranks N")
    assert planned(tmp_path, NO_RANKS[name], ranks=6).ranks == 6


def test_a_job_without_header_has_no_numbers() -> None:
    assert slurm.variables("echo $SLURM_NNODES ${SLURM_JOB_ID}") == {"SLURM_NNODES": None, "SLURM_JOB_ID": None}
    found = slurm.variables("#SBATCH --job-name=x --nodes 2 --ntasks-per-node=4\n#SBATCH --gpus-per-node=a:8\n")
    assert found["SLURM_NTASKS"] == "8" and found["SLURM_NNODES"] == "2" and found["SLURM_GPUS_PER_NODE"] == "8"


HIDING = ['"$@"', "$(cat args.txt)", "${TRAIN_ARGS}", '"${LIST[@]}"', "--$NAME=1"]


@pytest.mark.parametrize("word", HIDING)
def test_hidden_words_make_flags_unknown_that_are_not_written(word: str, tmp_path: Path) -> None:
    """Each that a plan needs is named once, and the fix leads to the plan."""
    text = f"mapfile LIST\n{GO} {RUN} --sampling_steps 16 --gradient_checkpointing {word}"
    err = refused(tmp_path, text)
    assert err.code == "LG504" and "may set it" in err.what
    wanted = {"train_sp_batch_size": "2", "num_generations": "12", "use_group": "true"}
    wanted |= {"gradient_accumulation_steps": "12", "timestep_fraction": "0.6", "selective_checkpointing": "1"}
    assert all(f"--set {name}=" in (err.fix or "") for name in wanted) and "sampling_steps" not in (err.fix or "")
    report = planned(tmp_path, text, overrides=[f"{name}={value}" for name, value in wanted.items()])
    assert (report.rollout.samples, report.rollout.updates, report.rollout.trained_steps) == (24, 2, 9)
    assert report.network.network is None and report.memory is None and not report.defaults
    assert report.overridden == wanted and any("are not known" in note for note in report.notes)


def test_a_word_that_may_be_flags_counts_as_one_of_its_ways(tmp_path: Path) -> None:
    """Both of them: that value, or unknown. One of two: unknown where nothing is written before."""
    both = "if a; then G='--num_generations 6'; else G='--num_generations 12'; fi\n"
    one = "G=''\nif a; then G='--num_generations 12'; fi\n"
    rest = f"{GO} {RUN} {SIZES} --use_group $G"
    for text in (both, one):
        err = refused(tmp_path, text + rest)
        assert err.code == "LG504" and "--set num_generations=" in (err.fix or "")
        assert planned(tmp_path, text + rest, overrides=["num_generations=6"]).rollout.samples == 12
    assert planned(tmp_path, one + f"{GO} {{run}} $G").rollout.samples == 24
    assert planned(tmp_path, one + f"{GO} {RUN} {SIZES} $G {GROUPS}").rollout.samples == 24


def test_set_takes_flags_of_launch_files(tmp_path: Path) -> None:
    given = ["--gradient_accumulation_steps=1", "use_group=false"]
    assert planned(tmp_path, f"{GO} {{run}}", overrides=given).rollout.samples == 2
    for given in ("use_group=maybe", "num_generation5=3", "num_generations=many", "num_generations"):
        assert refused(tmp_path, f"{GO} {{run}}", overrides=[given]).code == "LG504"


MIX = f"{GO} {RUN} {SIZES} --use_group --num_generations 12 --group_size 4 --training_strategy"


@pytest.mark.parametrize("given", ["$1", "${STRATEGY}", "$s"])
def test_a_flag_that_is_compared_is_not_taken_for_another_value(given: str, tmp_path: Path) -> None:
    text = f"case $X in all) s=all;; *) s=part;; esac\n{MIX} {given}"
    err = refused(tmp_path, text, "MixGRPO")
    assert err.code == "LG504" and "--set training_strategy=" in (err.fix or "")
    part = planned(tmp_path, text, "MixGRPO", overrides=["training_strategy=part"])
    every = planned(tmp_path, text, "MixGRPO", overrides=["training_strategy=all"])
    assert (part.rollout.trained_steps, every.rollout.trained_steps) == (4, 15)


BRANCHES = {
    "if": ("if [ $D -eq 1 ]; then\n{one}\nelse\n{two}\nfi", 2, 4),
    "case": ("case $D in\na) {one};;\nb) {two};;\nesac", 2, 3),
    "exit": ("[ -n $D ] && {one} && exit\n{two}", 1, 2),
    "one is wrong": ("if false; then\n{one} --num_generations 1 --train_sp_batch_size 1\nfi\n{two}", 2, 4),
}


@pytest.mark.parametrize("name", BRANCHES)
def test_commands_that_differ_are_chosen_by_line(name: str, tmp_path: Path) -> None:
    text, one, two = BRANCHES[name]
    text = text.replace("{one}", "torchrun --nproc_per_node=1 {run} --num_generations 6")
    text = text.replace("{two}", f"{GO} {{run}}")
    err = refused(tmp_path, text)
    assert err.code == "LG502" and (err.fix or "").endswith(f"--line {one} | {two}")
    assert (report := planned(tmp_path, text, line=two)).ranks == 8 and report.line == two
    err = refused(tmp_path, text, line=99)
    assert err.code == "LG502" and (err.fix or "").endswith(f"--line {one}")


@pytest.mark.parametrize(
    ("text", "fix"),
    [
        ("export G=6\nsingularity exec x.sif bash scripts/train.sh", "--launch scripts/train.sh"),
        ("bash -s 4 6 < train.txt", "copy of the launch file"),
        ('echo "$CMD" | tmux', "copy of the launch file"),
    ],
)
def test_a_command_out_of_sight(text: str, fix: str, tmp_path: Path) -> None:
    err = refused(tmp_path, text)
    assert err.code == "LG502" and fix in (err.fix or "")


CONFIG = "accelerate launch --config_file acc.yaml {run}"
EDITS = [
    "sed -i s/8/4/ acc.yaml",
    "F=acc.yaml\nsed -i s/8/4/ $F",
    "cat > acc.yaml <<E\nnum_processes: 4\nE",
    "F=acc.yaml; echo x >> $F",
    "echo x | tee -a acc.yaml",
    "cp other/acc.yaml .",
    "cp 4.yaml acc.yaml",
    "python make.py --out acc.yaml",
    "yq -i .num_processes=4 acc.yaml",
    "cd /elsewhere",
    "cd $PLACE",
]


@pytest.mark.parametrize("edit", EDITS)
def test_a_configuration_that_the_launch_file_changes(edit: str, tmp_path: Path) -> None:
    (tmp_path / "acc.yaml").write_text("distributed_type: MULTI_GPU\nnum_processes: 8\n")
    assert refused(tmp_path, f"{edit}\n{CONFIG}").code == "LG503"


@pytest.mark.parametrize("use", ["cat acc.yaml", "cp acc.yaml out/", 'cd "$(dirname "$0")"', "sed s/8/4/ acc.yaml"])
def test_a_configuration_that_is_only_read(use: str, tmp_path: Path) -> None:
    (tmp_path / "acc.yaml").write_text("distributed_type: MULTI_GPU\nnum_processes: 8\n")
    assert planned(tmp_path, f"{use}\n{CONFIG}").ranks == 8


def test_a_training_script_that_the_launch_file_edits_has_no_known_defaults(tmp_path: Path) -> None:
    err = refused(tmp_path, f"sed -i s/16/8/ {RUN}\n{GO} {RUN} --sampling_steps 16")
    assert err.code == "LG504" and "line 1" in err.what


def started(**exports: str) -> accelerate.Started | None:
    return accelerate.read(launch.Training("sd3", 1, ["torchrun"], [], [], exports=exports), Path())


def test_accelerate_is_told_by_variables() -> None:
    found = started(ACCELERATE_USE_DEEPSPEED="true")
    assert found and found.deepspeed
    found = started(ACCELERATE_USE_FSDP="1", FSDP_SHARDING_STRATEGY="NO_SHARD")
    assert found and found.kind == "FSDP" and found.fsdp == {"fsdp_sharding_strategy": "NO_SHARD"}
    found = started(ACCELERATE_USE_FSDP="$X")
    assert found and found.kind is None and "not known" in found.note
    assert started(ACCELERATE_USE_DEEPSPEED="false") is None and started() is None
    with pytest.raises(KitError) as caught:
        started(ACCELERATE_GRADIENT_ACCUMULATION_STEPS="3")
    assert caught.value.code == "LG504"
