"""`leangrpo plan` against rehearsals of three sizes each: bytes of a graph, collectives, and the ratio.

Ratios are medians of CPU seconds, native and patched in turn. `recompute` does what the untouched tree does to the bit,
so both count as native. The plan is given what forwards and backwards cost natively, and predicts the rest.

In the smallest rehearsals a forward takes a few milliseconds, and what it takes to hold a call (copies, comparisons,
checksums of the weights) is no longer small beside it: ratios come out lower than the plan says. So they do where the
kept graphs together no longer fit in the processor's cache and one of them does (batch 8).
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass

import pytest

from leangrpo_tools.plan import families
from leangrpo_tools.plan.choice import Case, Choice
from leangrpo_tools.plan.cost import Rollout
from leangrpo_tools.plan.memory import Memory
from leangrpo_tools.plan.networks import Model
from leangrpo_tools.plan.traffic import traffic
from leangrpo_tools.rehearsal import bench, verify

pytestmark = pytest.mark.matrix
BYTES, RATIO = 0.10, 0.10


def mini(width: int, layers: int, sixteen_bit: bool = False) -> Model:
    return families.flux(
        width, layers, 2 * layers, head=32, channels=16, text=width, text_tokens=16, sixteen_bit=sixteen_bit
    )


def tiny_flux(sixteen_bit: bool) -> Model:
    """The rehearsal's: two double and three single blocks of width 32; a token is 16 pixels wide."""
    return families.flux(
        32, 2, 3, head=16, channels=64, text=32, text_tokens=5, sixteen_bit=sixteen_bit, guidance=True, patch=16,
        copied=True,
    )  # fmt: skip


def tiny_sd3(width: int, layers: int) -> Model:
    return families.sd3(width, layers, head=16, rank=32, text_tokens=SD3_TEXT, sixteen_bit=False)


SD3_TEXT = 205
"""77 tokens of CLIP and 128 of T5."""


@dataclass(frozen=True)
class Size:
    """A rehearsal of some size, and the network it trains."""

    upstream: str
    script: str
    options: dict[str, str]
    model: Model
    pixels: float
    inputs: int = 1
    precision: str = "fp32"
    checkpointing: bool = False
    ratio: float = RATIO
    """How far off the predicted ratio may be; more where holding a call costs as much as its forward."""
    repeat: int = 3
    rollouts: int = 4

    @property
    def graph(self) -> float:
        """Bytes of a kept graph by the plan's formula."""
        element = 4 if self.precision == "fp32" else 2
        graph = Memory(
            self.model, 1.0, 1, self.pixels, 1e12, sharded=False, checkpointed=float(self.checkpointing),
            inputs=self.inputs, element=element,
        ).graph  # fmt: skip
        assert graph is not None
        return graph


def _mini(width: int, layers: int, **more: object) -> Size:
    options = {"width": str(width), "layers": str(layers), "eval_every": "0"}
    sixteen = more.get("precision") == "bf16"
    return Size("mini", "train", options, mini(width, layers, sixteen), 256, **more)  # type: ignore[arg-type]


def _flux(side: int, **more: object) -> Size:
    sixteen = more.get("precision") == "bf16"
    return Size("DanceGRPO", "flux", {"side": str(side)}, tiny_flux(sixteen), side**2, **more)  # type: ignore[arg-type]


def _sd3(size: str, batch: int, **more: float) -> Size:
    width, layers = {"tiny": (32, 2), "mid": (256, 6), "large": (384, 6)}[size]
    options = {"size": size, "batch": str(batch), "evaluate": "0"}
    inputs = 2 * batch  # guided
    return Size("flowGRPO", "sd3", options, tiny_sd3(width, layers), 64, inputs, **more)  # type: ignore[arg-type]


