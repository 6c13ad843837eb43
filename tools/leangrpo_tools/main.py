"""The commands' entry points: what the kit needs and cannot import is an error with a code here, too."""

from __future__ import annotations

import sys

from leangrpo_tools.packages import broken


def _run(name: str) -> None:
    try:
        from leangrpo_tools import cli

        getattr(cli, name)()
    except ImportError as error:
        problem = broken(error)
        if problem is None:
            raise
        print(problem, file=sys.stderr)
        raise SystemExit(problem.exit_code) from None


def leangrpo() -> None:
    """Entry point."""
    _run("leangrpo")


def apply_patch() -> None:
    """Entry point."""
    _run("apply_patch")


def diff_patch() -> None:
    """Entry point."""
    _run("diff_patch")


def revert_patch() -> None:
    """Entry point."""
    _run("revert_patch")


def verify_patch() -> None:
    """Entry point."""
    _run("verify_patch")


def bench_patch() -> None:
    """Entry point."""
    _run("bench_patch")
