"""What the commands print: their results as text."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Any

from leangrpo_tools.output import on_terminal, outcome, say, write_file

__all__ = ["on_terminal", "outcome"]


def applied(result: Any) -> str:
    """``apply-patch``."""
    if result.dry_run:
        say(result.diff)
    lines = [f"notice: {text}" for text in result.notices]
    lines += [f"warning: {text}" for text in result.warnings]
    lines += [f"skipped {name}: {error['code']}: {error['what']}" for name, error in result.skipped.items()]
    scripts = ", ".join(result.scripts)
    if result.dry_run:
        edited = sum(kind == "edited" for kind in result.files.values())
        lines.append(f"dry run: {edited} files would be edited ({scripts}); nothing was written")
        print("\n".join(lines), file=sys.stderr)
        return ""
    if not result.changed:
        lines.append(f"{result.dest} is patched already ({scripts}); nothing was changed")
        return "\n".join(lines)
    for name, places in result.edits.items():
        lines.append(f"  {name}: {sum(len(place['lines']) for place in places)} places")
    added = sum(kind == "added" for kind in result.files.values())
    lines.append(f"  and {added} files of the runtime" if added else "  the runtime is imported from leangrpo_core")
    lines.insert(0, f"patched {result.upstream} ({scripts}) in {result.dest}")
    lines.append(f"took {result.fetch_seconds:.1f} s to check out and {result.patch_seconds:.1f} s to patch")
    lines.append(
        f"next: diff-patch {shlex.quote(str(result.dest))}   verify-patch {result.upstream} "
        f"--script {result.scripts[0]} --tree {shlex.quote(str(result.dest))}"
    )
    return "\n".join(lines)


def bundled(result: Any) -> str:
    """``leangrpo bundle``."""
    return "".join(f"notice: {text}\n" for text in result.notices) + (
        f"{result.upstream} and the kit are in {result.file} ({result.bytes / 1e6:.1f} MB)\n"
        f"next, on the other machine: apply-patch {result.upstream} --bundle {result.file.name}"
    )


def differs(result: Any, output: Path | None) -> None:
    """``diff-patch``: the diff alone on stdout or in the file, so that ``git apply`` takes it."""
    if output is not None:
        write_file(output, result.text)
        print(f"written to {output}", file=sys.stderr)
    else:
        say(result.text)
    if result.edited:
        print(f"edited after the patch, shown with it: {', '.join(result.edited)}", file=sys.stderr)
    if result.left_out:
        print(f"left out: {len(result.left_out)} files of the runtime in {result.vendor} (--all)", file=sys.stderr)


def reverted(result: Any) -> str:
    """``revert-patch``."""
    lines = [f"notice: {text}" for text in result.notices]
    if result.restored or result.removed:
        lines.append(f"reverted {result.dest}: {len(result.restored)} files restored, {len(result.removed)} removed")
    return "\n".join(lines)


def checked(result: Any) -> str:
    """``leangrpo check``."""
    by = f": {result.upstream} ({', '.join(result.scripts)}), by leangrpo-kit {result.kit}" if result.patched else ""
    lines = [f"{result.dest}{by}"]
    lines += [f"  {name}: edited; the patch is whole" for name, what in result.files.items() if what == "edited"]
    lines += [f"  {text}" for text in result.problems]
    return "\n".join([*lines, "  not as it should be" if result.problems else "  patched and up to date"])


def rehearsed(report: Any) -> str:
    """``verify-patch`` and ``bench-patch``."""
    return report.render()


def planned(report: Any) -> str:
    """``leangrpo plan``."""
    return report.render()


def listed(found: Any) -> str:
    """``leangrpo list``."""
    lines = []
    for item in found:
        lines.append(f"{item['name']}  {item['pin']}  from {item['from']}{' (cached)' if item['cached'] else ''}")
        for name, script in item["scripts"].items():
            lines.append(f"  {name:10} {script['file']}")
            lines.append(f"  {'':10} updates per rollout: {script['updates_per_rollout']}")
        lines += [f"  {name:10} {left['file']}: left alone (LG210)" for name, left in item["refused"].items()]
    return "\n".join(lines)


def state(found: Any) -> str:
    """``leangrpo status``."""
    lines = ["an earlier run was interrupted: the next apply-patch or revert-patch completes it"]
    lines = lines if found["interrupted"] else []
    if not found["patched"]:
        return "\n".join([*lines, f"{found['dest']}: not patched"])
    lines.append(
        f"{found['dest']}: {found['upstream']} ({', '.join(found['scripts'])}), by leangrpo-kit {found['kit']}"
    )
    if found["up_to_date"] is False:
        lines.append("this kit has a newer patch: run apply-patch again")
    lines.append(f"edited after the patch: {', '.join(found['edited']) or 'nothing'}")
    if found["conflicting"]:
        lines.append(f"merge not finished: {', '.join(found['conflicting'])}")
    if found["missing"]:
        lines.append(f"missing: {', '.join(found['missing'])}: run apply-patch again")
    return "\n".join(lines)
