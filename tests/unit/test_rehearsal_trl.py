"""The rehearsal of TRL's trainer, as far as it needs no TRL: sizes, bounds, where `trl` comes from, permutations."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from leangrpo_rehearsal import child
from leangrpo_rehearsal.base import Script
from leangrpo_rehearsal.scripts import trl_ddpo
from leangrpo_tools.rehearsal.rehearse import find_script

SCRIPT = find_script("trl_ddpo")


def configure(**chosen: Any) -> Any:
    options = chosen.pop("options", {})
    return SCRIPT.configure(options=tuple((name, str(value)) for name, value in options.items()), **chosen)


def flags(config: Any) -> dict[str, str]:
    argv = list(SCRIPT.launch(Path("work"), config).argv)
    return {name.removeprefix("--"): value for name, value in zip(argv[::2], argv[1::2], strict=True)}


def test_a_script_has_defaults_of_its_own() -> None:
    plain, own = Script().configure(updates=3), SCRIPT.configure(updates=3)
    assert (plain.generations, plain.fraction, own.generations, own.fraction) == (4, 0.6, 8, 1.0)
    assert plain.steps == own.steps == 6 and plain.updates == own.updates == 3
    assert SCRIPT.configure(fraction=0.5).fraction == 0.5
    assert (Script().trained(plain), SCRIPT.trained(own)) == (3, 6)


@pytest.mark.parametrize(
    ("chosen", "accumulation", "batches", "epochs"),
    [
        ({}, 2, 2, 1),
        ({"updates_per_rollout": 2}, 1, 2, 1),
        ({"updates_per_rollout": 4, "options": {"inner_epochs": 2, "train_batch": 2}}, 2, 2, 2),
        ({"options": {"sample_batch": 8, "train_batch": 1}}, 8, 1, 1),
    ],
)
def test_sizes(chosen: dict[str, Any], accumulation: int, batches: int, epochs: int) -> None:
    config = configure(**chosen)
    assert SCRIPT.supports(config) is None
    said = flags(config)
    assert said["train_gradient_accumulation_steps"] == str(accumulation)
    assert said["sample_num_batches_per_epoch"] == str(batches)
    assert said["train_num_inner_epochs"] == str(epochs)


@pytest.mark.parametrize(
    ("chosen", "other"),
    [
        ({"updates_per_rollout": 2}, None),
        ({"precision": "bf16"}, "2"),
        ({"precision": "bf16", "updates_per_rollout": 2}, "2"),
        ({"precision": "bf16", "options": {"train_batch": 2}}, "4"),
        ({"precision": "bf16", "updates_per_rollout": 8, "options": {"train_batch": 1}}, None),
    ],
)
def test_native_runs_are_regrouped_in_bf16(chosen: dict[str, Any], other: str | None) -> None:
    config = configure(**chosen)
    found = SCRIPT.regrouped(config)
    assert (found and found[0].option("train_batch", "")) == other
    if found:  # the same samples in one update
        before, after = flags(config), flags(found[0])
        name = "train_gradient_accumulation_steps"
        assert int(before["train_batch_size"]) * int(before[name]) == int(after["train_batch_size"]) * int(after[name])
        assert SCRIPT.supports(found[0]) is None


def test_recompute_has_to_be_bitwise() -> None:
    assert SCRIPT.bound(configure(schedule="recompute")).bitwise
    assert not SCRIPT.bound(configure()).bitwise


def test_the_driver_is_run_with_the_tree_first(tmp_path: Path) -> None:
    target, folders = child._program(SCRIPT, tmp_path)
    assert target.name == "trl_ddpo.py" and target.parent.name == "drivers" and folders == [str(tmp_path)]
    plain = find_script("dancegrpo_flux")
    target, folders = child._program(plain, tmp_path)
    assert target == tmp_path / plain.path and folders == [str(target.parent), str(tmp_path)]


def test_an_installed_trl_is_not_rehearsed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "installed/trl").mkdir(parents=True)
    (tmp_path / "installed/trl/__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path / "installed")
    with pytest.raises(ImportError, match="trl would be imported from"):
        SCRIPT.install(SimpleNamespace(tree=tmp_path / "tree"))  # type: ignore[arg-type]


def test_permutations_do_not_depend_on_other_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = []
    for noise in (0, 3):
        monkeypatch.setattr(torch, "randperm", torch.randperm)
        trl_ddpo.permutations(7)
        torch.randn(noise)
        drawn.append([torch.randperm(9), torch.randperm(5, device=torch.device("cpu"))])
        monkeypatch.undo()
    assert all(torch.equal(a, b) for a, b in zip(*drawn, strict=True))
