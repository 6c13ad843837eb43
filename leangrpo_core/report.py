"""What a run says about itself: a line at the start, one per window, notices once; JSON lines and wandb where asked."""

import json
import math
import os
import sys
from pathlib import Path
from typing import Any

from . import agree
from .errors import LeanError
from .rows import BY_UP_TO
from .settings import Settings
from .window import Window

INPUTS_TOLD = {
    True: "they are replayed all the same (LEANGRPO_INPUTS=rounded)",
    False: "they are recomputed (LEANGRPO_INPUTS=rounded would replay them)",
}


def readable(count: float) -> str:
    """Bytes in decimal units, as LEANGRPO_BUDGET_GB counts them."""
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB"


class Report:
    """Prints on rank 0 only. If `LEANGRPO_REPORT_DIR` is set, each rank appends one JSON object per window there."""

    def __init__(self) -> None:
        self._said: set[str] = set()
        self._folder = os.environ.get("LEANGRPO_REPORT_DIR")

    def follows(self, window: Window) -> bool:
        """Whether each kept call of the window is measured: the first one, where somebody reads exact bytes."""
        return self._folder is not None and window.number == 1

    def say(self, text: str) -> None:
        if agree.rank() == 0:
            print(f"[leangrpo] {text}", flush=True)

    def once(self, text: str, about: str = "") -> None:
        """Says a text, or the first one about something, once in a run."""
        if (about or text) not in self._said:
            self._said.add(about or text)
            self.say(text)

    def start(self, settings: Settings, version: str) -> None:
        """The line that names the run. The folder of figures is made now: a rollout must not end in a missing one."""
        if self._folder:
            try:
                Path(self._folder).mkdir(parents=True, exist_ok=True)
            except OSError as error:
                fix = "name a folder that can be written"
                raise LeanError("LG601", f"LEANGRPO_REPORT_DIR: {error}", fix) from error
        self.say(f"{version} {settings.text()} settings={settings.digest()} ranks={agree.world_size()}")
        if settings.schedule == "retain" and settings.buffers != Settings.buffers:
            fix = "to use them, set LEANGRPO_SCHEDULE=reweight"
            self.say(f"buffers={settings.buffers} changes nothing here, since graphs are kept, not gradients: {fix}")

    def window(self, window: Window, flush: str) -> None:
        """One line for a window that is over, and its figures for those who read them."""
        if window.rounded:
            found = "; ".join(f"{what}{BY_UP_TO}{amount:.3g}" for what, amount in window.rounded.items())
            self.once(f"in the update {found}: {INPUTS_TOLD[window.rounding_allowed]}", about="rounded inputs")
        audit = max(window.audits, key=lambda found: (math.isnan(found), found), default=None)
        selected = len(window.positions) * max(len(window.sites), 1)
        figures = {
            "window": window.number,
            "calls": window.calls,
            "selected": selected,
            "kept": window.kept,
            "replayed": window.replayed,
            "recomputed": window.recomputed,
            "reasons": window.told(),
            "graph_bytes": window.graph_bytes,
            "peak_held_bytes": window.peak_held_bytes,
            "offloaded": window.offloaded,
            "host_bytes": window.host_bytes,
            "peak_host_bytes": window.peak_host_bytes,
            "flush": flush,
            "walks": window.walks,
            "gradients": window.reweight.buffers.peak if window.reweight else 0,
            "gradient_bytes": window.reweight.gradient_bytes if window.reweight else 0,
            "audit_rel_l2": None if audit is None or math.isnan(audit) else audit,
        }
        line = f"window {window.number}: kept {window.kept} of {selected} selected steps"
        if window.kept and window.reweight:
            line += f" as up to {figures['gradients']:.3g} gradients ({readable(figures['gradient_bytes'])} each)"
        elif window.kept:
            line += f" in {window.calls} calls ({readable(window.graph_bytes)} each, "
            line += f"{readable(window.peak_held_bytes)} at the peak)"
        if window.offloaded:
            line += f", {window.offloaded} of them in host memory ({readable(window.host_bytes)} each, "
            line += f"{readable(window.peak_host_bytes)} at the peak)"
        line += f", replayed {window.replayed}, recomputed {window.recomputed}"
        if window.replayed and not window.reweight:
            line += f"; flush {flush}" + (f" in {window.walks} parts" if window.walks > 1 else "")
        if audit is not None and math.isnan(audit):
            line += "; audit: upstream's own gradient is not finite, the next window is audited"
        elif audit is not None:
            line += f"; audit: relative difference to native {audit:.2g}"
        for reason, steps in window.told().items():
            line += f"; {steps} x {reason}"
        self.say(line)
        if self._folder:
            path = Path(self._folder) / f"rank{agree.rank()}.jsonl"
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(figures) + "\n")
        shown = ("kept", "replayed", "recomputed", "peak_held_bytes")
        self._wandb({f"leangrpo/{name}": figures[name] for name in shown})

    def _wandb(self, metrics: dict[str, Any]) -> None:
        """Into the run upstream has open, if any; `commit=False` leaves the step to upstream."""
        wandb = sys.modules.get("wandb")
        if agree.rank() == 0 and getattr(wandb, "run", None) is not None:
            wandb.log(metrics, commit=False)  # type: ignore[union-attr]