SIZES = [
    _mini(64, 1, ratio=0.2), _mini(128, 2), _mini(256, 2), _mini(384, 2),
    _flux(64, ratio=0.15), _flux(256), _flux(384),
    _sd3("tiny", 2, ratio=0.3), _sd3("mid", 2, repeat=2, rollouts=3), _sd3("mid", 4, repeat=2, rollouts=3),
    _sd3("large", 2, repeat=2, rollouts=3), _sd3("mid", 8, ratio=0.25, repeat=2, rollouts=3),
]  # fmt: skip
OTHERS = [
    _mini(64, 1, checkpointing=True), _mini(128, 2, checkpointing=True, precision="bf16"),
    _flux(64, checkpointing=True, precision="bf16"), _flux(256, checkpointing=True, precision="bf16"),
    _flux(384, checkpointing=True),
]  # fmt: skip


@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size.script}-{'-'.join(size.options.values())}")
def test_ratio_and_bytes(size: Size, capsys: pytest.CaptureFixture[str]) -> None:
    report = bench(
        size.upstream, script=size.script, repeat=size.repeat, rollouts=size.rollouts, updates_per_rollout=1,
        clock="cpu", schedule="retain", options=list(size.options.items()),
    )  # fmt: skip
    native, recompute, retain = report.timings
    predicted = report.predicted["retain"]
    ratio = statistics.median(native.seconds + recompute.seconds) / retain.median
    with capsys.disabled():
        print(
            f"\n{size.upstream} {size.options}: ratio {ratio:.3f} (of native alone {report.ratio(retain):.3f}, "
            f"native to recompute {report.ratio(recompute):.3f}), plan {predicted:.3f} "
            f"({predicted / ratio - 1:+.1%}); graph {retain.graph_bytes} bytes, plan {size.graph:.0f} "
            f"({size.graph / retain.graph_bytes - 1:+.1%})"
        )
    assert size.graph == pytest.approx(retain.graph_bytes, rel=BYTES)
    assert predicted == pytest.approx(ratio, rel=size.ratio)


@pytest.mark.parametrize(
    "size", OTHERS, ids=lambda size: f"{size.script}-{'-'.join(size.options.values())}-{size.precision}"
)
def test_bytes_with_checkpointing(size: Size, capsys: pytest.CaptureFixture[str]) -> None:
    report = bench(
        size.upstream, script=size.script, repeat=1, updates_per_rollout=1, precision=size.precision,
        checkpointing=True, schedule="retain", options=list(size.options.items()),
    )  # fmt: skip
    found = next(item for item in report.timings if item.name == "retain").graph_bytes
    with capsys.disabled():
        print(f"\n{size.upstream} {size.options} {size.precision}: {found} bytes, plan {size.graph / found - 1:+.1%}")
    assert size.graph == pytest.approx(found, rel=BYTES)


@pytest.mark.parametrize("sync", ["upstream", "late"])
def test_collectives(sync: str) -> None:
    """mini on two ranks, two updates of two samples per rollout: what the runs make, less what setting up makes.

    Weights are gathered unit by unit, three blocks and the root; the root's are still there after a forward.
    """
    report = verify("mini", script="train", ranks=2, updates=4, updates_per_rollout=2, sync=sync, options=[
        ("eval_every", "0")
    ])  # fmt: skip
    assert not report.failures
    # 4 samples of 6 steps, of which int(5 * 0.6) = 3 are trained
    case = Case(Rollout(4, 4, 6, 3, 2, 2.1), 2, "fsdp", prompts=1, generations=4)
    rollouts, blocks = 2, 3
    native, patched = report.collectives["native"], report.collectives["patched"]
    planned = [traffic(case, choice, 1.0) for choice in (Choice(), Choice("retain", sync=sync))]
    assert native["reduce_scatter"] == planned[0].reductions * rollouts * (blocks + 1)
    assert patched["reduce_scatter"] == planned[1].reductions * rollouts * (blocks + 1)
    fewer = (planned[0].gathers - planned[1].gathers) * rollouts
    assert fewer * blocks <= native["all_gather"] - patched["all_gather"] <= fewer * (blocks + 1)
