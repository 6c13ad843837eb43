"""Graphs in host memory under every wrapper: {upstream, late} x checkpointing x {fp32, bf16 autocast}, 2 ranks."""

import functools
from typing import Any

import pytest
from support import ranks
from support.check import assert_same
from support.grpo import Policy
from support.offloaded import KeywordPolicy, StillPolicy, checkpointed, trio
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl

pytestmark = [pytest.mark.matrix, pytest.mark.filterwarnings("ignore")]
KINDS = ["none", "ddp", "fsdp", "fsdp-orig", "fsdp-grad-op", "fsdp-none-orig", "fsdp-bf16", "fsdp-bf16-orig", "fsdp2"]
CHECKPOINTS: dict[str, dict[str, Any]] = {
    "": {"policy": KeywordPolicy},
    "positional": {"policy": Policy, "checkpointing": True},
    "keyword": {"policy": KeywordPolicy, "wrapped": checkpointed()},
    "reentrant": {"policy": StillPolicy, "wrapped": checkpointed(CheckpointImpl.REENTRANT)},
}


@functools.cache
def found_for(kind: str, sync: str, bf16: bool, checkpoint: str) -> Any:
    """Per rank the trainings natively, with graphs on the device, and on the host."""
    config = {"config": {"bf16": bf16}, "env": {"LEANGRPO_SYNC": sync, "LEANGRPO_AUDIT": "first"}}
    return ranks.run(trio, 2, kind, CHECKPOINTS[checkpoint] | config, seconds=120)


@pytest.mark.parametrize(
    ("kind", "sync"), [*((kind, "upstream") for kind in KINDS), *((kind, "late") for kind in ("ddp", "fsdp", "fsdp2"))]
)
@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_bits_and_bytes(kind: str, sync: str, bf16: bool, checkpoint: str) -> None:
    """Bitwise as with all graphs on the device; natively, too, where upstream's order of sums is kept."""
    found, bare = found_for(kind, sync, bf16, checkpoint), found_for("none", "upstream", bf16, checkpoint)
    for (native, device, on_host), (_, _, alone) in zip(found, bare, strict=True):
        assert_same(on_host.result, device.result)
        joint = sync == "late" and kind.startswith("fsdp") and "bf16" not in kind
        if not joint and kind != "ddp":
            assert_same(on_host.result, native.result)
        window = on_host.windows[-1]
        # A reentrant checkpoint keeps the tensors of a container: fewer graphs fit beside them.
        least, moved = (3, 2) if checkpoint == "reentrant" else (6, 4)
        assert window["replayed"] >= least and window["offloaded"] >= moved, window
        assert window["peak_held_bytes"] <= 1.6 * window["graph_bytes"], window
        # Gathered weights are not copied: no more than without a wrapper, but for arguments that FSDP casts.
        assert window["host_bytes"] <= alone.windows[-1]["host_bytes"] * (1 if "bf16" not in kind else 1.1), window
        assert on_host.window["audit_rel_l2"] == 0.0 or (joint and on_host.window["audit_rel_l2"] < 1e-6)
