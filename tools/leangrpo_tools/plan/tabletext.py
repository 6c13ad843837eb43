"""The table of choices as text and as JSON: what can run, what to take, ready to paste."""

from __future__ import annotations

from typing import Any

from leangrpo_tools.plan.memory import MARGIN, Memory
from leangrpo_tools.plan.predict import Prediction, Speeds, Table
from leangrpo_tools.plan.sizing import Sized

ROWS = 8
"""Rows of the table as text; JSON has all."""
MEASURED = "# The first rollout and its update keep nothing and measure the room on the GPU. By formula it is:"
OTHER = (
    "--other-gb is what else stays on the GPU: the peak memory of a run without the kit, less parameters, gradients,",
    "optimizer and gathered above; or what nvidia-smi shows of reward model and VAE once they are loaded.",
)
HEADS = ("schedule", "layout", "sync", "updates", "ratio", "compute", "communication", "held at once")


def to_json(table: Table, memory: Memory | None, speeds: Speeds) -> dict[str, Any]:
    """Everything, as plain data."""
    best, second = table.recommended, table.runner_up
    return {
        "bytes_by_part": memory.parts if memory else None,
        "kept_free_bytes": memory.reserve if memory else None,
        "unit": "seconds" if table.seconds else "forwards",
        "speeds": vars(speeds),
        "native": _row_json(table, table.native, memory),
        "choices": [_row_json(table, row, memory) for row in table.rows],
        "choices_that_change_the_algorithm": [_row_json(table, row, memory) for row in table.apart],
        "refused": table.refused,
        "recommended": _exports(table, best, memory) if best else None,
        "runner_up": _exports(table, second, memory) if second else None,
    }


def _row_json(table: Table, row: Prediction, memory: Memory | None) -> dict[str, Any]:
    return {
        "settings": _exports(table, row, memory),
        "fits": row.held.fits if row.runs else False,
        "ratio": row.ratio,
        "compute": row.compute,
        "communication": row.communication,
        "total": row.total,
        "collectives": vars(row.traffic),
        "held": vars(row.held),
    }


def _exports(table: Table, row: Prediction, memory: Memory | None) -> list[str]:
    """The settings; with a budget, in comments where the formula cannot know what else is on the GPU."""
    lines = row.choice.exports()
    room = row.held.room
    if memory is not None and room is not None and table.known and row.choice.schedule == "retain":
        budget = f"export LEANGRPO_BUDGET_GB={int(room / 1e8) / 10:g}"
        lines += [budget] if memory.other_bytes or row.held.on_host else [MEASURED, f"# {budget}"]
    if memory is not None and row.held.on_host:
        lines.append(f"export LEANGRPO_OFFLOAD_GB={memory.host_bytes / 1e9:g}")
    return lines


def render(table: Table, sized: Sized, speeds: Speeds) -> list[str]:
    """Bytes by part, the table, the recommended settings and the runner-up."""
    memory = sized.memory
    text = ["", "Bytes per GPU, by formula (GB):"] if memory else []
    if memory:
        parts = [f"{name} {size / 1e9:.3g}" for name, size in memory.parts.items() if size]
        parts += [f"{MARGIN * 100:g} % kept free {memory.reserve / 1e9:.3g}"]
        gpu, room = memory.gpu_bytes / 1e9, memory.room()
        text += [f"  {', '.join(parts)}; left of {gpu:g}: {room / 1e9:.3g}"]
        if memory.graph is not None:
            text += [f"  and one graph at a time, upstream's as well as a kept one: {memory.graph / 1e9:.3g}"]
        if memory.left() < 0:
            lacks = f"it lacks {-memory.left() / 1e9:.3g} GB of {gpu:g}"
            return [*text, "", f"Upstream itself does not fit, by formula: {lacks}.", *_refused(table)]
    if not table.rows:
        return [*text, "", "Recommended: nothing to set, no choice of settings gains anything", *_refused(table)]
    shown = _worth_a_line(table.rows)[:ROWS]
    counted = "with communication, " if table.communicates else ""
    of = "of what fits" if table.known else "if all has room, which is not known"
    text += ["", f"What can run, best first (ratios {counted}{of}):"]
    text += _lines(shown, table)
    if len(table.rows) > len(shown):
        text += [f"  ({len(table.rows) - len(shown)} more, as good or worse, in --json)"]
    if table.apart:
        text += [
            "",
            "These change the algorithm (each update's samples are drawn from the policy as it is then; training",
        ]
        text += ["that is on-policy all the way collapses on some models, upstream's maintainers say):"]
        apart = _worth_a_line(table.apart)[:3]
        text += _lines(apart, table)
        shown = shown + apart
    text += _whole(shown, memory)
    text += _refused(table)
    if not table.known:
        return [*text, *_unknown(sized), "", _assumed(table, speeds)]
    alone = memory is not None and not memory.other_bytes
    for name, row in (("Recommended", table.recommended), ("Runner-up", table.runner_up)):
        if row is None:
            text += ["", f"{name}: none, no other choice gains anything"]
        else:
            only = ", if nothing else is on the GPU (--other-gb)" if alone else ""
            text += [
                "",
                f"{name} (ratio {row.ratio:.2f}){only}:",
                *(f"  {line}" for line in _exports(table, row, memory)),
            ]
    text += ["", *OTHER] if alone and table.recommended else []
    return [*text, "", _assumed(table, speeds)]


