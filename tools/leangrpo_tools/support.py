"""`leangrpo support`: which scripts are supported, and how far that was shown.

What was measured stands in `patches/support.json`, written by `leangrpo support --measure`; names and reasons come
from the recipes. The table in README is this command's output.
"""

from __future__ import annotations

import dataclasses
import json
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from leangrpo_tools import data, lock
from leangrpo_tools import recipe as recipes
from leangrpo_tools.errors import KitError
from leangrpo_tools.recipe import Script

FILE = "support.json"
RANKS = (1, 2)
WIDTH = 120
GAIN = (
    "The predicted gain is for the policy's compute alone, with all graphs of the first update held. What has no room "
    "is recomputed, and the gain is smaller: `leangrpo plan NAME --launch FILE --gpu-gb GB` says how much fits."
)
HEAD = (
    "upstream",
    "script",
    "1 rank",
    "2 ranks",
    "schedules",
    "updates per rollout",
    "recompute-free",
    "predicted gain",
)


@dataclasses.dataclass(frozen=True)
class Row:
    """One script. Shares and ratios are of the launch files that upstream ships, in the recipe's order."""

    upstream: str
    script: str
    rehearsed: bool
    reason: str
    """Why it is not rehearsed."""
    exact: dict[int, float]
    """By ranks: relative L2 of the worst update, gradients before clipping; 0 where they are equal to the bit."""
    bounds: dict[int, float]
    """By ranks: what the rehearsal allows; 0 for every bit."""
    schedules: tuple[str, ...]
    updates: tuple[int, ...] = ()
    shares: tuple[float, ...] = ()
    ratios: tuple[float, ...] = ()

    def cells(self) -> tuple[str, ...]:
        """As text, in the order of `HEAD`."""
        ranks = (
            [self._exact(number) for number in RANKS]
            if self.rehearsed
            else [f"applies, not rehearsed: {self.reason}", ""]
        )
        return (
            self.upstream, f"`{self.script}`", *ranks, ", ".join(self.schedules), _several(map(str, self.updates)),
            _several(f"{share:.0%}".replace("%", " %") for share in self.shares),
            _several(f"{ratio:.2f}" for ratio in self.ratios),
        )  # fmt: skip

    def _exact(self, ranks: int) -> str:
        if ranks not in self.exact:
            return "not measured"
        if not self.bounds[ranks]:
            return "bitwise"
        found = "bitwise" if not self.exact[ranks] else f"{self.exact[ranks]:.1e}"
        return f"{found} (<= {self.bounds[ranks]:g})"


@dataclasses.dataclass(frozen=True)
class Support:
    """The table."""

    rows: list[Row]
    refused: dict[tuple[str, str], str]
    """Why, by upstream and script; of a whole upstream the script is empty."""
    exit_code: int = 0

    def to_json(self) -> dict[str, Any]:
        """All figures."""
        return {
            "scripts": [dataclasses.asdict(row) for row in self.rows],
            "refused": {" ".join(name).strip(): reason for name, reason in self.refused.items()},
        }

    def table(self) -> str:
        """As Markdown."""
        refused = [(*name, "refused", *[""] * 5) for name in self.refused]
        cells = [HEAD, ("---",) * len(HEAD), *(row.cells() for row in self.rows), *refused]
        return "\n".join(f"| {' | '.join(row)} |".replace("|  |", "| |").replace("|  |", "| |") for row in cells)

    def render(self) -> str:
        """The table, what its last column takes for granted, and why what is refused is."""
        reasons = [
            textwrap.fill(f"{' '.join(name).strip()} is refused: {reason}.", WIDTH)
            for name, reason in self.refused.items()
        ]
        return "\n\n".join([self.table(), textwrap.fill(GAIN, WIDTH), *reasons])


def path() -> Path:
    """Where the measured figures are."""
    return data.data_root() / "patches" / FILE


def support(name: str = "", script: str = "") -> Support:
    """The table, of what has been measured, or its rows of one upstream or script.

    Raises LG102 and LG203 for names that are not known, LG202 for a recipe that is wrong.
    """
    known = measured()
    if name or script:
        return Support([_row(*found, known) for found in scripts(name, script)], {})
    refused = {
        (upstream, f"`{name}`"): recipes.load(upstream).refused[name].reason
        for upstream in lock.load().upstreams
        for name in recipes.refused_by(upstream)
    }
    refused |= {(name, ""): item.reason for name, item in lock.load().refused.items()}
    return Support([_row(upstream, script, known) for upstream, script in scripts()], refused)


def scripts(name: str = "", script: str = "") -> Iterator[tuple[str, Script]]:
    """Every script that can be patched, or those asked for. Raises LG102 and LG203 for names that are not known."""
    wanted = lock.load().find(name) if name else ""
    seen: set[str] = set()
    for upstream in lock.load().upstreams:
        if (wanted and upstream != wanted) or not data.recipe_path(upstream).is_file():
            continue
        found = recipes.load(upstream).scripts
        seen |= set(found)
        yield from ((upstream, item) for item in found.values() if script.lower() in ("", item.name.lower()))
    if script and script.lower() not in {item.lower() for item in seen}:
        raise KitError("LG203", f"there is no script {script!r}", cause=f"known: {', '.join(sorted(seen))}",
                       fix="leangrpo list")  # fmt: skip


def measured() -> dict[str, Any]:
    """By upstream and script; empty where nothing has been measured."""
    try:
        return json.loads(path().read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}


def put(upstream: str, script: str, figures: dict[str, Any]) -> None:
    """Writes one script's figures beside the others."""
    known = measured()
    known.setdefault(upstream, {}).setdefault(script, {}).update(figures)
    text = json.dumps({name: dict(sorted(known[name].items())) for name in sorted(known)}, indent=1)
    try:
        path().write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise KitError(
            "LG301", f"{path()} cannot be written", cause=str(error), fix="run it in a clone of the kit"
        ) from error


def _row(upstream: str, script: Script, known: dict[str, Any]) -> Row:
    found = known.get(upstream, {}).get(script.name, {})
    exact = found.get("exact", {})
    schedules = ["retain"] if exact else []
    if found.get("reweight") is not None:
        schedules.append("reweight")
    if found.get("shared") is not None:
        schedules.append("shared prompts")
    launches = found.get("launch", [])
    if not launches and (said := re.match(r"\d+", script.updates_per_rollout)):
        launches = [{"updates": int(said.group())}]
    return Row(
        upstream, script.name, bool(script.rehearsal), script.not_rehearsed,
        {int(ranks): item["rel_l2"] for ranks, item in exact.items()},
        {int(ranks): item["bound"] for ranks, item in exact.items()},
        tuple(schedules),
        *(tuple(item[key] for item in launches if key in item) for key in ("updates", "share", "ratio")),
    )  # fmt: skip


def _several(texts: Any) -> str:
    return ", ".join(dict.fromkeys(texts)) or "-"
