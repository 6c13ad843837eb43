"""What a launch file's `#SBATCH` lines say of the variables that SLURM gives the job."""

from __future__ import annotations

import re

_LONG = {"N": "nodes", "n": "ntasks"}


def variables(text: str) -> dict[str, str | None]:
    """Every SLURM variable that the file names or that its `#SBATCH` lines decide; None: not known."""
    said: dict[str, str] = {}
    for line in re.findall(r"^#SBATCH\s+(.*)$", text, re.M):
        for short, long, value in re.findall(r"(?:^|\s)(?:-([Nn])\s*|--([a-z-]+)[=\s]\s*)([^\s#]+)", line):
            said[_LONG.get(short) or long] = value
    nodes, each, tasks = (_number(said.get(name)) for name in ("nodes", "ntasks-per-node", "ntasks"))
    gpus = _number((said.get("gpus-per-node") or said.get("gres", "")).removeprefix("gpu:").rpartition(":")[2])
    if "ntasks" not in said and nodes and each:
        tasks = nodes * each
    decided = {"NNODES": nodes, "JOB_NUM_NODES": nodes, "NTASKS": tasks, "NPROCS": tasks, "NTASKS_PER_NODE": each}
    decided |= {"GPUS_ON_NODE": gpus, "GPUS_PER_NODE": gpus if "gpus-per-node" in said else None}
    known = {f"SLURM_{name}": str(value) for name, value in decided.items() if value}
    return dict.fromkeys(re.findall(r"\bSLURM_\w+", text)) | known


def _number(text: str | None) -> int | None:
    return int(text) if text and re.fullmatch(r"[1-9]\d{0,6}", text) else None
