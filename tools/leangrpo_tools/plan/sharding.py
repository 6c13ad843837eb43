"""How a wrapper lays a network's weights out over the ranks, as flags of upstream or accelerate's configuration say."""

from __future__ import annotations

from dataclasses import dataclass

from leangrpo_tools.errors import KitError

OFFLOADED = (
    "FSDP1 keeps the weights in host memory (CPU offload), and then adds up no gradients of several backward passes: "
    "the runtime refuses it"
)
STRATEGIES = {
    "full": "FULL_SHARD",
    "hybrid_full": "HYBRID_SHARD",
    "none": "NO_SHARD",
    "hybrid_zero2": "_HYBRID_SHARD_ZERO2",
}
"""DanceGRPO's and MixGRPO's names, which their `get_dit_fsdp_kwargs` knows, and torch's."""


@dataclass(frozen=True)
class Sharding:
    """One layout.

    Attributes:
        shards: over how many ranks weights, gradients and moments are spread.
        low: weights are gathered and gradients reduced in 16 bits.
        offloaded: weights, gradients and moments are in host memory.
        stays: gathered weights stay from a forward to its backward.
        whole: the network is one unit: no policy wraps its blocks.
        why: why the layout is not known; then the rest does not count.
        help: what to do then.
    """

    shards: int = 1
    low: bool = False
    offloaded: bool = False
    stays: bool = False
    whole: bool = False
    why: str = ""
    help: str = ""


def of(strategy: str, ranks: int, node: int | None, *, low: bool, offloaded: bool, whole: bool = False) -> Sharding:
    """The layout of torch's strategy.

    Args:
        strategy: torch's name.
        ranks: the world size.
        node: ranks of a node; None where that is not known.
        low: see `Sharding`; so are the next two.
        offloaded: likewise.
        whole: likewise.
    """
    name = strategy.removeprefix("_").removeprefix("ShardingStrategy.")
    hybrid, shards = name.startswith("HYBRID"), ranks
    if name == "NO_SHARD" or ranks == 1:
        shards = 1
    elif hybrid:
        if node is None or ranks % node:
            why = f"weights are sharded within a node ({strategy}), and how many ranks a node has is not known"
            return Sharding(low=low, offloaded=offloaded, why=why, help="write --nproc_per_node into the launch file")
        shards = node
    stays = name in ("HYBRID_SHARD_ZERO2", "SHARD_GRAD_OP") and shards > 1
    return Sharding(shards, low, offloaded, stays, whole or name == "NO_SHARD")


def node_of(words: list[str], processes: int | None = None, machines: int | None = None) -> int | None:
    """Ranks of each node, where the words before the script, or the numbers of a launcher's file, say so."""
    given: dict[str, int] = {}
    for place, word in enumerate(words):
        name, equals, value = word.lstrip("-").replace("-", "_").partition("=")
        value = value if equals else (words[place + 1] if place + 1 < len(words) else "")
        if word.startswith("-") and value.isdigit() and int(value):
            given[name] = int(value)
    for name in ("nproc_per_node", "num_gpus"):
        if name in given:
            return given[name]
    world, nodes = given.get("num_processes", processes), given.get("num_machines", machines or 1)
    return world // nodes if world and world % nodes == 0 else None


def named(flag: str, value: str) -> str:
    """Torch's strategy by upstream's name. Raises LG504 for one that upstream does not know."""
    if value not in STRATEGIES:
        what = f"--{flag} is {value!r}; upstream knows {', '.join(STRATEGIES)}"
        raise KitError("LG504", what, cause="FSDP stops with any other", fix=f"correct it: --{flag} full")
    return STRATEGIES[value]
