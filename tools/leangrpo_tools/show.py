"""What the commands print: results as text and JSON, errors with their code, exit statuses."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from typing import Any

from leangrpo_tools.errors import KitError
from leangrpo_tools.gitcmd import GitFailed, clean_environment


def on_terminal() -> bool:
    """Whether colour makes sense on stdout."""
    return sys.stdout.isatty()


@dataclass
class Outcome:
    """Where a command puts its result."""

    file: Path | None

    def done(self, result: Any, text: Callable[[Any], str]) -> None:
        """Print the text, write the JSON, and end with the result's ``exit_code`` if it has one."""
        to_stdout = self.file is not None and str(self.file) == "-"
        if not to_stdout:
            _say(text(result))
        plain = _plain(result)
        if self.file is not None:
            self.write(plain)
        status = getattr(result, "exit_code", 0)
        if status:
            raise SystemExit(status)

    def write(self, plain: Any) -> None:
        """Write JSON; numbers that JSON does not know are refused."""
        text = json.dumps(plain, indent=2, ensure_ascii=False, allow_nan=False, default=str) + "\n"
        if str(self.file) == "-":
            sys.stdout.write(text)
        elif self.file is not None:
            try:
                self.file.write_text(text, encoding="utf-8")
            except OSError as err:
                raise KitError("LG112", f"{self.file} cannot be written: {err.strerror}") from err


@contextmanager
def outcome(file: Path | None) -> Iterator[Outcome]:
    """Run a command's body; an error becomes its message and exit status."""
    clean_environment()
    out = Outcome(file)
    try:
        yield out
    except GitFailed as err:
        problem = KitError("LG110", f"{err}", cause="an unexpected answer of git", fix="git --version; git status")
        raise SystemExit(_fail(out, problem)) from err
    except KitError as err:
        raise SystemExit(_fail(out, err)) from err
    except BrokenPipeError:
        sys.stderr.close()
        raise SystemExit(0) from None


def _fail(out: Outcome, err: KitError) -> int:
    print(err, file=sys.stderr)
    if out.file is not None and err.code != "LG112":
        out.write({"ok": False, "error": err.to_json()})
    return err.exit_code


def _say(text: str) -> None:
    if text:
        print(text)


def _plain(result: Any) -> Any:
    if hasattr(result, "to_json"):
        return result.to_json()
    return {"ok": True, **result.__dict__} if is_dataclass(result) else result


def applied(result: Any) -> str:
    """``apply-patch``."""
    if result.dry_run:
        sys.stdout.buffer.write(result.diff)
        sys.stdout.buffer.flush()
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
        try:
            output.write_bytes(result.text)
        except OSError as err:
            raise KitError("LG112", f"{output} cannot be written: {err.strerror}") from err
        print(f"written to {output}", file=sys.stderr)
    else:
        sys.stdout.buffer.write(result.text)
        sys.stdout.buffer.flush()
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
