"""Single faults in patched scripts, recipes and the runtime, one at a time: each must have a word in the report.

    bash tools/test -m matrix tests/matrix/test_single_faults.py -n 0 -s

prints the table: the fault, its kind, ranks, the verdict, and what has caught it. A fault after which less is saved
makes a warning at least; one that is wrong a mismatch, or it stands under "not tested". What is harmless is equal in
every bit, with all replayed.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from support.edits import edited
from support.faultlist import FLUX, GONE, HARMLESS, MINI, SD3, UNSEEN, Fault

from leangrpo_tools import data, fetch, lock
from leangrpo_tools.apply import apply
from leangrpo_tools.errors import KitError
from leangrpo_tools.rehearsal import trees
from leangrpo_tools.rehearsal.rehearse import find_script, rehearse
from leangrpo_tools.rehearsal.report import Report
from leangrpo_tools.rehearsal.session import Session
from leangrpo_tools.rehearsal.verdict import Verdict

pytestmark = [pytest.mark.matrix, pytest.mark.slow, pytest.mark.upstream]
SIZES = {"DanceGRPO": {"updates": 4, "updates_per_rollout": 2}, "flowGRPO": {"updates": 2, "updates_per_rollout": 2}}
ALL = [("DanceGRPO", "flux", FLUX), ("mini", "train", MINI), ("flowGRPO", "sd3", SD3)]
CASES = [(up, script, fault, ranks) for up, script, faults in ALL for fault in faults for ranks in fault.ranks]


@dataclasses.dataclass
class Table:
    """Patched trees, the session that all rehearsals share, and the rows so far."""

    session: Session
    folder: Path
    found: dict[str, trees.Trees] = dataclasses.field(default_factory=dict)

    def of(self, upstream: str, script: str) -> trees.Trees:
        """Both trees of a script."""
        if upstream not in self.found:
            entry = lock.load().upstreams[upstream]
            if isinstance(entry, lock.GitEntry) and not fetch.cached(upstream, entry):
                pytest.skip(f"{upstream} is not in the cache; run once: apply-patch {upstream} /tmp/x")
            apply(upstream, self.folder / upstream, scripts=[script])
            self.found[upstream] = trees.export(self.folder / upstream, self.folder / f"{upstream} trees", script)
        return self.found[upstream]


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Table]:
    folder = tmp_path_factory.mktemp("faults")
    print(f"\n{'upstream':10} {'fault':48} {'kind':8} ranks  {'verdict':20} what caught it")
    with Session(folder / "runs") as session:
        yield Table(session, folder)


def faulty(fault: Fault, patched: Path, target: Path) -> Path:
    """A copy of the patched tree with the fault."""
    shutil.copytree(patched, target)
    runtime, scripts = [], []
    for file in target.rglob("*.py"):
        if "_leangrpo" in file.parts:
            runtime.append(file)
        elif "_leangrpo" in file.read_text(encoding="utf-8", errors="replace"):
            scripts.append(file)
    if fault.text is not None:
        module, old, new = fault.text
        (changed,) = [file for file in runtime if file.stem == module]
        source = changed.read_text(encoding="utf-8")
        assert source.count(old) == 1
        changed.write_text(source.replace(old, new), encoding="utf-8")
    for edit in fault.edits:
        done = 0
        for file in scripts:
            try:
                file.write_text(edited(file.read_text(encoding="utf-8"), [edit]), encoding="utf-8")
                done += 1
            except (LookupError, StopIteration):
                continue
        assert done, f"{fault.what}: an edit finds nothing"
    return target


def without(upstream: str, script: str, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tree patched by a recipe that leaves a place out."""
    kit = tmp_path / "kit"
    for name in ("patches", "leangrpo_core"):
        shutil.copytree(data.data_root() / name, kit / name)
    shutil.copyfile(data.data_root() / "upstreams.lock", kit / "upstreams.lock")
    recipe = kit / "patches" / upstream / "recipe.yaml"
    found = yaml.safe_load(recipe.read_text(encoding="utf-8"))
    owner = found["scripts"][script]
    owner = found["families"][owner["family"]] if "family" in owner else owner
    left = [edit for edit in owner["edits"] if edit.get("name") != place]
    assert len(left) == len(owner["edits"]) - 1
    owner["edits"] = left
    recipe.write_text(yaml.safe_dump(found, sort_keys=False), encoding="utf-8")
    with monkeypatch.context() as patching:
        patching.setattr(data, "data_root", lambda: kit)
        apply(upstream, tmp_path / "tree", scripts=[script])
        return trees.export(tmp_path / "tree", tmp_path / "trees", script).patched


@pytest.mark.parametrize(
    ("upstream", "script", "fault", "ranks"), CASES, ids=[f"{c[0]}: {c[2].what}, ranks {c[3]}" for c in CASES]
)
def test_a_fault_has_a_word(
    table: Table, upstream: str, script: str, fault: Fault, ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = table.of(upstream, script)
    verdict, word = "refused", ""
    try:
        tree = (
            without(upstream, script, fault.recipe, tmp_path, monkeypatch)
            if fault.recipe
            else faulty(fault, found.patched, tmp_path / "patched")
        )
    except KitError as error:
        tree, word = None, str(error)
    if tree is not None:
        config = find_script(found.rehearsal).configure(
            ranks=ranks, ema=fault.ema, precision=fault.precision, options=fault.options, **SIZES.get(upstream, {})
        )
        report = rehearse(
            found.rehearsal, found.native, tree, config, session=table.session, timeout_s=60, control=False
        )
        verdict, word = report.verdict.value, said(fault, report)
    print(f"{upstream:10} {fault.what:48} {fault.kind:8} {ranks:5}  {verdict:20} {shown(word)}", flush=True)
    assert word, f"{fault.what}: {verdict} without a word"


def said(fault: Fault, report: Report) -> str:
    """The word on the fault, or nothing."""
    if fault.kind == HARMLESS:
        return f"harmless: {fault.named}" if spotless(report) else ""
    words = list(report.problems)
    if fault.kind == GONE:
        words += [f"{item.code}: {item.text}" for item in report.warnings]
    if fault.kind == UNSEEN and any(fault.named and fault.named in left for left in report.not_tested):
        words.append(f"not tested: {fault.named}")
    return words[0] if words else ""


def shown(word: str) -> str:
    """In one line of the table."""
    return " ".join(word.split())[:160] or "NO WORD"


def spotless(report: Report) -> bool:
    """Equal in every bit, and all is replayed that can be."""
    equal = all(item.grad_bitwise and item.weights_bitwise for item in report.updates)
    replayed = all(item.possible and not item.missing for item in report.repeated)
    return report.verdict is Verdict.MATCH and report.bound.bitwise and equal and replayed
