"""What `tools/demo` runs once everything is installed: the main job on `mini`, with each command shown."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from leangrpo_tools import data

# The audit recomputes the first window to check it on the real kernels; the comparison below checks every update.
PATCHED_ENV = {"LEANGRPO_BUDGET_GB": "unlimited", "LEANGRPO_AUDIT": "off"}
Record = dict[str, Any]


@dataclass(frozen=True)
class Comparison:
    """Two runs of the same launch script, update by update."""

    native: list[Record]
    patched: list[Record]

    @property
    def equal(self) -> bool:
        """Gradients before clipping and weights are the same bytes in every update, and there is one at least."""
        keys = ("gradients", "weights")
        pairs = zip(self.native, self.patched, strict=False)
        same = all(a.get(key) and a.get(key) == b.get(key) for a, b in pairs for key in keys)
        return same and len(self.native) == len(self.patched) > 0

    def table(self) -> str:
        """A row per update and the totals."""
        rows: list[tuple[str, ...]] = [
            ("update", "gradients", "weights", "forwards native", "forwards patched", "s native", "s patched")
        ]
        for native, patched in zip(self.native, self.patched, strict=False):
            same = ["equal" if native[key] == patched[key] else "DIFFER" for key in ("gradients", "weights")]
            counts = [_forwards(record["forwards"]) for record in (native, patched)]
            seconds = [f"{record['seconds']:.2f}" for record in (native, patched)]
            rows.append((str(native["update"]), *same, *counts, *seconds))
        totals = [_total(run) for run in (self.native, self.patched)]
        rows.append(("all", "", "", *(_forwards(total["forwards"]) for total in totals), *_seconds(totals)))
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)

    def verdict(self) -> str:
        """One line: whether they agree, and what was saved."""
        if len(self.native) != len(self.patched):
            return f"NOT EQUAL: {len(self.native)} updates natively, {len(self.patched)} patched"
        if not self.equal:
            return "NOT EQUAL: the patched tree trains differently"
        native, patched = _total(self.native), _total(self.patched)
        saved = sum(native["forwards"].values()) - sum(patched["forwards"].values())
        return (
            f"Equal to the last bit in {len(self.native)} updates, with {saved} of {sum(native['forwards'].values())} "
            "policy forwards removed"
        )

    def speed(self) -> str:
        """One line on the seconds of an update: medians, without the first update, which warms up."""
        late = [[record["seconds"] for record in run[1:] or run] for run in (self.native, self.patched)]
        native, patched = map(statistics.median, late)
        return (
            f"median seconds of an update after the first: native {native:.2f}, patched {patched:.2f}, "
            f"ratio {native / patched:.2f} (of the clock: other work on this CPU disturbs it)"
        )


def _forwards(counts: dict[str, int]) -> str:
    return f"{counts['no_grad']} + {counts['grad']} grad"


def _seconds(totals: list[Record]) -> list[str]:
    return [f"{total['seconds']:.2f}" for total in totals]


def _total(run: list[Record]) -> Record:
    forwards = {kind: sum(record["forwards"][kind] for record in run) for kind in ("no_grad", "grad")}
    return {"forwards": forwards, "seconds": sum(record["seconds"] for record in run)}


def read_metrics(path: Path) -> list[Record]:
    """The JSON lines of one run; none if it wrote none."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def train(tree: Path, metrics: Path, extra: tuple[str, ...] = (), env: dict[str, str] | None = None) -> list[Record]:
    """Run the tree's own launch script and return what it recorded. Raises CalledProcessError if it fails."""
    command = ["bash", str(tree / "scripts" / "train.sh"), "--metrics", str(metrics.absolute()), *extra]
    print("\n$", *(f"{name}={value}" for name, value in (env or {}).items()), *command, flush=True)
    subprocess.run(command, check=True, env=os.environ | (env or {}))
    return read_metrics(metrics)


def show(*command: str) -> None:
    """Print a command and run it. Raises CalledProcessError if it fails."""
    print(f"\n$ {' '.join(command)}", flush=True)
    subprocess.run(command, check=True)


def run(work: Path) -> int:
    """The whole demonstration in `work`, which is emptied first. 0 if the two trees agree, 1 if not."""
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    native, patched = work / "native", work / "mini"
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(data.data_root() / "patches" / "mini" / "tree", native, ignore=ignored)
    show("apply-patch", "mini", str(patched))
    show("diff-patch", str(patched), "--stat")
    show("diff-patch", str(patched))
    said = ("gradient_checkpointing=false", "bf16=false", "width=128", "layers=2")  # what "$@" could change
    options = [word for flag in said for word in ("--set", flag)]
    show("leangrpo", "plan", "mini", "--launch", str(patched / "scripts" / "train.sh"), *options)
    before = train(native, work / "native.jsonl")
    after = train(patched, work / "patched.jsonl", env=PATCHED_ENV)
    result = Comparison(before, after)
    print(f"\n{result.table()}\n\n{result.verdict()}", flush=True)
    if result.equal:
        print(result.speed())
    print(f"The trees are in {work}")
    return 0 if result.equal else 1


def main() -> int:
    """Command line of the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work", type=Path)
    try:
        return run(parser.parse_args().work)
    except subprocess.CalledProcessError as err:
        print(f"\nfailed with exit status {err.returncode}: {' '.join(map(str, err.cmd))}", file=sys.stderr)
        return 3


if __name__ == "__main__":
    sys.exit(main())
