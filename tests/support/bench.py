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

    def __init__(self, upstream: str, folder: Path, session: Session) -> None:
        self.session, self.folder = session, folder
        self.root = folder / "checkout"
        apply(upstream, self.root)
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


def bench_of(upstream: str, folder: Path) -> Iterator[Bench]:
    """For a fixture. Skips where the upstream is not in the cache, and says how to fill it."""
    entry = lock.load().upstreams[upstream]
    assert isinstance(entry, lock.GitEntry)
    if not fetch.cached(upstream, entry):
        pytest.skip(f"{upstream} is not in the cache; run once: apply-patch {upstream} /tmp/x [--source URL|PATH]")
    with Session(folder / "runs") as session:
        yield Bench(upstream, folder, session)


def assert_ok(report: Report) -> None:
    """The verdict is a match; the whole report if not."""
    assert report.ok, report.render()
