"""A patched checkout of a real upstream, and a fork server that all tests of a file share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from leangrpo_tools import fetch, lock
from leangrpo_tools.apply import apply
from leangrpo_tools.rehearsal import trees
from leangrpo_tools.rehearsal.rehearse import find_script, rehearse
from leangrpo_tools.rehearsal.report import Report
from leangrpo_tools.rehearsal.runs import Injection
from leangrpo_tools.rehearsal.session import Session


class Bench:
    """Rehearses scripts of one upstream; native runs of the same size are shared between the tests."""

    def __init__(self, upstream: str, folder: Path, session: Session, scripts: list[str] | None = None) -> None:
        self.session, self.folder = session, folder
        self.root = folder / "checkout"
        apply(upstream, self.root, scripts=scripts)
        self.trees: dict[str, trees.Trees] = {}

    def rehearse(
        self, script: str, *inject: Injection, timeout_s: float = 60, options: dict[str, Any] | None = None,
        **config: Any,
    ) -> Report:  # fmt: skip
        """One rehearsal; `options` are the script's own."""
        if script not in self.trees:
            self.trees[script] = trees.export(self.root, self.folder / script, script)
        found = self.trees[script]
        chosen = tuple((name, str(value)) for name, value in (options or {}).items())
        configured = find_script(found.rehearsal).configure(options=chosen, **config)
        return rehearse(
            found.rehearsal, found.native, found.patched, configured, session=self.session, inject=inject,
            timeout_s=timeout_s,
        )  # fmt: skip


def bench_of(upstream: str, folder: Path, scripts: list[str] | None = None) -> Iterator[Bench]:
    """For a fixture, with all scripts or those named. Skips where the upstream is not in the cache, saying how to fill
    it."""
    entry = lock.load().upstreams[upstream]
    assert isinstance(entry, lock.GitEntry)
    if not fetch.cached(upstream, entry):
        pytest.skip(f"{upstream} is not in the cache; run once: apply-patch {upstream} /tmp/x [--source URL|PATH]")
    with Session(folder / "runs") as session:
        yield Bench(upstream, folder, session, scripts)


def assert_ok(report: Report) -> None:
    """The verdict is a match; the whole report if not."""
    assert report.ok, report.render()


def assert_first_update_is_replayed(report: Report) -> None:
    """Of a script of FlowGRPO's, on every rank, in full: no policy call with grad is left in it, and the rollout's are
    the network's only ones."""
    config = report.config
    trained = find_script(f"flowgrpo_{report.script}").trained(config)
    batch = int(config.option("batch", "2"))
    batches = config.generations // batch // config.updates_per_rollout
    native, patched = report.forwards["native"], report.forwards["patched"]
    for rank, windows in enumerate(report.windows):
        whole = [(batches * batch * trained,) * 2 + (0,)] * len(windows)
        assert [(w["kept"], w["replayed"], w["recomputed"]) for w in windows] == whole
        # Calls with grad: the kept ones of the rollout in place of as many of the first update.
        assert patched.grad[rank] == native.grad[rank]
        assert patched.no_grad[rank] == native.no_grad[rank] - len(windows) * batches * trained
