"""Runs the variants of one script: prepares their folders, starts their ranks, explains what went wrong."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from leangrpo_rehearsal.base import Config, Script
from leangrpo_tools.disk import FULL, disk_full, no_room
from leangrpo_tools.errors import KitError
from leangrpo_tools.rehearsal import causes
from leangrpo_tools.rehearsal.client import ForkServer, RankExit

TIMEOUT_S = 120.0
"""How long a rank may go without progress."""

LEFT_OUT = {".git", ".leangrpo", "__pycache__"}
DOUBLE = "-double"
"""Ends the name of a variant that is run once more in fp64."""


@dataclasses.dataclass(frozen=True)
class Injection:
    """A function that runs in chosen ranks just before the script starts, with a `Context`.

    `function` is `package.module:name` or `path/to/file.py:name`; `ranks` None means all.
    """

    function: str
    ranks: tuple[int, ...] | None = None
    variants: tuple[str, ...] = ("patched",)
    args: dict[str, Any] = dataclasses.field(default_factory=dict)

    def applies(self, variant: str, rank: int) -> bool:
        """Whether it runs in this rank of this variant."""
        return variant in self.variants and (self.ranks is None or rank in self.ranks)


@dataclasses.dataclass
class Stage:
    """One rehearsal's folder and what its runs have in common."""

    server: ForkServer
    script: Script
    module: str
    config: Config
    root: Path
    injections: Sequence[Injection] = ()
    timeout_s: float = TIMEOUT_S
    assets: Path | None = None
    """Checkpoints and data made by another stage of the same script and size."""

    def prepare(self) -> None:
        """Writes checkpoints and data once. LG401 if that fails."""
        self.assets = self.root / "assets"
        job = {"module": self.module, "workdir": str(self.assets), "config": dataclasses.asdict(self.config)}
        exits = self.server.run("prepare", [job], self.logs("prepare"), self.timeout_s)
        self._had_room("prepare", exits)
        if exits[0].code != 0:
            raise self._cannot("the tiny checkpoints cannot be made", self.explain("prepare", exits))

    def run(
        self,
        variant: str,
        tree: Path,
        updates: int,
        follow: Path | None = None,
        turns: dict[str, Any] | None = None,
        *,
        note: bool = False,
        shapes: Path | None = None,
        once: bool = False,
        double: bool = False,
    ) -> list[RankExit]:
        """Runs all ranks of one variant in `tree`.

        Args:
            follow: each update starts from weights recorded there.
            turns: the file and the numbers of `turns.Turns`, where this run takes turns with others.
            note: note which rows run in one network call.
            shapes: a run that has noted them; network calls are cut as they were there.
            once: gradients are averaged over the ranks once, before they are clipped, and not by DDP.
            double: everything in fp64.
        """
        workdir = self.root / "work" / variant
        assert self.assets is not None
        _data(tree, workdir)
        shutil.copytree(self.assets, workdir, dirs_exist_ok=True)
        start = self.script.launch_natively if variant.startswith("native") else self.script.launch
        launch = start(workdir, self.config)
        jobs = [self._job(variant, tree, workdir, rank, updates) for rank in range(self.config.ranks)]
        for job in jobs:
            job["argv"] = [str(text) for text in launch.argv]
            job["env"] |= launch.env
            job["follow"] = str(follow / f"rank{job['rank']}") if follow else ""
            job["turns"] = turns
            job |= {"note": note, "once": once, "double": double}
            job["shapes"] = str(shapes / f"rank{job['rank']}" / "shapes.json") if shapes else ""
        exits = self.server.run("run", jobs, self.logs(variant), self.timeout_s)
        self._had_room(variant, exits)
        return exits

    def _had_room(self, variant: str, exits: list[RankExit]) -> None:
        """Raise LG106 if a run ended badly for want of room: that says nothing about the script, nor the patch."""
        if all(item.code == 0 for item in exits):
            return
        if no_room(self.root) or any(os.strerror(number) in self.explain(variant, exits) for number in FULL):
            raise disk_full(self.root)

    def sound(self, variant: str, exits: list[RankExit]) -> None:
        """LG402 if a run ended because the rehearsal could not write down what it saw."""
        for item in exits:
            failure = self.out(variant) / f"rank{item.rank}" / "failure.json"
            if item.code != 0 and failure.exists() and json.loads(failure.read_text())["kind"] == "RecorderFault":
                raise self._recorder(self._explain_rank(variant, item))

    def _recorder(self, why: str) -> KitError:
        return KitError(
            "LG402", f"the rehearsal's recorder failed: {why}",
            cause="the tree uses tensors, an optimizer or a wrapper that the recorder does not know; this says nothing "
            "about the patch",
            fix=f"report it with the logs under {self.root / 'logs'}",
        )  # fmt: skip

    def require(self, variant: str, exits: list[RankExit]) -> None:
        """LG401 unless a run of the unpatched tree ended well: without it there is nothing to compare with."""
        self.sound(variant, exits)
        if any(item.code != 0 for item in exits):
            raise self._cannot("upstream's own script does not run here", self.explain(variant, exits))

    def out(self, variant: str) -> Path:
        """Where the ranks of a variant record."""
        return self.root / "out" / variant

    def logs(self, variant: str) -> Path:
        """Where their output goes."""
        return self.root / "logs" / variant

    def windows(self, variant: str) -> list[list[dict[str, Any]]]:
        """What the runtime reported, per rank."""
        found = []
        for rank in range(self.config.ranks):
            file = self.out(variant) / "report" / f"rank{rank}.jsonl"
            lines = file.read_text().splitlines() if file.exists() else []
            found.append([json.loads(line) for line in lines])
        return found

    def explain(self, variant: str, exits: list[RankExit]) -> str:
        """What went wrong, rank by rank: the exception, or where it hung, and the end of the log."""
        return "; ".join(self._explain_rank(variant, item) for item in exits if item.code != 0)

    def _job(self, variant: str, tree: Path, workdir: Path, rank: int, updates: int) -> dict[str, Any]:
        env = {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(self.config.ranks),
            "LOCAL_WORLD_SIZE": str(self.config.ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500",
        }  # fmt: skip
        if sys.platform == "linux":
            env["GLOO_SOCKET_IFNAME"] = "lo"  # no name look-ups, no other machine
        if not variant.startswith("native"):
            folder = self.out(variant) / "report"
            folder.mkdir(parents=True, exist_ok=True)
            env |= {
                "LEANGRPO_SCHEDULE": self.config.schedule, "LEANGRPO_AUDIT": "off",
                "LEANGRPO_BUDGET_GB": self.config.budget_gb, "LEANGRPO_SYNC": self.config.sync,
                "LEANGRPO_REPORT_DIR": str(folder),
            }  # fmt: skip
            if self.config.schedule == "reweight":  # `auto` chooses its buffers unless they are set
                env["LEANGRPO_BUFFERS"] = self.config.buffers
        inject = [
            {"function": injection.function, "args": injection.args}
            for injection in self.injections
            if injection.applies("patched" if variant.startswith("patched") else variant, rank)
        ]
        return {
            "module": self.module, "config": dataclasses.asdict(self.config), "tree": str(tree),
            "workdir": str(workdir), "rank": rank, "variant": variant, "updates": updates,
            "store": str(self.root / f"{variant}.store"), "timeout_s": self.timeout_s, "inject": inject,
            "out": str(self.out(variant) / f"rank{rank}"), "env": env,
        }  # fmt: skip

    def _explain_rank(self, variant: str, item: RankExit) -> str:
        log = self.logs(variant) / f"rank{item.rank}.err"
        if item.hung is not None:
            return f"rank {item.rank} hung, last at {item.hung}{_innermost_call(log)}"
        failure = self.out(variant) / f"rank{item.rank}" / "failure.json"
        if failure.exists():
            record = json.loads(failure.read_text())
            return f"rank {item.rank}: {record['kind']}: {record['message']}{causes.of(record['message'])}"
        lines = log.read_text(errors="replace").strip().splitlines() if log.exists() else []
        # Python lists its C extensions where a signal ends it: a hundred names that say nothing.
        tail = [line for line in lines if line.strip() and not line.startswith("Extension modules:")][-3:]
        how = f"ended by signal {-item.code}" if item.code is not None and item.code < 0 else f"exit {item.code}"
        return f"rank {item.rank}: {how}: {' | '.join(tail)}{_innermost_call(log)}{causes.of(' '.join(lines))}"

    def _cannot(self, what: str, why: str) -> KitError:
        return KitError(
            "LG401",
            f"could not rehearse: {what}: {why}",
            cause="a dependency is missing or has another version, or the script needs something this rehearsal lacks",
            fix=f"read the logs under {self.root / 'logs'}",
        )


def _data(tree: Path, workdir: Path) -> None:
    """What scripts read by paths relative to the checkout: files of the tree's copy that are no code, and no links."""

    def left_out(folder: str, names: list[str]) -> list[str]:
        paths = [Path(folder, name) for name in names]
        return [path.name for path in paths if path.name in LEFT_OUT or path.suffix == ".py" or path.is_symlink()]

    shutil.copytree(tree, workdir, ignore=left_out)


def _innermost_call(log: Path) -> str:
    """Where a rank was, from the stack that the watchdog had it print."""
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    starts = [number for number, line in enumerate(lines) if line.startswith("Current thread")]
    if not starts or starts[-1] + 1 >= len(lines):
        return ""
    return f", in {lines[starts[-1] + 1].strip()}"
