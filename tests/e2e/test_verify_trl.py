"""TRL's DDPOTrainer, patched against unpatched. Each rehearsal covers several of its options."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from leangrpo_tools import fetch, lock
from leangrpo_tools.apply import apply
from leangrpo_tools.errors import KitError
from leangrpo_tools.rehearsal import secondlook, trees, verify
from leangrpo_tools.rehearsal.rehearse import find_script, rehearse
from leangrpo_tools.rehearsal.report import Report
from leangrpo_tools.rehearsal.runs import Injection
from leangrpo_tools.rehearsal.session import Session
from leangrpo_tools.rehearsal.verdict import Verdict

pytestmark = [pytest.mark.upstream, pytest.mark.slow]
SCRIPT = find_script("trl_ddpo")
FAULTS = Path(__file__).with_name("rehearsal_faults.py")


class Bench:
    """A patched checkout and the fork server all tests share."""

    def __init__(self, folder: Path, session: Session) -> None:
        self.session = session
        self.root = folder / "checkout"
        apply("trl-ddpo", self.root)
        self.trees = trees.export(self.root, folder / "ddpo", "ddpo")

    def rehearse(self, *inject: Injection, options: dict[str, Any] | None = None, **config: Any) -> Report:
        """One rehearsal; native runs of the same size are shared between the tests."""
        named = tuple((name, str(value)) for name, value in (options or {}).items())
        return rehearse(
            self.trees.rehearsal, self.trees.native, self.trees.patched, SCRIPT.configure(options=named, **config),
            session=self.session, inject=inject, timeout_s=60,
        )  # fmt: skip


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    entry = lock.load().upstreams["trl-ddpo"]
    assert not isinstance(entry, lock.EmbeddedEntry)
    if not fetch.cached("trl-ddpo", entry):
        pytest.skip("TRL is not in the cache; run once: apply-patch trl-ddpo /tmp/trl [--source URL|PATH]")
    folder = tmp_path_factory.mktemp("bench")
    # An installed trl must never be what is rehearsed.
    (folder / "installed/trl").mkdir(parents=True)
    (folder / "installed/trl/__init__.py").write_text("raise RuntimeError('this is the installed trl')\n")
    with pytest.MonkeyPatch.context() as patch, Session(folder / "runs") as session:
        patch.syspath_prepend(folder / "installed")
        yield Bench(folder, session)


def assert_ok(report: Report) -> None:
    assert report.ok, report.render()


def counts(report: Report, variant: str) -> list[tuple[int, int]]:
    """Policy forwards per rank, without grad and with."""
    found = report.forwards[variant]
    return list(zip(found.no_grad, found.grad, strict=True))


def replayed(report: Report) -> list[list[tuple[int, int]]]:
    """Per rank and window, rows that were replayed and rows that were recomputed."""
    return [[(window["replayed"], window["recomputed"]) for window in windows] for windows in report.windows]


def gradients(bench: Bench, variant: str) -> list[dict[str, torch.Tensor]]:
    """Per rank, the first update's gradients in the last rehearsal that ran this variant."""
    folders = sorted(bench.session.root.glob(f"*/out/{variant}"), key=lambda path: path.stat().st_mtime)
    return [torch.load(folders[-1] / f"rank{rank}/update0.pt", weights_only=True)["grads"] for rank in (0, 1)]


def test_lora_with_prompt_statistics(bench: Bench) -> None:
    report = bench.rehearse(updates=2, options={"prompt_stats": 1})
    assert_ok(report)
    assert report.floor_bitwise and report.bound.rel_l2 == 1e-5
    assert counts(report, "native") == [(24, 24)]  # 2 rollouts, 2 batches, 6 steps
    assert counts(report, "patched") == [(0, 24)]
    assert replayed(report) == [[(48, 0)] * 2]


def test_full_weights_in_two_inner_epochs_of_two_updates(bench: Bench) -> None:
    """The first of four updates is replayed; the second inner epoch, here half of it, has permutations of its own."""
    chosen: dict[str, Any] = {
        "updates": 3, "steps": 4, "updates_per_rollout": 4, "options": {"lora": 0, "inner_epochs": 2, "train_batch": 2},
    }  # fmt: skip
    report = bench.rehearse(**chosen)
    assert_ok(report)
    assert replayed(report) == [[(16, 0)]]
    off = bench.rehearse(schedule="recompute", **chosen)
    assert_ok(off)
    assert off.bound.bitwise and off.forwards["patched"] == off.forwards["native"]


