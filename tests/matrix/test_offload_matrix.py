"""Graphs in host memory under every wrapper: {upstream, late} x checkpointing x {fp32, bf16 autocast}, 2 ranks."""

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


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sync", ["upstream", "late"])
@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_bits_and_bytes(kind: str, sync: str, bf16: bool, checkpoint: str) -> None:
    """Bitwise as with all graphs on the device; natively, too, where upstream's order of sums is kept."""
    if kind == "fsdp2" and checkpoint == "reentrant" and sync == "late":
        pytest.skip("refused by name, as without host memory")
    options = CHECKPOINTS[checkpoint] | {"config": {"bf16": bf16}, "env": {"LEANGRPO_SYNC": sync, "LEANGRPO_AUDIT": "first"}}
    found = ranks.run(trio, 2, kind, options, seconds=120)
    bare = ranks.run(trio, 2, "none", options, seconds=120) if kind != "none" else found
    for (native, device, on_host), (_, _, alone) in zip(found, bare, strict=True):
        assert_same(on_host.result, device.result)
        joint = sync == "late" and kind.startswith("fsdp") and "bf16" not in kind
        if not (joint or kind == "ddp" or sync == "late"):
            assert_same(on_host.result, native.result)
        window = on_host.windows[-1]
        assert window["replayed"] == 6 and window["offloaded"] >= 4, window
        assert window["peak_held_bytes"] <= 1.6 * window["graph_bytes"], window
        # Gathered weights are not copied: no more than without a wrapper, but for arguments that FSDP casts.
        assert window["host_bytes"] <= alone.windows[-1]["host_bytes"] * (1 if "bf16" not in kind else 1.1), window
        assert on_host.window["audit_rel_l2"] == 0.0 or (joint and on_host.window["audit_rel_l2"] < 1e-6)
