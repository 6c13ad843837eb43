"""Bytes of a script's network on one rank, or why they are not known and what to do then."""

from __future__ import annotations

from dataclasses import dataclass

from leangrpo_tools.plan.asked import Machine
from leangrpo_tools.plan.facts import ScriptFacts
from leangrpo_tools.plan.memory import Memory
from leangrpo_tools.plan.named import Named
from leangrpo_tools.plan.networks import Graph, sized
from leangrpo_tools.plan.sharding import Sharding

MEASURE = "say what a graph takes: --graph-gb GB; a run prints it in its first window's line (`calls (1.1 GB each`)"


@dataclass(frozen=True)
class Sized:
    """One rank's memory, as far as it is known.

    Attributes:
        memory: None where the network or its layout is not known.
        why: why it is not known what has room; empty where it is.
        help: what to do then.
    """

    memory: Memory | None
    why: str = ""
    help: str = ""


@dataclass(frozen=True)
class Call:
    """One call of the network.

    Attributes:
        pixels: height times width of a sample; None where they are not known.
        frames: latent frames.
        inputs: samples, and with guidance in the same call as many again.
        checkpointed: the share of blocks that are.
        lora: a LoRA is trained, not the whole network.
        sixteen_bit: under 16-bit autocast.
    """

    pixels: float | None
    frames: int = 1
    inputs: int = 1
    checkpointed: float = 1.0
    lora: bool = False
    sixteen_bit: bool = True


def size(script: ScriptFacts, network: Named, layout: Sharding | None, call: Call, machine: Machine) -> Sized:
    """Bytes by formula. `layout`: None where every rank holds the whole network."""
    if network.network is None:
        return Sized(None, network.why, network.help)
    if layout is not None and layout.why:
        return Sized(None, layout.why, layout.help)
    graph = script.graphs.get(network.name, Graph())
    trained = graph.trained_parameters if call.lora else network.network.parameters
    if trained is None:
        return Sized(None, f"how much this script's LoRA trains of {network.name} was not counted", MEASURE)
    gathered = 2 if layout and layout.low else 4
    stored = gathered if script.stored_as_gathered else script.stored_bytes
    model = sized(network.network, graph, script.text_tokens, stored)
    if call.pixels is None:
        model = model.model_copy(update={"image_token_flops": 0.0})
    memory = Memory(
        model,
        trained,
        ranks=layout.shards if layout else 1,
        pixels=script.images * (call.pixels or 0.0),
        gpu_bytes=1e9 * machine.gpu_gb,
        other_bytes=1e9 * machine.other_gb,
        sharded=layout is not None,
        checkpointed=call.checkpointed,
        inputs=call.inputs,
        frames=call.frames,
        host_bytes=1e9 * machine.host_gb,
        element=2 if call.sixteen_bit else 4,
        gathered=gathered,
        stays=bool(layout and layout.stays),
        whole=bool(layout and layout.whole),
        offloaded=bool(layout and layout.offloaded),
        measured=machine.graph_bytes,
        uncounted=_uncounted(script, network.name, call, bool(layout and layout.low)),
    )
    why = memory.graph_unknown
    return Sized(memory, f"{why} ({network.name})" if why else "", MEASURE if why else "")


def _uncounted(script: ScriptFacts, network: str, call: Call, low: bool) -> str:
    """Why a formula that there is does not hold for this call."""
    if script.uncounted:
        return script.uncounted
    if call.pixels is None:
        return "the size of its samples is not known"
    if call.checkpointed < 1:
        if not call.sixteen_bit:
            return "what autograd saves was traced in 16 bits only"
        if low and not script.low_precision:
            return "what autograd saves without checkpointing was traced with weights in fp32 only"
        graph = script.graphs.get(network, Graph())
        if call.lora != (graph.trained_parameters is not None):
            return "what autograd saves was traced for another way of training"
    return ""