def test_half_of_the_steps_in_bf16(bench: Bench) -> None:
    report = bench.rehearse(updates=1, steps=4, fraction=0.5, precision="bf16", checkpointing=True)
    assert_ok(report)
    assert counts(report, "native") == [(8, 4)]
    assert replayed(report) == [[(16, 0)]]
    assert report.updates[0].grad_rel_l2 > 1e-5 and "its own ratio is not 1" in report.render()


def test_two_ranks_train_their_own_copies_unless_told_otherwise(bench: Bench) -> None:
    report = bench.rehearse(ranks=2, updates=1)
    assert_ok(report)
    assert counts(report, "native") == [(12, 12)] * 2
    assert counts(report, "patched") == [(0, 12)] * 2
    assert report.collectives["native"] == report.collectives["patched"]
    first, second = gradients(bench, "native")
    assert not any(torch.equal(grad, second[name]) for name, grad in first.items())

    averaged = bench.rehearse(sync="late", ranks=2, updates=1)
    assert_ok(averaged)
    assert averaged.replicas == [True] and "sync late" in averaged.render()
    late, other = gradients(bench, "patched")
    assert all(torch.equal(grad, other[name]) for name, grad in late.items())
    mean = torch.cat([(first[name] + second[name]).flatten() / 2 for name in late])
    assert (torch.cat([grad.flatten() for grad in late.values()]) - mean).norm() <= 1e-5 * mean.norm()


def test_calls_cut_into_unequal_parts(bench: Bench) -> None:
    """The defaults of `--ranks 2`: a rank cuts a rollout's call of 4 rows into 1 and 3, and kernels round by rows."""
    chosen: dict[str, Any] = {"ranks": 2, "updates": 2, "updates_per_rollout": 2}
    report = bench.rehearse(**chosen)
    assert_ok(report)
    looked = report.second_look
    if not looked:
        pytest.skip("on this machine a row does not depend on its batch: the patched run is within the bound at once")
    assert looked["native"] > 1e-5 and looked["alike"] <= 1e-4  # else this tests nothing
    assert report.bound.rel_l2 == 1e-5 and report.updates[1].grad_rel_l2 < 1e-6
    cut = [json.loads(file.read_text())["rollout"] for file in bench.session.root.glob("*/out/patched/*/shapes.json")]
    assert {part["rows"] for calls in cut for call in calls if call for part in call[2]} >= {1, 3}
    # as large as what rounding makes of a native run's calls here, and no rounding
    faulty = bench.rehearse(Injection(f"{FAULTS}:skewed_adapters", None, args={"by": 5e-5}), **chosen)
    assert faulty.verdict is Verdict.MISMATCH and faulty.control_caught
    assert 1e-5 < faulty.second_look["native"] < 3 * looked["alike"] and faulty.second_look["fp64"] > 1e-7
    assert faulty.second_look["fp64_alike"] <= secondlook.EXACT and faulty.bound.rel_l2 == 1e-5


def test_without_guidance_in_the_update_nothing_is_replayed(bench: Bench) -> None:
    report = bench.rehearse(updates=1, steps=2, options={"train_cfg": 0})
    assert all(update.grad_bitwise and update.weights_bitwise for update in report.updates)
    assert replayed(report) == [[(0, 16)]]
    (warned,) = report.warnings
    assert report.verdict is Verdict.WARNED and warned.code == "LG411" and "inputs differ" in warned.text


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ((("train_batch", "3"),), "train_batch 3 has to divide sample_batch 4"),
        ((("inner_epochs", "2"),), "1 updates per rollout do not divide"),
        ((("sample_batch", "none"),), "whole numbers"),
        ((("sample", "4"),), "unknown option sample"),
    ],
)
def test_sizes_that_do_not_fit(bench: Bench, options: tuple[tuple[str, str], ...], words: str) -> None:
    with pytest.raises(KitError) as caught:
        verify("trl-ddpo", script="ddpo", tree=bench.root, options=options, session=bench.session)
    assert caught.value.code == "LG403" and words in caught.value.what


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("ranks", "options"),
    [(1, {"sample_batch": 1, "train_batch": 1}), (2, {"sample_batch": 1, "train_batch": 1}), (1, {"lora": 1})],
)
def test_gradients_in_place_of_graphs(bench: Bench, ranks: int, options: dict[str, Any]) -> None:
    """One per sample: every step of the first update's samples is walked as soon as it is drawn."""
    report = bench.rehearse(schedule="reweight", ranks=ranks, updates=2, updates_per_rollout=2, options=options)
    assert report.ok, report.render()
    assert report.updates[0].grad_rel_l2 <= 2e-6
    for rank in report.windows:
        for window in rank:
            assert window["recomputed"] == 0 and window["gradients"] == window["kept"] // 6
