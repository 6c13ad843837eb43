"""No bound of the suite relies on a library whose rounding of a row does not depend on the batch around it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support import rounding

ROOT = Path(__file__).parents[2]
# Where a row of the rollout lies in another batch than in the update, or calls are made again in other shapes.
AFFECTED = [
    "test_batched.py::test_equal",
    "test_batched.py::test_the_same_calls_are_bitwise",
    "test_batched.py::test_other_inputs_in_one_row",
    "test_chosen.py",
    "test_epoch.py::test_equal",
    "test_epoch.py::test_in_order_is_bitwise",
    "test_epoch.py::test_recompute_is_upstream",
    "test_reweight.py::test_a_kl_term_is_no_multiple",
    "test_reweight.py::test_batches",
    "test_reweight.py::test_two_calls_per_step",
    "test_reweight_parts.py",
    "test_shells.py::test_equal",
    "test_shells.py::test_gradients_in_place_of_graphs",
]

SEEN = """
import torch
from support import rounding
torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
layer, batch = torch.nn.Linear(24, 48), torch.randn(7, 24, requires_grad=True)
rounding.install()
whole, again = layer(batch), layer(batch)
assert torch.equal(whole, again), "equal calls differ"
for row in range(7):
    alone = layer(batch[row : row + 1])[0]
    assert not torch.equal(alone, whole[row]), f"row {row} rounds alike"
    assert (alone - whole[row]).abs().max() < 1e-14
moved = layer(batch.roll(-3, 0))
assert not torch.equal(moved.roll(3, 0), whole), "a row's place says nothing"
found = []
for part in (batch, batch[:3]):
    layer.zero_grad()
    found.append(torch.autograd.grad(layer(part).square().sum(), batch)[0][:3])
assert not torch.equal(*found) and (found[0] - found[1]).abs().max() < 1e-12
"""


def run(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=os.environ | {"PYTHONPATH": paths} | env, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def test_rows_alone_round_otherwise_and_equal_calls_alike() -> None:
    found = run("-c", SEEN)
    assert found.returncode == 0, found.stdout[-3000:]


@pytest.mark.slow
def test_bounds_hold_on_such_a_machine() -> None:
    tests = [str(ROOT / "tests" / "unit" / test) for test in AFFECTED]
    options = ["-q", "-n", "0", "-p", "no:cacheprovider"]
    found = run("-m", "pytest", *options, *tests, **{rounding.NAME: "by-shape"})
    assert found.returncode == 0 and " passed" in found.stdout, found.stdout[-3000:]
