"""How good `LEANGRPO_SCHEDULE=auto` chooses: ten configurations, each way of running timed in turn with the others.

    bash tools/test -m matrix tests/matrix/test_auto_grid.py -n 0 -s

Prints a table; `GRID=SD3` before the command leaves it at the configurations that have this in their names. Ways are
compared by processor seconds of a rollout with its updates, which other programs on the machine disturb less than the
clock; `auto` itself goes by the clock, as on a GPU. A choice is good if its way, as timed here, is the best one or
within 3 % of it: by medians, and, in the last column, by the fastest rollouts, which a loaded machine disturbs least.
The spread of the figures stands beside the verdict.
"""

import os
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support.bench import Bench, bench_of

from leangrpo_tools.rehearsal import timing, trees
from leangrpo_tools.rehearsal.rehearse import find_script
from leangrpo_tools.rehearsal.session import Session
from leangrpo_tools.rehearsal.timing import Timing

pytestmark = [pytest.mark.matrix, pytest.mark.slow, pytest.mark.upstream]
WITHIN, GOOD, REPEAT = 0.03, 8, 3
WAYS = ("recompute", "retain", "reweight sample", "reweight affine")
MINI = {"eval_every": "100"}
# Name, upstream, script, part of the graphs that the budget holds (None: no limit), configuration.
GRID: list[tuple[str, str, str, float | None, dict[str, Any]]] = [
    ("mini", "mini", "train", None, {"options": MINI}),
    ("mini, half", "mini", "train", 0.5, {"updates_per_rollout": 2, "options": MINI | {"width": "128"}}),
    ("mini, nothing", "mini", "train", 0.0, {"options": MINI}),
    ("mini, 2 ranks", "mini", "train", None, {"ranks": 2, "options": MINI}),
    ("FLUX", "DanceGRPO", "flux", None, {}),
    ("FLUX, small, 2 ranks", "DanceGRPO", "flux", 0.2, {"ranks": 2, "updates_per_rollout": 2}),
    ("FLUX, checkpoints", "DanceGRPO", "flux", None, {"checkpointing": True}),
    ("SD3", "flowGRPO", "sd3", None, {}),
    ("SD3, mid", "flowGRPO", "sd3", None, {"options": {"size": "mid"}}),
    ("SD3, half, 2 ranks", "flowGRPO", "sd3", 0.5, {"ranks": 2, "updates_per_rollout": 2}),
]


@pytest.fixture(scope="module")
def benches(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Bench]]:
    opened = {name: bench_of(name, tmp_path_factory.mktemp(name)) for name in ("DanceGRPO", "flowGRPO")}
    found = {name: next(bench) for name, bench in opened.items()}
    with Session(tmp_path_factory.mktemp("mini") / "runs") as session:
        found["mini"] = Bench("mini", tmp_path_factory.mktemp("mini"), session)
        yield found
    for bench in opened.values():
        next(bench, None)


def measure(bench: Bench, script: str, repeat: int, only: tuple[str, ...], **config: Any) -> dict[str, Timing]:
    if script not in bench.trees:
        bench.trees[script] = trees.export(bench.root, bench.folder / script, script)
    found = bench.trees[script]
    options = tuple(config.pop("options", {}).items())
    chosen = find_script(found.rehearsal).configure(options=options, **config)
    report = timing.measure(
        found.rehearsal, found.native, found.patched, chosen, session=bench.session, upstream="", repeat=repeat,
        only=only,
    )  # fmt: skip
    return {item.name: item for item in report.timings}


def spread(item: Timing) -> float:
    """Half of what lies between the quartiles, as a part of the median."""
    low, middle, high = statistics.quantiles(item.cpu, n=4)
    return (high - low) / 2 / middle


def losses(found: dict[str, Timing], of: Callable[[list[float]], float]) -> list[float]:
    """By which part the way that each process has chosen is slower than the best one."""
    seconds = {way: of(item.cpu) for way, item in found.items() if way != "auto"}
    return [seconds[pick] / min(seconds.values()) - 1 for pick in choices(found["auto"])]


def choices(item: Timing) -> list[str]:
    """What each process has chosen in the end."""
    found: list[str] = []
    again = False
    for line in item.said:
        again = again or "from here on" in line or "chooses again" in line
        way = line.split(":")[0].split(" with ")[0]
        if way not in WAYS:
            continue
        if again or "a window takes" in line:
            found[-1] = way
        else:
            found.append(way)
        again = False
    return found


def test_auto_is_the_best_or_close(benches: dict[str, Bench]) -> None:
    good, rows = 0, []
    chosen = [item for item in GRID if os.environ.get("GRID", "") in item[0]]
    for name, upstream, script, part, config in chosen:
        bench, budget = benches[upstream], "unlimited"
        if part is not None:
            once = {"schedule": "retain", "options": {}} | config
            held = measure(bench, script, 1, ("retain",), **once)["retain"].held_bytes if part else 0
            budget = f"{held * part / 1e9:.9f}"
        found = measure(bench, script, REPEAT, (*WAYS, "auto"), schedule="auto", budget_gb=budget, **config)
        seconds = {way: statistics.median(item.cpu) for way, item in found.items()}
        picks, loss, lowest = choices(found["auto"]), losses(found, statistics.median), losses(found, min)
        fine = sum(lost <= WITHIN for lost in loss) * 2 > len(picks)
        good += fine
        rows.append(
            f"{name:22} {' '.join(f'{seconds[way]:9.3f}' for way in (*WAYS, 'auto'))}  "
            f"{max(map(spread, found.values())):6.1%}  {found['auto'].held_bytes / 1e6:8.2f} {budget[:9]:>9}  "
            f"{', '.join(picks):30} {max(loss):6.1%} {'good' if fine else 'BAD ':4} {max(lowest):6.1%}"
        )
        print(rows[-1], flush=True)
        print(*(f"    {line}" for line in found["auto"].said), sep="\n", flush=True)
        if part is not None:
            assert found["auto"].held_bytes <= float(budget) * 1e9, name
            assert found["auto"].gradients * found["auto"].gradient_bytes <= float(budget) * 1e9, name
    head = "\nprocessor s            recompute    retain    sample    affine      auto  spread"
    print(head + "   held MB budget GB  choices, loss at worst, by the fastest")
    print(*rows, f"{good} of {len(chosen)} within {WITHIN:.0%}", sep="\n")
    assert good >= min(GOOD, len(chosen))
