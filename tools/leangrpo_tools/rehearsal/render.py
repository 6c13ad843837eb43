"""The report as text: a table with colour on a terminal, plain text elsewhere."""

from __future__ import annotations

import math
import sys
from typing import Any

from leangrpo_rehearsal.outcome import Update
from leangrpo_tools.rehearsal import replays
from leangrpo_tools.rehearsal.report import Report

COLUMNS = ("update", "gradient rel. L2", "max abs", "cosine", "weights", "rewards", "native s", "patched s", "floor")
COLUMNS += ("",)


def render(report: Report, terminal: bool | None = None) -> str:
    """The whole report. `terminal` defaults to whether stdout is one."""
    terminal = sys.stdout.isatty() if terminal is None else terminal
    name = f"{report.upstream or 'upstream'} {report.script}"
    lines = [f"{name}: native against patched, bound: {report.bound.describe()}"]
    rows = [_row(report, update) for update in report.updates]
    table = _rich(rows) if terminal else _plain(rows)
    lines += ["", table, ""] if rows else [""]
    lines += [*_counts(report), ""]
    lines += [f"floor: two native runs {'agree bitwise' if report.floor_bitwise else 'differ'}{_widest(report)}"]
    if report.replicas:
        equal, updates = sum(report.replicas), len(report.replicas)
        lines += [f"ranks of the patched run: weights equal to the bit after {equal} of {updates} updates"]
    caught = ("caught" if report.control_caught else "NOT CAUGHT") if report.control else "not run"
    distance = f" (relative L2 {_number(report.control[0].grad_rel_l2)})" if report.control else ""
    lines += [f"negative control: one advantage's sign flipped: {caught}{distance}"]
    ratios, norms = report.clipping
    lines += [
        f"clipping decides: the clip range held back some ratios and not others in {ratios} of {report.config.updates} "
        f"updates, the gradient norm was cut in {norms}"
    ]
    lines += [f"note: {note}" for note in report.notes]
    lines += [f"also rehearsed, {words}: {other.verdict.value}" for words, other in report.further]
    lines += ["tested: " + "; ".join(report.tested), "not tested: " + "; ".join(report.not_tested), ""]
    lines += [f"problem: {problem}" for problem in report.problems]
    lines += [f"warning {warning.code}: {warning.text}" for warning in report.warnings]
    if report.failures:
        lines.append(f"logs: {report.logs}")
    lines.append(report.verdict.value)
    return "\n".join(lines)


def _row(report: Report, update: Update) -> tuple[str, ...]:
    floor = next((other for other in report.floor if other.index == update.index), None)
    return (
        str(update.index),
        "0 (bitwise)" if update.grad_bitwise else _number(update.grad_rel_l2),
        _number(update.grad_max_abs),
        "1" if update.grad_bitwise else f"{update.grad_cosine:.9f}",
        "bitwise" if update.weights_bitwise else _number(update.weights_rel_l2),
        "equal" if update.rewards_equal else "DIFFER",
        f"{update.seconds[0]:.2f}",
        f"{update.seconds[1]:.2f}",
        "" if floor is None else "bitwise" if floor.grad_bitwise else _number(floor.grad_rel_l2),
        "ok" if update.matches(report.bound) else "MISMATCH",
    )


def _counts(report: Report) -> list[str]:
    lines = []
    for name, counts in report.forwards.items():
        kinds = ", ".join(f"{kind} {count}" for kind, count in report.collectives[name].items())
        lines.append(
            f"{name:8} policy forwards per rank, {report.config.rollouts} rollouts: "
            f"{_each(counts.no_grad)} without grad, {_each(counts.grad)} with; collectives: {kinds or 'none'}; "
            f"{report.seconds[name]:.1f} s; peak memory of the process {report.peak_rss_bytes[name] / 1e6:.0f} MB"
        )
    if report.config.schedule != "recompute":
        lines += replays.lines(report.repeated, report.windows, report.known_reasons)
    lines.append(f"held at most for kept graphs: {report.peak_held_bytes / 1e6:.3f} MB on one rank")
    if report.gradients:
        size = f"{report.gradient_bytes / 1e6:.3f} MB each"
        lines.append(f"held at most in place of graphs: {report.gradients:.3g} gradients of {size} on one rank")
    return lines


def _each(counts: list[int]) -> str:
    return str(counts[0]) if len(set(counts)) == 1 else "/".join(map(str, counts))


def _widest(report: Report) -> str:
    if report.floor_bitwise or not report.floor:
        return ""
    return f" by at most {_number(max(update.grad_rel_l2 for update in report.floor))} (relative L2)"


def _number(value: float) -> str:
    return f"{value:.2e}" if math.isfinite(value) else "not finite"


def _plain(rows: list[tuple[str, ...]]) -> str:
    widths = [max(len(row[i]) for row in (COLUMNS, *rows)) for i in range(len(COLUMNS))]
    lines = [[f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)] for row in (COLUMNS, *rows)]
    return "\n".join("  ".join(line).rstrip() for line in lines)


def _rich(rows: list[tuple[str, ...]]) -> str:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for name in COLUMNS:
        table.add_column(name, justify="right")
    for row in rows:
        style: Any = "green" if row[-1] == "ok" else "bold red"
        table.add_row(*row, style=style)
    console = Console(force_terminal=True)
    with console.capture() as captured:
        console.print(table)
    return captured.get().rstrip("\n")
