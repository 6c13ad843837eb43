"""What a rank must hold, by formula, and what is left for kept graphs and gradients.

Under FSDP1 or FSDP2, bytes per rank for P parameters, P' of them trained, sharded over R ranks, in fp32 with bf16
autocast: weights 4P/R, gradients 4P'/R, AdamW 8P'/R; three gathered units 3 x 4U (the one at work and what FSDP gathers
ahead) and one full gradient 4U, U being the largest unit; in low precision 2 in place of 4 for what is gathered. A
joint backward gathers every unit and holds full gradients: 4(P + P')(R - 1)/R beside the shards. Native calls that
reduce late hold full gradients and gather as upstream does.
A graph with checkpointed blocks holds the input of each block, what is saved outside the blocks, and, under 16-bit
autocast, copies of the root's weights.

Under DDP every rank holds 4P + 12P' and nothing is gathered. A graph without checkpointing holds what autograd saved:
so much per token of each input, and the copies of frozen weights that autocast makes for each call.

A native call has a graph, too: it is held from the forward to its backward, beside all of this. Where a graph's bytes
are not known, nothing is known of what fits.
"""

from __future__ import annotations

from dataclasses import dataclass

from leangrpo_tools.plan.networks import Model

MARGIN = 0.05
"""Part of the memory that the allocator cannot use; as the runtime's own budget."""


