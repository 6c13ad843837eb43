"""Launch files of many kinds: how many ranks they start, with which script and flags, or that it is not known."""

from __future__ import annotations

import csv
import os
from pathlib import Path

import pytest

from leangrpo_tools.errors import KitError
from leangrpo_tools.plan import PlanReport, accelerate, launch, plan

RUN = "fastvideo/train_grpo_flux.py"
FLAGS = (
    "--gradient_checkpointing --train_sp_batch_size 2 --gradient_accumulation_steps 12 --sampling_steps 16 --use_group "
    "--num_generations 12 --timestep_fraction 0.6"
)


def planned(folder: Path, text: str, **asked) -> PlanReport:
    """`{run}` stands for the script and its flags, `{script}` for the script, `{flags}` for the flags."""
    file = folder / "start.sh"
    file.write_text(text.replace("{run}", f"{RUN} {FLAGS}").replace("{script}", RUN).replace("{flags}", FLAGS))
    return plan("DanceGRPO", file, **asked)


def started(words: list[str], **others) -> launch.Training:
    return launch.Training("flux", 1, words, [], [], **others)


KNOWN = {
    "plain": ("torchrun --nproc_per_node=8 {run}", 8),
    "arithmetic": ("A=3\ntorchrun --nnodes=$((A-1)) --nproc_per_node $(( 2 * 2 )) {run}", 8),
    "let": ("let W=2*3\n((W += 2))\ntorchrun --nproc_per_node=$W {run}", 8),
    "port": ("torchrun --nproc_per_node=8 --master_port=$((20000 + RANDOM % 9)) --rdzv_id $JOB {run}", 8),
    "value elsewhere": ("torchrun --nproc_per_node=8 {run} --seed $((7*SEED)) --output_dir out/$NAME", 8),
    "words": ('MORE="{flags}"\ntorchrun --nproc_per_node=8 {script} $MORE', 8),
    "launcher in a variable": ('GO="torchrun --nproc_per_node 8"\n$GO {run}', 8),
    "array": ("OPT=(--nnodes 2)\nOPT+=(--nproc_per_node=4)\ntorchrun ${OPT[@]} {run}", 8),
    "everything in an array": ('CMD=(torchrun --nproc_per_node=8 {run})\nexec "${CMD[@]}"', 8),
    "default": ("torchrun --nproc_per_node=${GPUS:-8} {run}", 8),
    "default assigned": (": ${GPUS:=8}\ntorchrun --nproc_per_node=$GPUS {run}", 8),
    "script in a variable": ("S={script}\ntorchrun --nproc_per_node=8 $S {flags}", 8),
    "function": ('go() { local n=$1; shift; torchrun --nproc_per_node=$n "$@"; }\ngo 8 {run}', 8),
    "function never called": ("go() {\ntorchrun --nproc_per_node=8 {run}\n}", 8),
    "branch": ("if [ -n $X ]; then\ntorchrun --nproc_per_node=8 {run}\nfi", 8),
    "usage": ('if [ $# -lt 1 ]; then N=1; echo usage; exit 1; fi\nN=${N:-8}\ntorchrun --nproc_per_node=$N {run}', 8),
    "same in both branches": ("if a; then N=8; else N=8; fi\ntorchrun --nproc_per_node=$N {run}", 8),
    "loop": ("for S in 1 2 3; do\ntorchrun --nproc_per_node=8 {run} --seed $S\ndone", 8),
    "bash -c": ("export N=4\nsrun -N2 bash -c 'torchrun --nnodes=2 --nproc_per_node=$N {run}'", 8),
    "double quotes": ('srun sh -c "torchrun --nnodes=2 --nproc_per_node=4 --node_rank=\\$SLURM_NODEID {run}"', 8),
    "here-document": ("ssh host <<EOF\ntorchrun --nproc_per_node=8 {run}\nEOF", 8),
    "wrapped job": ('sbatch --nodes=1 --wrap="torchrun --nproc_per_node=8 {run}"', 8),
    "eval": ('C="torchrun --nproc_per_node=8 {run}"\neval $C', 8),
    "environment": ("env A=1 CUDA_VISIBLE_DEVICES=0 nohup torchrun --nproc_per_node=8 {run} > log 2>&1 &", 8),
    "module": ("python3 -u -m torch.distributed.launch --nproc_per_node 8 --use_env {run}", 8),
    "abbreviated": ("torchrun --nnode 2 --nproc 4 {run}", 8),
    "deepspeed": ("deepspeed --num_gpus=8 {run}", 8),
    "deepspeed nodes": ("deepspeed --num_nodes 2 --num_gpus 4 --hostfile h {run}", 8),
    "deepspeed include": ("deepspeed --include localhost:0,1,2,3 {run}", 4),
    "mpirun": ("mpirun -np 8 -H a:4,b:4 -x PATH --bind-to none python {run}", 8),
    "mpiexec": ("mpiexec -n 8 python -u {run}", 8),
    "srun": ("srun --ntasks=8 --gpus-per-task=1 python {run}", 8),
    "srun nodes": ("srun -N2 --ntasks-per-node 4 python {run}", 8),
    "accelerate": ("N=2\naccelerate launch --multi_gpu --num_machines $N --num_processes $((N*4)) {run}", 8),
    "python": ("CUDA_VISIBLE_DEVICES=0 time python -u -W ignore {run}", 1),
    "torchrun alone": ("torchrun --standalone {run}", 1),
}  # fmt: skip


