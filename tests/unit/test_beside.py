"""What a rehearsal compares beside gradients, and how much of what could be replayed it counts as replayed."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch

from leangrpo_rehearsal.base import Bound, Branch
from leangrpo_rehearsal.beside import CLIPPED, LIMIT, NORM, UNCLIPPED, Repeated, decided, differences, moved, repeated
from leangrpo_rehearsal.scripts import dancegrpo_flux
from leangrpo_rehearsal.witness import Witness, as_number
from leangrpo_tools.rehearsal import replays
from leangrpo_tools.rehearsal.verdict import HELD_IN_VAIN, PARTLY_REPLAYED

BITWISE, CLOSE = Bound(True, 0.0), Bound(False, 1e-6)


def told(**values: list[Any]) -> dict[str, Any]:
    return {"told": values}


@pytest.mark.parametrize(
    ("native", "patched", "bitwise", "close"),
    [
        ([1.0, 2.0], [1.0, 2.0], True, True),
        ([1.0, 2.0], [1.0, 2.0 + 1e-9], False, True),
        ([1.0, 2.0], [1.0, 2.1], False, False),
        ([1.0, 2.0], [1.0], False, False),
        ([], [1.0], False, False),
        ([0.0], [1e-8], False, True),
        ([1.0], [math.nan], False, False),
        ([math.nan], [math.nan], False, False),
        (["torch.bfloat16"], ["off"], False, False),
        (["torch.bfloat16"], ["torch.bfloat16"], True, True),
    ],
)
def test_numbers_under_a_name(native: list[Any], patched: list[Any], bitwise: bool, close: bool) -> None:
    found = differences(told(loss=native), told(loss=patched), 1)
    assert all(item.within(BITWISE) for item in found) == bitwise
    assert all(item.within(CLOSE) for item in found) == close
    assert all(item.rank == 1 and "loss on rank 1" in item.text() for item in found)


def test_averaged_weights() -> None:
    weights = torch.arange(1.0, 5.0)

    def held(tensor: torch.Tensor | None) -> dict[str, Any]:
        return {"averages": {} if tensor is None else {"EMA.weights": tensor}}

    assert not differences(held(weights), held(weights.clone()), 0)
    for other in (None, weights[:3], weights.double(), weights * 1.01, weights * math.nan):
        (found,) = differences(held(weights), held(other), 0)
        assert not found.within(BITWISE) and not found.within(CLOSE)
    (found,) = differences(held(weights), held(weights * (1 + 1e-6)), 0)
    assert not found.within(BITWISE) and found.within(CLOSE)


def test_what_a_script_logs_is_noted_and_clocks_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys
    import types

    module = types.ModuleType("wandb")
    monkeypatch.setattr(module, "log", lambda values, **_: None, raising=False)
    monkeypatch.setitem(sys.modules, "wandb", module)
    for holder in (torch, torch.Tensor):
        monkeypatch.setattr(holder, "clamp", holder.clamp)
    schedulers: Any = torch.optim.lr_scheduler
    for cls in (schedulers.LRScheduler, schedulers.ReduceLROnPlateau):
        monkeypatch.setattr(cls, "step", cls.step)
    monkeypatch.setattr("leangrpo_rehearsal.witness.after_import", lambda name, hook: None)
    witness = Witness()
    witness.install()
    logged = {"loss": torch.tensor(0.5), "step_time": 3.0, "timestep": 7, "picture": object(), "leangrpo/kept": 3}
    module.log(logged, step=1)
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=0.5)
    scheduler = schedulers.ConstantLR(optimizer, factor=1.0)
    optimizer.step()
    scheduler.step()
    ratio = torch.tensor([0.8, 1.0, 1.3], requires_grad=True)
    torch.clamp(ratio, 1 - 0.1, 1 + 0.1)
    ratio.clamp(min=0.9, max=1.1)
    torch.clamp(ratio, -5.0, 5.0)
    witness.step(optimizer)
    notes, averages = witness.cut()
    assert averages == {} and "logged step_time" not in notes and not any("leangrpo" in name for name in notes)
    assert (notes["logged loss"], notes["logged timestep"]) == ([0.5], [7.0]) and "logged picture" not in notes
    assert notes["scheduler steps"] == [0.0, 1.0] and notes["learning rate of group 0"] == [0.5]
    assert (notes[CLIPPED], notes[UNCLIPPED]) == ([2.0, 2.0], [1.0, 1.0])
    assert witness.cut()[0] == {}


class HeldEMA:
    """An average of weights, as scripts hold one."""

    def __init__(self) -> None:
        self.averages = [torch.zeros(2), torch.zeros(1)]


def test_whether_an_average_moved() -> None:
    """Unknown where there is none: one that a script never updates says nothing of its updates."""
    witness, notes = Witness(), []
    notes.append(witness.cut()[0])
    held = HeldEMA()
    witness = Witness()
    notes.extend(witness.cut()[0] for _ in range(2))
    assert not moved(notes)
    held.averages[0].add_(1.0)
    told, averages = witness.cut()
    assert moved([*notes, told]) and averages["HeldEMA.averages.0"].tolist() == [1.0, 1.0]
    assert not moved([witness.cut()[0]])


def test_numbers_that_are_logged() -> None:
    assert (as_number(True), as_number("0.25"), as_number(torch.ones(1))) == (1.0, 0.25, 1.0)
    assert as_number(torch.ones(2)) is None
    assert as_number("0.5s") is None and as_number(None) is None and as_number([1.0]) is None


def test_whether_clipping_decided() -> None:
    all_clipped = {CLIPPED: [1.0], UNCLIPPED: [0.0], NORM: [2.0], LIMIT: [3.0]}
    some = {CLIPPED: [1.0, 0.0], UNCLIPPED: [0.0, 1.0], NORM: [math.nan], LIMIT: [3.0]}
    assert decided([all_clipped, some, {}, {NORM: [2.0], LIMIT: [1.0]}]) == (1, 1)


def runs(*updates: tuple[int, int]) -> list[list[dict[str, Any]]]:
    """One rank's records of so many evaluations without and with gradient in each update."""
    rows, found = {"no_grad": 0, "grad": 0}, []
    for without, with_grad in updates:
        rows = {"no_grad": rows["no_grad"] + without, "grad": rows["grad"] + with_grad}
        found.append([{"rows": rows}])
    return found


