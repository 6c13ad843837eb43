"""What a variant's ranks recorded. The figures are read here; tensors are compared in the training interpreter."""

from __future__ import annotations

import dataclasses
import json
import tempfile
from pathlib import Path
from typing import Any

from leangrpo_rehearsal.outcome import Update
from leangrpo_tools.errors import KitError
from leangrpo_tools.rehearsal.client import ForkServer

TIMEOUT_S = 600.0


@dataclasses.dataclass
class Records:
    """Of one variant: `updates[k][rank]` holds seconds, cpu, forwards, collectives and spent."""

    out: Path
    """The folder with the ranks' folders."""
    updates: list[list[dict[str, Any]]]
    summaries: list[dict[str, Any]]

    @property
    def seconds(self) -> float:
        """From the first policy forward to the end of the last update, on the slowest rank."""
        return max((float(summary["seconds"]) for summary in self.summaries), default=0.0)


def read(out: Path, ranks: int) -> Records:
    """The figures of one variant, of the updates that all ranks made."""
    folders = [out / f"rank{rank}" for rank in range(ranks)]
    summaries = [json.loads((folder / "summary.json").read_text()) for folder in folders]
    count = min(int(summary["updates"]) for summary in summaries)
    updates = [[json.loads((folder / f"update{k}.json").read_text()) for folder in folders] for k in range(count)]
    return Records(out, updates, summaries)


def written(out: Path, name: str) -> list[Any]:
    """What the ranks of a run have written under that name, apart from their figures."""
    return [json.loads(file.read_text()) for file in sorted(out.glob(f"rank*/{name}.json"))]


def compare(server: ForkServer, reference: Records, other: Records, across_ranks: bool = False) -> list[Update]:
    """The updates that both made, compared tensor by tensor; with `across_ranks` what was noted over all ranks, in any
    order. Raises LG402 if the records cannot be compared."""
    if not (reference.updates and other.updates):
        return []
    return [Update.of(item) for item in _ask(server, [reference, other], across_ranks)]


def replicas(server: ForkServer, run: Records) -> list[bool]:
    """Per update, whether all ranks hold the same weights, to the bit. Raises LG402 as `compare`."""
    return _ask(server, [run]) if run.updates else []


def _ask(server: ForkServer, runs: list[Records], across_ranks: bool = False) -> list[Any]:
    with tempfile.TemporaryDirectory(dir=runs[0].out.parent) as folder:
        result = Path(folder) / "result.json"
        job = {
            "runs": [{"out": str(run.out), "ranks": len(run.summaries)} for run in runs], "result": str(result),
            "across_ranks": across_ranks,
        }  # fmt: skip
        (done,) = server.run("compare", [job], Path(folder), TIMEOUT_S)
        if done.code == 0:
            return json.loads(result.read_text())
        said = (Path(folder) / "rank0.err").read_text(errors="replace").strip().splitlines()
    raise KitError(
        "LG402", f"the records of two runs cannot be compared: {said[-1] if said else 'the process ended'}",
        cause="a run wrote something that cannot be read, or there is no memory for both",
        fix="run fewer --updates; if that does not help, it is a fault of the kit, please report it",
    )  # fmt: skip