@dataclass(frozen=True)
class Memory:
    """One rank's memory. Figures in bytes.

    Attributes:
        model: sizes of the network.
        trained: parameters that are trained.
        ranks: over how many ranks weights are sharded.
        pixels: height times width of a sample.
        sharded: FSDP; otherwise DDP.
        checkpointed: the share of blocks that are.
        inputs: network inputs per call: samples, and with guidance in the same call as many again.
        frames: latent frames.
        gpu_bytes: memory of a GPU.
        other_bytes: what else stays on it: VAE, text encoders, reward model, workspaces.
        host_bytes: host memory per rank for graphs; torch rounds pinned blocks up to powers of two, so half counts.
        element: bytes of a saved activation and of a copied weight.
        gathered: bytes of a gathered weight and of its gradient before it is reduced.
        stays: gathered weights stay from a forward to its backward.
        whole: the network is one unit.
        offloaded: weights, gradients and moments are in host memory.
        measured: of a graph, where it was measured; then no formula counts.
        uncounted: why no formula gives a graph's bytes, although the network is known.
    """

    model: Model
    trained: float
    ranks: int
    pixels: float
    gpu_bytes: float
    other_bytes: float = 0.0
    sharded: bool = True
    checkpointed: float = 1.0
    inputs: int = 1
    frames: int = 1
    host_bytes: float = 0.0
    element: int = 2
    gathered: int = 4
    stays: bool = False
    whole: bool = False
    offloaded: bool = False
    measured: float | None = None
    uncounted: str = ""

    @property
    def parts(self) -> dict[str, float]:
        """What stays on the GPU in every phase, graphs and whole gradients not counted."""
        shards = self.ranks if self.sharded else 1
        stored = 0 if self.offloaded else self.model.stored_bytes
        return {
            "parameters": stored * self.model.parameters / shards,
            "gradients": stored * self.trained / shards,
            "optimizer": 2 * stored * self.trained / shards,
            "gathered": self.units,
            "other": self.other_bytes,
        }

    @property
    def states(self) -> float:
        """Weights, gradients and AdamW's two moments, sharded."""
        return sum(self.parts[name] for name in ("parameters", "gradients", "optimizer"))

    @property
    def units(self) -> float:
        """Gathered units and one unit's full gradient, as upstream has them and as `armed` does."""
        if not self.sharded:
            return 0.0
        model = self.model
        unit = model.parameters if self.whole else model.largest_unit
        weights = model.parameters if self.stays else min(3 * unit, model.parameters)
        if self.ranks == 1 and self.gathered == model.stored_bytes and not self.offloaded:
            weights = 0.0  # not sharded: the stored ones are used
        return self.gathered * (weights + min(unit, self.trained))

    @property
    def full(self) -> float:
        """All units gathered and full gradients, as a joint backward has them."""
        return 4 * (self.model.parameters + self.trained) * (self.ranks - 1) / self.ranks

    @property
    def gradient(self) -> float:
        """A full gradient of what trains, in fp32."""
        return 4 * self.trained

    @property
    def weights(self) -> float:
        """All weights, in fp32."""
        return 4 * self.model.parameters

    @property
    def reserve(self) -> float:
        """What is kept free."""
        return MARGIN * self.gpu_bytes

    @property
    def tokens(self) -> tuple[float, float]:
        """Tokens of an input: of the image or video, and of the text."""
        return self.pixels / self.model.patch**2 * self.frames, float(self.model.text_tokens)

    @property
    def graph_unknown(self) -> str:
        """Why a graph's bytes are not known; empty where they are."""
        if self.measured is not None:
            return ""
        if self.checkpointed < 1 and not self.uncounted and not self.model.image_token_bytes:
            return "what autograd saves of this network without checkpointing was not traced"
        return self.uncounted

    @property
    def graph(self) -> float | None:
        """The graph of one network call, kept or native; None where it is not known."""
        if self.measured is not None:
            return self.measured
        if self.graph_unknown:
            return None
        plain = (1 - self.checkpointed) * self._plain if self.checkpointed < 1 else 0.0
        return self.checkpointed * self._checkpointed + plain

    @property
    def _plain(self) -> float:
        image, text = self.tokens
        saved = image * self.model.image_token_bytes + text * self.model.text_token_bytes + self.model.row_bytes
        return self.inputs * saved + self.model.call_bytes

    @property
    def _checkpointed(self) -> float:
        model = self.model
        image, text = self.tokens
        ends = image * model.end_image_bytes + text * model.end_text_bytes
        copied = self.element == 2 and self.gathered == model.stored_bytes == 4
        copies = model.end_call_bytes if ends else 2 * model.root_parameters * copied
        return self.inputs * (self.element * model.blocks * (image + text) * model.width + ends) + copies

    @property
    def flops(self) -> float:
        """Floating-point operations of one forward, attention included; 0 where the model's are not known."""
        model = self.model
        image, text = self.tokens
        if not model.image_token_flops:
            return 0.0
        linear = image * model.image_token_flops + text * model.text_token_flops
        return self.inputs * (linear + 4 * model.blocks * model.width * (image + text) ** 2)

    def room(self, joint: bool = False, gradients: bool = False) -> float:
        """Bytes left for graphs and gradients; negative where the rest alone does not fit.

        Args:
            joint: all units are gathered and full gradients held at once.
            gradients: full gradients are held.
        """
        rest = self.states + self.other_bytes + (max(self.full, self.units) if joint else self.units)
        rest += self.gradient * (self.ranks - 1) / self.ranks if gradients and not joint and self.sharded else 0
        return self.gpu_bytes - self.reserve - rest

    def left(self, gradients: bool = False) -> float:
        """Bytes left beside a native call's own graph, if that is known; negative where upstream does not fit."""
        return self.room(gradients=gradients) - (self.graph or 0.0)

    def needed(self, graphs: int = 1) -> float | None:
        """Memory of a GPU with which so many graphs have room; None where a graph's bytes are not known."""
        graph = self.graph
        return None if graph is None else (self.gpu_bytes - self.reserve - self.room() + graphs * graph) / (1 - MARGIN)

    @property
    def choices(self) -> dict[str, bool]:
        """The values of LEANGRPO_SYNC that make a difference, and whether each means a joint backward."""
        return {"upstream": False, "late": True} if self.sharded else {"upstream": False}

    def fitting(self, joint: bool) -> int | None:
        """How many graphs fit beside the rest; None where a graph's bytes are not known."""
        graph = self.graph
        return None if graph is None else max(int(self.room(joint) // graph), 0)
