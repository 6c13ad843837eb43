"""What goes around the network of a preset's script: its own FSDP, or what `accelerate launch` is told to use."""

from __future__ import annotations

from dataclasses import dataclass

from leangrpo_tools.plan import launch, sharding
from leangrpo_tools.plan.accelerate import Started
from leangrpo_tools.plan.choice import Wrapper
from leangrpo_tools.plan.facts import Facts, ScriptFacts
from leangrpo_tools.plan.presetsize import Blocked
from leangrpo_tools.plan.sharding import Sharding

_MULTI_GPU = "--config_file with distributed_type: MULTI_GPU"
_WHOLE = "every GPU then holds all weights in fp32"
_DEEPSPEED = Blocked(
    "the launch file starts DeepSpeed, whose engine the runtime leaves alone", _MULTI_GPU,
    f"DDP in place of DeepSpeed: {_WHOLE}",
)  # fmt: skip
_OFFLOADED = Blocked(sharding.OFFLOADED, _MULTI_GPU, f"DDP in place of FSDP: {_WHOLE}")


@dataclass(frozen=True)
class Wrapped:
    """The wrapper.

    Attributes:
        wrapper: its kind.
        layout: how it spreads weights; None where every rank holds the whole network.
        checkpointed: the share of blocks with activation checkpointing.
        blocked: why nothing is kept through it.
        uncounted: why its bytes are not counted.
    """

    wrapper: Wrapper
    layout: Sharding | None = None
    checkpointed: float = 0.0
    blocked: Blocked | None = None
    uncounted: str = ""


DDP = Wrapped("ddp")


def by(
    known: Facts, script: ScriptFacts, started: Started | None, training: launch.Training | None, ranks: int,
    precision: str, rows: int,
) -> Wrapped:  # fmt: skip
    """The wrapper of a run with so many ranks, whose calls take so many samples."""
    share = float(script.always_checkpointed)
    own = script.wrapper or known.wrapper
    if own != "ddp":
        layout = sharding.of("FULL_SHARD", ranks, None, low=script.low_precision, offloaded=False)
        return Wrapped(own, layout if own == "fsdp" else None, share)
    if started is not None and started.deepspeed:
        return Wrapped("ddp", None, share, _DEEPSPEED, "DeepSpeed lays out weights, gradients and moments by itself")
    if started is not None and started.kind == "FSDP":
        return _fsdp(started, training, ranks, precision != "no", rows, share)
    return Wrapped("ddp", None, share)


def _fsdp(
    started: Started, training: launch.Training | None, ranks: int, low: bool, rows: int, share: float
) -> Wrapped:
    said = {str(name).removeprefix("fsdp_"): str(value) for name, value in started.fsdp.items()}
    policy = said.get("auto_wrap_policy", "NO_WRAP").upper()
    offloaded = said.get("offload_params", "false").lower() == "true"
    if said.get("activation_checkpointing", "false").lower() == "true" and policy == "TRANSFORMER_BASED_WRAP":
        share = 1.0
    node = sharding.node_of(training.before if training else [], started.processes, started.machines)
    strategy = _strategy(said)
    layout = sharding.of(strategy, ranks, node, low=low, offloaded=offloaded, whole=policy == "NO_WRAP")
    if policy not in ("NO_WRAP", "TRANSFORMER_BASED_WRAP"):
        layout = Sharding(low=low, offloaded=offloaded, why=f"units by {policy} are not counted")
    blocked = _OFFLOADED if offloaded else _mixed(rows, low) if rows > 1 and ranks > 1 else None
    return Wrapped("fsdp", layout, share, blocked)


def _strategy(said: dict[str, str]) -> str:
    """Torch's name: accelerate also takes its number, and a switch for FSDP2."""
    names = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
    switch = said.get("reshard_after_forward", "").upper()
    given = said.get("sharding_strategy", switch or "FULL_SHARD").upper()
    if given in ("TRUE", "FALSE"):
        return "FULL_SHARD" if given == "TRUE" else "SHARD_GRAD_OP"
    return names[int(given) - 1] if given in "12345" and len(given) == 1 else given


def _mixed(rows: int, low: bool) -> Blocked:
    """Calls with several samples, which the update trains in other batches than the rollout drew them in."""
    late = "weights in 16 bits rule that out here" if low else "that is not planned here"
    why = (
        f"under FSDP a call of {rows} samples is kept only where the update trains batches as they were drawn, and "
        f"upstream mixes them; with LEANGRPO_SYNC=late it could be, but {late}"
    )
    return Blocked(why, _MULTI_GPU, f"DDP in place of FSDP: {_WHOLE}")
