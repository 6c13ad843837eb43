"""ddpo-pytorch: what the recipe changes, and its script patched against unpatched."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.toytree import contents, git

from leangrpo_tools import fetch, lock
from leangrpo_tools.apply import apply
from leangrpo_tools.diff import diff
from leangrpo_tools.errors import KitError
from leangrpo_tools.rehearsal import trees, verify
from leangrpo_tools.rehearsal.rehearse import find_script, rehearse
from leangrpo_tools.rehearsal.report import Report
from leangrpo_tools.rehearsal.session import Session
from leangrpo_tools.revert import revert

pytestmark = pytest.mark.upstream
NAME = "ddpo-pytorch"
SCRIPT = find_script("ddpo_pytorch")
SINGLE = {"sample_batch": 1, "train_batch": 1}
PIPELINE = "ddpo_pytorch/diffusers_patch/pipeline_with_logprob.py"


@pytest.fixture(scope="module")
def patched(tmp_path_factory: pytest.TempPathFactory) -> Any:
    entry = lock.load().upstreams[NAME]
    assert isinstance(entry, lock.GitEntry)
    if not fetch.cached(NAME, entry):
        pytest.skip(f"{NAME} is not in the cache; fill it with: apply-patch {NAME} /tmp/ddpo [--source URL|PATH]")
    return apply(NAME, tmp_path_factory.mktemp("real") / "d")


class Bench:
    """Both trees and the fork server all rehearsals share."""

    def __init__(self, root: Path, folder: Path, session: Session) -> None:
        self.root, self.session = root, session
        self.trees = trees.export(root, folder / "trees", "train")

    def rehearse(self, options: dict[str, Any] | None = None, **config: Any) -> Report:
        """One rehearsal."""
        named = tuple((name, str(value)) for name, value in (options or {}).items())
        return rehearse(
            self.trees.rehearsal, self.trees.native, self.trees.patched, SCRIPT.configure(options=named, **config),
            session=self.session, timeout_s=60,
        )  # fmt: skip


@pytest.fixture(scope="module")
def bench(patched: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    folder = tmp_path_factory.mktemp("bench")
    with Session(folder / "runs") as session:
        yield Bench(patched.dest, folder, session)


def ok(report: Report) -> Report:
    assert report.ok, report.render()
    return report


def counts(report: Report, variant: str) -> list[tuple[int, int]]:
    """Policy forwards per rank, without grad and with."""
    found = report.forwards[variant]
    return list(zip(found.no_grad, found.grad, strict=True))


def replayed(report: Report) -> list[list[tuple[int, int]]]:
    """Per rank and window, rows that were replayed and rows that were recomputed."""
    return [[(window["replayed"], window["recomputed"]) for window in windows] for windows in report.windows]


def test_every_anchor_matches_and_only_two_files_change(patched: Any) -> None:
    script, pipeline = ((patched.dest / name).read_text() for name in ("scripts/train.py", PIPELINE))
    for call in ("rollout_batch", "row_order", "step_order", "identity", "flush"):
        assert script.count(f"lean.{call}(") == 1, call
    assert script.count("lean.policy_call(") == 2 and "torch.randperm" not in script
    assert pipeline.count("lean.rollout_call(") == pipeline.count("lean.scored(") == 1 and "self.unet(" not in pipeline
    added = [line for line in diff(patched.dest).text.decode().splitlines() if line.startswith("+")]
    assert max(map(len, added)) <= 121
    assert "2 files changed" in diff(patched.dest, stat=True).text.decode()
    assert git(patched.dest, "status", "--porcelain") == ""
    assert any("LoRA and mixed precision" in text for text in patched.warnings)


def test_round_trip(patched: Any) -> None:
    after = contents(patched.dest)
    revert(patched.dest)
    assert git(patched.dest, "status", "--porcelain") == "" and not (patched.dest / "ddpo_pytorch/_leangrpo").exists()
    apply(NAME, patched.dest)
    assert contents(patched.dest) == after


@pytest.mark.slow
def test_one_update_takes_the_whole_rollout(bench: Bench) -> None:
    """Two ranks under DDP around the adapters alone, which share gradients natively and patched."""
    report = ok(bench.rehearse(updates=1, steps=3, ranks=2, options={"prompt_stats": 1}))
    assert report.floor_bitwise and report.bound.rel_l2 == 1e-5
    assert counts(report, "native") == [(6, 6)] * 2  # 2 batches, 3 steps
    assert counts(report, "patched") == [(0, 6)] * 2
    assert replayed(report) == [[(24, 0)]] * 2
    assert report.replicas and all(report.replicas)


@pytest.mark.matrix
def test_single_samples_as_upstream_has_them(bench: Bench) -> None:
    """Bitwise, with two updates per rollout: no call has other rows than natively."""
    report = ok(bench.rehearse(updates=2, updates_per_rollout=2, generations=2, steps=3, options=SINGLE))
    assert all(update.grad_bitwise and update.weights_bitwise for update in report.updates)
    assert counts(report, "native") == [(6, 6)] and counts(report, "patched") == [(3, 6)]


@pytest.mark.matrix
@pytest.mark.parametrize(("lora", "forwards"), [(1, (4, 4)), (0, (0, 4))])
def test_low_precision(bench: Bench, lora: int, forwards: tuple[int, int]) -> None:
    """With adapters accelerate's autocast is in the update's calls only, so nothing is kept; without them in both."""
    size: dict[str, Any] = {"generations": 2, "steps": 2, "precision": "bf16"}
    report = ok(bench.rehearse(updates=1, options=SINGLE | {"lora": lora}, **size))
    assert all(update.grad_bitwise and update.weights_bitwise for update in report.updates)
    assert counts(report, "native") == [(4, 4)] and counts(report, "patched") == [forwards]


def test_sizes_that_do_not_fit(patched: Any) -> None:
    for options, words in (((("train_batch", "3"),), "has to divide"), ((("sample", "4"),), "unknown option sample")):
        with pytest.raises(KitError) as caught:
            verify(NAME, script="train", tree=patched.dest, options=options)
        assert caught.value.code == "LG403" and words in caught.value.what


@pytest.mark.matrix
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    ("chosen", "bitwise"),
    [
        ({"updates_per_rollout": 2}, False),
        ({"updates_per_rollout": 2, "schedule": "recompute"}, True),
        ({"updates_per_rollout": 2, "schedule": "reweight"}, False),
        ({"updates_per_rollout": 4, "options": {"inner_epochs": 2, "train_batch": 2, "lora": 0}}, False),
        ({"fraction": 0.5, "options": {"prompt_stats": 1}}, False),
        ({"options": {"train_cfg": 0}}, True),
        ({"precision": "bf16", "options": {"lora": 0}}, False),
    ],
)
def test_the_other_ways(bench: Bench, ranks: int, chosen: dict[str, Any], bitwise: bool) -> None:
    report = ok(bench.rehearse(updates=4, ranks=ranks, **chosen))
    assert all(update.grad_bitwise for update in report.updates) or not bitwise
    if chosen.get("schedule") == "reweight":
        assert all(window["recomputed"] == 0 < window["gradients"] for rank in report.windows for window in rank)
