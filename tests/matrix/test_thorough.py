"""`verify-patch --thorough`: branches that the command line does not enter are rehearsed, and count."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from support.edits import drop, edited

from leangrpo_rehearsal.base import Branch
from leangrpo_rehearsal.scripts import mini
from leangrpo_tools.apply import apply
from leangrpo_tools.rehearsal import trees
from leangrpo_tools.rehearsal.rehearse import rehearse
from leangrpo_tools.rehearsal.session import Session
from leangrpo_tools.rehearsal.verdict import Verdict

pytestmark = [pytest.mark.matrix, pytest.mark.slow]


def test_each_branch_has_its_verdict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One exit status for all; a branch that cannot be rehearsed is named, and takes no verdict away."""
    apply("mini", tmp_path / "mini", scripts=["train"])
    found = trees.export(tmp_path / "mini", tmp_path / "trees", "train")
    config = mini.SCRIPT.configure(updates=2)
    known = mini.SCRIPT.branches(config)
    assert [branch.words for branch in known] == ["EMA (--ema)"]
    broken = Branch("a learning rate that is no number", {"options": (("learning_rate", "fast"),)})
    monkeypatch.setattr(type(mini.SCRIPT), "branches", lambda self, config: [] if config.ema else [*known, broken])
    train = found.patched / "mini_grpo" / "train.py"
    text = train.read_text(encoding="utf-8")
    with Session(tmp_path / "runs") as session:

        def run(**how: Any) -> Any:
            return rehearse("mini", found.native, found.patched, config, session=session, control=False, **how)

        good = run(thorough=True)
        train.write_text(edited(text, [drop("self.average.follow")]), encoding="utf-8")
        alone, wrong = run(), run(thorough=True)
    assert [(words, report.verdict) for words, report in good.further] == [("EMA (--ema)", Verdict.MATCH)]
    assert (good.verdict, good.exit_code) == (Verdict.MATCH, 0)
    assert [words for words in good.not_tested if broken.words in words and "LG401" in words]
    assert not [words for words in good.not_tested if "EMA" in words]
    assert good.further[0][1].config == dataclasses.replace(config, ema=True)
    assert alone.verdict is Verdict.MATCH and [words for words in alone.not_tested if "EMA (--ema)" in words]
    assert [report.verdict for _, report in wrong.further] == [Verdict.MISMATCH]
    assert wrong.exit_code == 1 and wrong.problems[0].startswith("EMA (--ema): update")
