"""How long a rollout and its updates take, natively and patched, in turn; beside the ratio that could be reached."""

from __future__ import annotations

import dataclasses
import shutil
import statistics
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from leangrpo_rehearsal import interleave
from leangrpo_rehearsal.base import Config, Script
from leangrpo_tools.rehearsal import planned, records
from leangrpo_tools.rehearsal.client import RankExit
from leangrpo_tools.rehearsal.rehearse import check, find_script, full_name
from leangrpo_tools.rehearsal.runs import Stage
from leangrpo_tools.rehearsal.session import Session
from leangrpo_tools.rehearsal.ways import AUTO_ROLLOUTS, ways

ROLLOUTS = 3
"""Rollouts per process, where nothing else is said; the first one warms up and is not counted."""
APART = 0.05
"""So far two ways that do the same work may be apart without a word."""
AUTO_SKIPS = AUTO_ROLLOUTS - 2
COSTS = ("no_grad", "grad", "backward")


@dataclasses.dataclass
class Timing:
    """One way of running. `seconds` of each counted rollout with its updates, on the slowest rank; calls and costs are
    those of the policy on rank 0 per counted rollout: forwards without and with grad, backward passes."""

    name: str
    seconds: list[float] = dataclasses.field(default_factory=list)
    calls: dict[str, float] = dataclasses.field(default_factory=dict)
    costs: dict[str, list[float]] = dataclasses.field(default_factory=lambda: {kind: [] for kind in COSTS})
    peak_rss_bytes: int = 0
    cpu: list[float] = dataclasses.field(default_factory=list)
    """Of the same rollouts the processor's seconds, which other programs of the machine disturb less."""
    held_bytes: int = 0
    """The most that kept graphs took on a rank."""
    gradients: float = 0.0
    """The most gradients that reweighting held on a rank."""
    gradient_bytes: int = 0
    """Of one of them."""
    collectives: float = 0
    """Per counted rollout, of the native run or the patched one."""
    said: list[str] = dataclasses.field(default_factory=list)
    """Of `auto`: what it has chosen, each time."""
    graph_bytes: int = 0
    """Of a kept graph, as the runtime measured it; 0 where none was kept."""

    @property
    def median(self) -> float:
        """Seconds of a rollout with its updates."""
        return statistics.median(self.seconds)

    def cost(self, kind: str) -> float:
        """Seconds per rollout that one kind of work took, the median."""
        return statistics.median(self.costs[kind])


