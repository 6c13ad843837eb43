"""A bench as a picture: each way's ratio to native, beside the bound, and what it holds."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

from leangrpo_tools.errors import KitError

if TYPE_CHECKING:
    from leangrpo_tools.rehearsal.timing import BenchReport


def check(file: Path) -> None:
    """Raises LG403 before anything is timed if the picture could not be drawn."""
    if importlib.util.find_spec("matplotlib") is None:
        raise KitError("LG403", f"--picture {file} needs matplotlib", fix="pip install matplotlib")
    if not file.parent.is_dir():
        raise KitError("LG403", f"--picture {file}: there is no folder {file.parent}", fix="name a file in a folder")


def draw(report: BenchReport, file: Path) -> None:
    """Writes the picture, in the format of the file's ending."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    timings = report.timings[::-1]
    names, places = [item.name for item in timings], range(len(timings))
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 1.2 + 0.45 * len(names)), sharey=True)
    left.barh(places, [report.ratio(item) for item in timings], color="#4477aa", label="measured")
    bounds = [report.bound(item) for item in timings]
    left.plot(bounds, places, "k|", markersize=14, markeredgewidth=2, label="bound")
    left.set_yticks(places, names)
    left.set_xlabel("native seconds / seconds")
    left.legend(loc="lower right")
    right.barh(places, [item.held_bytes / 1e6 for item in timings], color="#ccbb44")
    right.set_xlabel("MB of kept graphs at the peak")
    figure.suptitle(f"{report.upstream} {report.script}, {report.config.ranks} rank(s), CPU")
    figure.tight_layout()
    figure.savefig(file, dpi=120)
    pyplot.close(figure)