@pytest.mark.parametrize("name", KNOWN)
def test_ranks_that_are_written(name: str, tmp_path: Path) -> None:
    text, expected = KNOWN[name]
    report = planned(tmp_path, text)
    assert (report.ranks, report.rollout.samples, report.rollout.updates) == (expected, 24, 2)


UNKNOWN = {
    "unset": "torchrun $OPTS {run}",
    "unset beside others": "torchrun --nproc_per_node=8 $OPTS {run}",
    "unset array": 'torchrun --nproc_per_node=8 "${OPTS[@]}" {run}',
    "arguments": 'torchrun "$@" {run}',
    "before the launcher": "$SRUN torchrun --nproc_per_node=8 {run}",
    "after a switch": "torchrun --nproc_per_node=8 --standalone $OPTS {run}",
    "name of an option": "torchrun --$WHAT=2 --nproc_per_node=8 {run}",
    "branches": "if a; then N=4; else N=8; fi\ntorchrun --nproc_per_node=$N {run}",
    "case": "N=8\ncase $H in a*) N=4;; esac\ntorchrun --nproc_per_node=$N {run}",
    "and": "N=8\n[ -n $X ] && N=4\ntorchrun --nproc_per_node=$N {run}",
    "loop": "N=1\nwhile a; do N=$((N*2)); done\ntorchrun --nproc_per_node=$N {run}",
    "values of a loop": "for N in 4 8; do torchrun --nproc_per_node=$N {run}; done",
    "sourced": "N=8\nsource settings.env\ntorchrun --nproc_per_node=$N {run}",
    "set when sourced": "source settings.env\ntorchrun --nproc_per_node=${N:-8} {run}",
    "exported from elsewhere": "N=8\nexport $(cat .env)\ntorchrun --nproc_per_node=$N {run}",
    "eval": 'N=8\neval "$SETTINGS"\ntorchrun --nproc_per_node=$N {run}',
    "read": "N=8\nread N\ntorchrun --nproc_per_node=$N {run}",
    "not exported": "N=8\nbash -c 'torchrun --nproc_per_node=$N {run}'",
    "another machine": "export N=8\nssh h 'cd x; torchrun --nproc_per_node=$N {run}'",
    "given by bash": "torchrun --nproc_per_node=${SECONDS:-8} {run}",
    "elastic": "torchrun --nnodes=1:4 --nproc_per_node=8 {run}",
    "auto": "torchrun --nproc_per_node=auto {run}",
    "devices": "torchrun --nproc_per_node=$(nvidia-smi -L | wc -l) {run}",
    "srun without counts": "srun python {run}",
    "srun range": "srun -N 2-4 --ntasks-per-node=4 python {run}",
    "srun of torchrun without nodes": "srun -N2 torchrun --nproc_per_node=4 {run}",
    "mpirun without count": "mpirun --hostfile h python {run}",
    "mpirun of another launcher": "mpirun -np 2 wrap.sh python helper.py {run}",
    "deepspeed hosts": "deepspeed --hostfile h {run}",
    "deepspeed slots": "deepspeed --include host1@host2 {run}",
    "wrapper": "./start.sh {run}",
    "wrapped python": "wrapper python {run}",
    "another script": "python helper.py {run}",
    "by hand": "for R in 0 1; do RANK=$R WORLD_SIZE=2 python {run} & done",
    "variable python": "$PY {run}",
    "accelerate without count": "accelerate launch {run}",
    "not understood": "N=8\nif a; then N=4\ntorchrun --nproc_per_node=$N {run}",
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_ranks_that_are_not_written(name: str, tmp_path: Path) -> None:
    with pytest.raises(KitError) as caught:
        planned(tmp_path, UNKNOWN[name])
    assert caught.value.code == "LG503" and caught.value.fix.endswith("--ranks N"), str(caught.value)
    report = planned(tmp_path, UNKNOWN[name], ranks=6)
    assert (report.ranks, report.rollout.samples, report.rollout.updates) == (6, 24, 2)


@pytest.mark.parametrize(
    ("text", "flag", "line"),
    [
        ("if a; then G=6; else G=12; fi", "$G", "line 1"),
        ("\nG=12\nfor i in $L; do G=6; done", "$G", "line 3"),
        ("G=$(cat n)", "$G", "line 1"),
        ("", "$G", ""),
        ("if a; then M='--num_generations 6'; else M='--num_generations 12'; fi", "$M", "line 1"),
    ],
)
def test_a_value_that_is_needed_and_not_known(text: str, flag: str, line: str, tmp_path: Path) -> None:
    given = flag if flag == "$M" else f"--num_generations {flag}"
    flags = FLAGS.replace("--num_generations 12", given)
    with pytest.raises(KitError) as caught:
        planned(tmp_path, f"{text}\ntorchrun --nproc_per_node=8 {{script}} {flags}")
    assert caught.value.code == "LG504" and "--num_generations" in caught.value.what and flag in caught.value.what
    assert line in caught.value.cause


def test_flags_that_may_be_added_are_named(tmp_path: Path) -> None:
    text = 'E=()\nif [ -n "$X" ]; then E+=(--gradient_accumulation_steps "$X"); fi'
    text += '\ntorchrun --nproc_per_node=8 {run} "${E[@]}"'
    report = planned(tmp_path, text)
    assert report.rollout.updates == 2
    assert any("--gradient_accumulation_steps $X" in note and "nothing" in note for note in report.notes)


def test_defaults_that_the_environment_may_change_are_named(tmp_path: Path) -> None:
    notes = planned(tmp_path, "torchrun --nproc_per_node=${GPUS:-8} {run}").notes
    assert any("GPUS=8" in note for note in notes)


def test_a_renamed_script(tmp_path: Path) -> None:
    text = "python prepare.py\ntorchrun --nproc_per_node=8 mine/train_grpo_flux_v2.py {flags}"
    with pytest.raises(KitError) as caught:
        planned(tmp_path, text)
    assert caught.value.code == "LG502" and "mine/train_grpo_flux_v2.py" in caught.value.cause
    assert "--script flux" in caught.value.fix
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/train_grpo_flux_v2.py").write_text('p.add_argument("--num_generations", type=int, default=6)')
    report = planned(tmp_path, text.replace("{flags}", FLAGS.replace("--num_generations 12", "")), script="flux")
    assert (report.script, report.ranks, report.rollout.samples) == ("flux", 8, 12)
    assert report.defaults_from.endswith("train_grpo_flux_v2.py")
    report = planned(tmp_path, "torchrun --nproc_per_node=8 $SCRIPT {flags}", script="wan_2_1")
    assert (report.script, report.ranks, report.rollout.samples) == ("wan_2_1", 8, 24)
    with pytest.raises(KitError) as caught:
        planned(tmp_path, text, script="nosuch")
    assert caught.value.code == "LG502" and "flux_lora" in caught.value.cause


def test_commands_that_only_name_a_script(tmp_path: Path) -> None:
    text = "pkill -f train_grpo_flux.py\ncp {script} out/\necho python {script}\ntorchrun --nproc_per_node=8 {run}"
    report = planned(tmp_path, text)
    assert (report.ranks, report.line) == (8, 4) and not report.notes


def test_accelerate_reads_its_file_and_the_command_line_wins(tmp_path: Path) -> None:
    (tmp_path / "acc.yaml").write_text(
        "distributed_type: FSDP\nnum_processes: 8\nfsdp_config:\n  fsdp_sharding_strategy: FULL_SHARD\n  fsdp_x: 1\n"
    )
    assert planned(tmp_path, "accelerate launch --config_file acc.yaml {run}").ranks == 8
    assert planned(tmp_path, "accelerate launch --config_file=acc.yaml --num_processes 4 {run}").ranks == 4
    words = ["accelerate", "launch", "--config_file", "acc.yaml", "--fsdp_sharding_strategy", "NO_SHARD"]
    found = accelerate.read(started(words), tmp_path)
    assert found and found.kind == "FSDP" and found.fsdp == {"fsdp_sharding_strategy": "NO_SHARD", "fsdp_x": 1}
    found = accelerate.read(started([*words, "--use_deepspeed"]), tmp_path)
    assert found and found.deepspeed and found.kind == "DEEPSPEED"
    for given in ("", "--config_file $1", "--config_file none.yaml"):
        report = planned(tmp_path, f"accelerate launch {given} --num_processes 4 {{run}}")
        assert report.ranks == 4 and any("DeepSpeed" in note for note in report.notes)
    assert accelerate.read(started(["torchrun"]), tmp_path) is None


CASES = os.environ.get("LEANGRPO_CASES")


@pytest.mark.skipif(not CASES, reason="LEANGRPO_CASES names no folder with launch files and expected.tsv")
def test_cases_of_a_folder() -> None:
    """Those of its rows that say how many ranks, samples or updates there are, or which error."""
    folder, checked = Path(CASES or ""), 0
    for row in csv.DictReader((folder / "expected.tsv").open(encoding="utf-8"), delimiter="\t"):
        if row["upstream"].lower() != "dancegrpo":
            continue
        script = "flux" if "--script" in (row["options"] or "") else None
        wanted = row["expected"].replace("as plain", "ranks 8, samples_per_rank 24, updates_per_rollout 2")
        if wanted == "LG503":
            with pytest.raises(KitError, match="not known"):
                plan("DanceGRPO", folder / row["file"], script=script)
            checked += 1
            continue
        report = plan("DanceGRPO", folder / row["file"], script=script).to_json()
        for part in wanted.split(", "):
            name, _, value = part.partition(" ")
            if name in ("ranks", "samples_per_rank", "updates_per_rollout"):
                assert report[name] == int(value), (row["file"], part)
                checked += 1
    assert checked > 15