@dataclasses.dataclass
class BenchReport:
    """Native first. `exit_code` is 0: a bench measures, it does not judge."""

    upstream: str
    script: str
    config: Config
    repeat: int
    timings: list[Timing]
    rollouts: int = ROLLOUTS
    predicted: dict[str, float] = dataclasses.field(default_factory=dict)
    """What `leangrpo plan` predicts with the costs measured natively, by the name of the timing."""
    exit_code: int = 0

    def ratio(self, timing: Timing) -> float:
        """Native time over this one's."""
        return self.timings[0].median / timing.median

    def bound(self, timing: Timing) -> float:
        """The ratio if nothing but the removed forwards changed: a kept forward costs what one with grad costs."""
        native = self.timings[0]
        removed = native.calls["no_grad"] + native.calls["grad"] - timing.calls["no_grad"] - timing.calls["grad"]
        saved = removed * native.cost("no_grad") / max(native.calls["no_grad"], 1)
        return native.median / (native.median - saved)

    def to_json(self) -> dict[str, Any]:
        """All figures."""
        return {
            "upstream": self.upstream, "script": self.script, "config": dataclasses.asdict(self.config),
            "timings": [
                {
                    "name": item.name, "median_s": item.median, "seconds": item.seconds, "ratio": self.ratio(item),
                    "predicted": self.predicted.get(item.name), "bound": self.bound(item), "cpu_s": item.cpu,
                    "calls": item.calls, "peak_rss_bytes": item.peak_rss_bytes, "graph_bytes": item.graph_bytes,
                    "peak_held_bytes": item.held_bytes, "gradients_held": item.gradients,
                    "collectives": item.collectives,
                    "costs_s": {kind: item.cost(kind) for kind in COSTS}, "said": item.said,
                }
                for item in self.timings
            ],
        }  # fmt: skip

    def render(self) -> str:
        """A table: medians, ratios, and the bound beside them."""
        config = self.config
        head = (
            f"{self.upstream} {self.script}: {config.ranks} rank{'s' if config.ranks > 1 else ''}, "
            f"{config.updates_per_rollout} updates per rollout, {config.generations} samples, {config.steps} steps, "
            f"{config.precision}, {config.clock} seconds; {self.repeat} x {self.rollouts - 1} rollouts each, in turn, "
            "after the first ones, which are not counted"
        )
        names = (
            "",
            "s per rollout",
            "ratio",
            "plan",
            "bound",
            "forwards",
            "with grad",
            "no grad s",
            "grad s",
            "backward s",
            "collectives",
            "graphs MB",
            "gradients",
            "MB",
        )
        rows: list[tuple[str, ...]] = [names]
        for item in self.timings:
            rows.append((
                item.name, f"{item.median:.2f}", f"{self.ratio(item):.2f}", self._planned(item),
                f"{self.bound(item):.2f}",
                f"{item.calls['no_grad']:g}", f"{item.calls['grad']:g}",
                *(f"{item.cost(kind):.2f}" for kind in COSTS), f"{item.collectives:g}",
                f"{item.held_bytes / 1e6:.3g}", f"{item.gradients:.3g}", f"{item.peak_rss_bytes / 1e6:.0f}",
            ))  # fmt: skip
        widths = [max(len(row[column]) for row in rows) for column in range(len(names))]
        lines = ["  ".join(text.rjust(width) for text, width in zip(row, widths, strict=True)) for row in rows]
        bound = "bound: the ratio if nothing but the removed forwards changed, from the seconds measured natively here"
        said = [line for item in self.timings for line in item.said]
        said = [*self._trust(), *said]
        plan = "plan: what `leangrpo plan` predicts for this launch line, with the costs measured natively here"
        return "\n".join([head, "", *lines, "", *([plan] if self.predicted else []), bound, *said])

    def _trust(self) -> list[str]:
        """What two ways that do the same work tell of the others."""
        same = next((item for item in self.timings if item.name == "recompute"), None)
        apart = abs(self.ratio(same) - 1) if same else 0.0
        if apart < APART:
            return []
        return [
            f"native and recompute do the same work and are {apart:.0%} apart: the other ratios are worth no more than "
            "that. A quiet machine, --clock cpu and more --repeat bring them together"
        ]

    def _planned(self, timing: Timing) -> str:
        found = self.predicted.get(timing.name)
        return "-" if found is None else f"{found:.2f}"


