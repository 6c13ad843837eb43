"""`leangrpo support --measure`: rehearses scripts, reads upstream's launch files, and writes down what came out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from leangrpo_tools.apply import apply
from leangrpo_tools.errors import KitError
from leangrpo_tools.plan import plan
from leangrpo_tools.recipe import Script
from leangrpo_tools.rehearsal import verify
from leangrpo_tools.rehearsal.rehearse import find_script
from leangrpo_tools.rehearsal.report import Report
from leangrpo_tools.rehearsal.session import Session
from leangrpo_tools.rehearsal.verdict import NOTHING_REPLAYED
from leangrpo_tools.support import RANKS, Support, put, scripts, support

Options = tuple[tuple[str, str], ...]
SHARED: Options = (("layout", "shared"), ("prompts", "2"), ("generations", "4"))


def measure(name: str = "", script: str = "", say: Callable[[str], None] = lambda text: None) -> Support:
    """Rehearses every script, those of one upstream, or one, and writes each one's figures as they come.

    Two updates, one per rollout, so that all of both is replayed, in fp32; with graphs on one and two ranks, with
    gradients in their place on one, and with shared prompts, where a script knows them, on two.

    Raises:
        KitError: LG401 where a script cannot be rehearsed here, or does not match; others as `apply`.
    """
    wanted = list(scripts(name, script))
    with Session() as session:
        folder = session.folder()
        trees: dict[str, Path] = {}
        for upstream, item in wanted:
            if upstream not in trees:
                trees[upstream] = folder / upstream
                apply(upstream, trees[upstream])
            figures: dict[str, Any] = {"launch": _launches(upstream, item, trees[upstream])}
            if item.rehearsal:
                figures |= rehearsed(upstream, item, trees[upstream], session)
            say(f"{upstream} {item.name}: {figures}")
            put(upstream, item.name, figures)
    return support()


def rehearsed(upstream: str, script: Script, tree: Path, session: Session) -> dict[str, Any]:
    """What the rehearsals of one script find. Raises LG401 if one of them is no match."""
    exact = {}
    for ranks in RANKS:
        report = _verified(upstream, script, tree, session, ranks=ranks)
        exact[str(ranks)] = {
            "rel_l2": _worst(report),
            "bound": 0.0 if report.bound.bitwise else report.bound.rel_l2,
        }
    report = _verified(upstream, script, tree, session, schedule="reweight")
    walked = all(rank[-1]["gradients"] for rank in report.windows if rank)  # a first window may have been in vain
    figures = {"exact": exact, "reweight": _worst(report) if walked else None, "shared": None}
    known = find_script(script.rehearsal)
    if "layout" in known.options and not known.supports(known.configure(options=SHARED)):
        sync = "upstream" if known.synchronised else "late"  # shared prompts need shared gradients
        config = {"ranks": 2, "updates_per_rollout": 2, "sync": sync, "options": SHARED}
        report = _verified(upstream, script, tree, session, **config)
        figures["shared"] = _worst(report)
    return figures


def _worst(report: Report) -> float:
    """Relative L2 of the gradients before clipping; 0 where gradients and weights are equal to the bit."""
    return max(0.0 if u.grad_bitwise and u.weights_bitwise else u.grad_rel_l2 for u in report.updates)


def _verified(
    upstream: str, script: Script, tree: Path, session: Session, *, options: Options = (), **config: Any
) -> Report:
    options = options or find_script(script.rehearsal).shown
    report = verify(upstream, script=script.name, tree=tree, session=session, options=options, **config)
    nothing = [warning for warning in report.warnings if warning.code == NOTHING_REPLAYED]
    unsaid = [warning.text for warning in nothing if not report.nothing_to_replay]
    if report.problems or unsaid:
        raise KitError(
            "LG401", f"{upstream} {script.name} does not match: {'; '.join(report.problems + unsaid)}",
            fix=f"verify-patch {upstream} --script {script.name} shows the whole report",
        )  # fmt: skip
    return report


def _launches(upstream: str, script: Script, tree: Path) -> list[dict[str, Any]]:
    found = []
    for file in script.launch:
        try:
            size = plan(upstream, tree / file).rollout
        except KitError as error:
            if error.code != "LG506":
                raise
            continue
        found.append({
            "file": file, "updates": size.updates, "share": round(size.free / size.trained, 4),
            "ratio": round(size.ratio, 4),
        })  # fmt: skip
    return found