@pytest.mark.parametrize(
    ("patched", "saved", "held", "codes"),
    [
        ([(18, 6), (0, 6)], 6, 6, []),
        ([(24, 6), (0, 6)], 0, 0, [PARTLY_REPLAYED]),  # nothing held
        ([(21, 6), (0, 6)], 3, 3, [PARTLY_REPLAYED]),  # a window of one sample of two
        ([(12, 12), (0, 6)], 6, 12, [HELD_IN_VAIN]),  # a window of two updates
        ([(18, 11), (0, 6)], 1, 6, [PARTLY_REPLAYED, HELD_IN_VAIN]),  # held, and evaluated again
    ],
)
def test_what_was_replayed_is_counted_from_outside(
    patched: list[tuple[int, int]], saved: int, held: int, codes: list[str]
) -> None:
    """Whatever the runtime says of itself: here that it has replayed all."""
    found = repeated(runs((24, 6), (0, 6)), runs(*patched), 2)
    assert found == [Repeated(1, 0, 6, saved, held)]
    windows = [[{"replayed": 6, "selected": 6, "reasons": {}}]]
    assert [warned.code for warned in replays.warnings(found, windows, ())] == codes
    assert f"{saved} of 6" in "".join(replays.lines(found, windows, ()))


def test_reasons_that_a_rehearsal_knows_make_no_warning() -> None:
    found = repeated(runs((24, 6)), runs((21, 6)), 1)
    windows = [[{"replayed": 3, "selected": 6, "reasons": {"inputs differ: first latent": 3}}]]
    assert not replays.warnings(found, windows, ("first latent",))
    assert "3 x inputs differ: first latent" in replays.lines(found, windows, ("first latent",))[1]
    assert len(replays.lines(found, windows, ())) == 1
    (warned,) = replays.warnings(found, windows, ("something else",))
    assert warned.code == PARTLY_REPLAYED and "3 x inputs differ: first latent" in warned.text
    windows[0][0]["reasons"] = {"inputs differ: first latent": 2, "hooks changed": 1}
    assert replays.warnings(found, windows, ("first latent",))


def test_branches_are_entered_by_another_configuration() -> None:
    script = dancegrpo_flux.SCRIPT
    config = script.configure(updates=4, updates_per_rollout=2)
    two = dataclasses.replace(config, ranks=2)
    entered = {branch.words.split(" (")[0]: branch.of(script, config) for branch in script.branches(config)}
    alone = entered["without --use_group"]
    assert alone is not None and alone.generations == 4 and alone.option("group", "1") == "0"
    assert entered["EMA"] == dataclasses.replace(config, ema=True)
    assert entered["resuming from a checkpoint"] is None
    on_policy = entered["LEANGRPO_UPDATES=on-policy"]
    assert on_policy is not None and (on_policy.generations, on_policy.option("prompts", "1")) == (4, "2")
    assert entered["LEANGRPO_LAYOUT=shared"] is None
    both = {branch.words.split(" (")[0]: branch.of(script, two) for branch in script.branches(two)}
    shared = both["LEANGRPO_LAYOUT=shared"]
    assert shared is not None and shared.option("layout", "native") == "shared"
    several = entered["several prompts per rank"]
    assert several is not None and several.generations == 4 and several.option("prompts", "1") == "2"
    assert not {branch.words for branch in script.branches(several)} & {"several prompts per rank"}
    assert Branch("x", {"options": (("unheard", "of"),)}).of(script, config) is None