def _unknown(sized: Sized) -> list[str]:
    """Why nothing is recommended, and what to do about it."""
    return [
        "",
        "Recommended: not known, since what has room is not:",
        f"  {sized.why}",
        *([f"  {sized.help}"] if sized.help else []),
        "  LEANGRPO_SCHEDULE=retain can be tried: on CUDA a run measures its room, and recomputes what does not fit.",
    ]


def _whole(rows: list[Prediction], memory: Memory | None) -> list[str]:
    """How a whole gradient adds up with the bytes by part."""
    schedules = {row.choice.schedule for row in rows if row.held.whole}
    if not schedules or memory is None:
        return []
    gathers = f" With retain all weights are gathered beside it ({memory.weights / 1e9:.3g} GB)."
    told = f"Of a whole gradient 1/{memory.ranks} is counted above, as this rank's."
    return ["", told + (gathers if "retain" in schedules else "")]


def _worth_a_line(rows: list[Prediction]) -> list[Prediction]:
    """Those that are not just as good as one above with the same schedule and layout."""
    seen: dict[tuple[object, ...], Prediction] = {}
    for row in rows:
        seen.setdefault((row.choice.schedule, row.choice.layout, row.rounded), row)
    return list(seen.values())


def _lines(rows: list[Prediction], table: Table) -> list[str]:
    unit = " s" if table.seconds else ""
    cells: list[tuple[str, ...]] = [HEADS]
    for row in rows:
        name = row.choice.schedule
        name += f" {row.choice.buffers}" if name == "reweight" else " + offload" if row.choice.offloads else ""
        cells.append((
            name, row.choice.layout, row.choice.sync, row.choice.updates, f"{row.ratio:.2f}",
            f"{row.compute:.4g}{unit}", f"{row.communication:.3g}{unit}" if table.communicates else "-", row.held.told,
        ))  # fmt: skip
    kept = [
        column for column in range(len(HEADS)) if column in (0, 4, 5, 7) or len({row[column] for row in cells[1:]}) > 1
    ]
    kept += [6] if table.communicates and 6 not in kept else []
    widths = [max(len(row[column]) for row in cells) for column in range(len(HEADS))]
    return ["  " + "  ".join(row[column].ljust(widths[column]) for column in sorted(kept)).rstrip() for row in cells]


def _refused(table: Table) -> list[str]:
    return ["", "Not here:", *(f"  {name}: {why}" for name, why in table.refused.items())] if table.refused else []


def _assumed(table: Table, speeds: Speeds) -> str:
    if not table.seconds:
        known = "how long one takes is not known (--forward-seconds says it)"
        return f"Ratios from compute alone, in forwards: {known}."
    forward = "measured" if speeds.forward_seconds is not None else f"at {speeds.tflops:g} TFLOP/s (--tflops)"
    link = f", {speeds.link_gb:g} GB/s between GPUs (--link-gb)" if table.communicates else ""
    rest = "" if speeds.rest_seconds else ", nothing beside the policy (--rest-seconds)"
    return f"Seconds per rollout with its updates: forwards {forward}{link}, nothing overlapped{rest}."