def measure(
    module: str, native: Path, patched: Path, config: Config, *, session: Session, upstream: str, repeat: int,
    rollouts: int = ROLLOUTS, only: Sequence[str] = (), say: Callable[[str], None] = lambda text: None,
) -> BenchReport:  # fmt: skip
    """Runs native and the other ways in turn, `repeat` times; or `only` those of them.

    Raises LG401 and LG403 as a rehearsal.
    """
    module = full_name(module)
    script = find_script(module)
    config = dataclasses.replace(config, updates=rollouts * config.updates_per_rollout)
    check(script, config)
    say("importing torch and diffusers")
    session.server.preload(script.preload)
    chosen_ways = {name: chosen for name, chosen in ways(config).items() if not only or name in only}
    timings = {name: Timing(name) for name in chosen_ways}
    assets: Path | None = None
    for number in range(repeat):
        say(f"all ways in turn, {number + 1} of {repeat}")
        for name, stage in _in_turn(chosen_ways, script, module, native, patched, session, assets):
            assets = stage.assets
            variant, skipped = _variant(name), AUTO_SKIPS if name == "auto" else 1
            _add(timings[name], records.read(stage.out(variant), config.ranks), config.updates_per_rollout, skipped)
            windows = [window for rank in stage.windows(variant) for window in rank]
            timings[name].held_bytes = max([timings[name].held_bytes, *(int(w["peak_held_bytes"]) for w in windows)])
            timings[name].graph_bytes = max([0, *(int(window["graph_bytes"]) for window in windows)])
            timings[name].gradients = max([0.0, *(window["gradients"] for window in windows)])
            timings[name].gradient_bytes = max([0, *(int(window["gradient_bytes"]) for window in windows)])
            if name == "auto":
                timings[name].said += _choices(stage.logs(variant) / "rank0.out")
            shutil.rmtree(stage.out(variant))
    found = list(timings.values())
    predicted: dict[str, float] = {}
    if assets is not None and "native" in chosen_ways:
        predicted = planned.ratios(script, upstream, native, assets, config, found)
    return BenchReport(upstream, script.name, config, repeat, found, rollouts, predicted)


def _variant(name: str) -> str:
    return "native" if name == "native" else "patched"


def _in_turn(
    chosen: Mapping[str, Config], script: Script, module: str, native: Path, patched: Path, session: Session,
    assets: Path | None,
) -> list[tuple[str, Stage]]:  # fmt: skip
    """A process of each way, which take turns rollout by rollout. Raises LG401 if one of them fails."""
    stages: dict[str, Stage] = {}
    for name, config in chosen.items():
        stage = stages[name] = Stage(session.server, script, module, config, session.folder(), assets=assets)
        if assets is None:
            stage.prepare()
            assets = stage.assets
    mine = interleave.order({name: config.updates // config.updates_per_rollout for name, config in chosen.items()})
    file = session.folder() / "turn"
    interleave.give(file, 0)

    def run(name: str) -> list[RankExit]:
        tree = native if name == "native" else patched
        taken = {"file": str(file), "mine": mine[name]}
        ended = False
        try:
            exits = stages[name].run(_variant(name), tree, chosen[name].updates, turns=taken)
            ended = all(item.code == 0 for item in exits)
            return exits
        finally:
            if not ended:
                interleave.give(file, interleave.STOP)  # the others wait for a turn that will not be over

    with ThreadPoolExecutor(len(stages)) as threads:
        ended = dict(zip(stages, threads.map(run, stages), strict=True))
    for name, stage in stages.items():
        stage.require(_variant(name), ended[name])
    return list(stages.items())


def _choices(log: Path) -> list[str]:
    mark = "[leangrpo] auto: "
    return [line[len(mark) :] for line in log.read_text(errors="replace").splitlines() if line.startswith(mark)]


def _add(timing: Timing, run: records.Records, per_rollout: int, skipped: int = 1) -> None:
    """The rollouts of one process after those that are skipped."""
    for first in range(skipped * per_rollout, len(run.updates), per_rollout):
        part = run.updates[first : first + per_rollout]
        timing.seconds.append(
            max(sum(float(update[rank]["seconds"]) for update in part) for rank in range(len(part[0])))
        )
        timing.cpu.append(
            max(sum(float(update[rank].get("cpu", 0)) for update in part) for rank in range(len(part[0])))
        )
        before, after = run.updates[first - 1][0], part[-1][0]
        timing.calls = {kind: after["forwards"].get(kind, 0) - before["forwards"].get(kind, 0) for kind in COSTS[:2]}
        timing.collectives = sum(after.get("collectives", {}).values()) - sum(before.get("collectives", {}).values())
        for kind in COSTS:
            timing.costs[kind].append(after["spent"].get(kind, 0.0) - before["spent"].get(kind, 0.0))
    timing.peak_rss_bytes = max(timing.peak_rss_bytes, *(int(item["peak_rss_bytes"]) for item in run.summaries))
