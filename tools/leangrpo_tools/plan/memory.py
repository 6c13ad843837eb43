"""What a rank must hold, by formula, and what is left for kept graphs and gradients.

Under FSDP1 or FSDP2, bytes per rank for P parameters, P' of them trained, on R ranks, in fp32 with bf16 autocast:
weights 4P/R, gradients 4P'/R, AdamW 8P'/R; three gathered units 3 x 4U (the one at work and what FSDP gathers
ahead) and one full gradient 4U, U being the largest unit. A joint backward gathers every unit and holds full
gradients: 4(P + P')(R - 1)/R beside the shards. Native calls that reduce late hold full gradients and gather as
upstream does.
A graph with checkpointed blocks holds the input of each block, what is saved outside the blocks, and, under 16-bit
autocast, copies of the root's weights.

Under DDP every rank holds 4P + 12P' and nothing is gathered. A graph without checkpointing holds what autograd saved:
so much per token of each input, and the copies of frozen weights that autocast makes for each call.
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

    @property
    def parts(self) -> dict[str, float]:
        """What stays on the GPU in every phase, kept graphs and gradients not counted."""
        shards = self.ranks if self.sharded else 1
        stored = self.model.stored_bytes
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
        unit = self.model.largest_unit if self.sharded else 0.0
        return 3 * 4 * unit + 4 * min(unit, self.trained)

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
    def graph(self) -> float:
        """One kept graph: that of one network call."""
        return self.checkpointed * self._checkpointed + (1 - self.checkpointed) * self._plain

    @property
    def _plain(self) -> float:
        image, text = self.tokens
        saved = image * self.model.image_token_bytes + text * self.model.text_token_bytes
        return self.inputs * saved + self.model.call_bytes

    @property
    def _checkpointed(self) -> float:
        model = self.model
        image, text = self.tokens
        ends = image * model.end_image_bytes + text * model.end_text_bytes
        copies = model.end_call_bytes if ends else (2 * model.root_parameters if self.element == 2 else 0)
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
        """Bytes left for kept graphs and gradients; negative where the rest alone does not fit.

        Args:
            joint: all units are gathered and full gradients held at once.
            gradients: full gradients are held.
        """
        rest = self.states + self.other_bytes + (self.full if joint else self.units)
        rest += self.gradient * (self.ranks - 1) / self.ranks if gradients and not joint and self.sharded else 0
        return self.gpu_bytes - self.reserve - rest

    @property
    def choices(self) -> dict[str, bool]:
        """The values of LEANGRPO_SYNC that make a difference, and whether each means a joint backward."""
        return {"upstream": False, "late": True} if self.sharded else {"upstream": False}

    def fitting(self, joint: bool) -> int:
        """How many graphs fit beside the rest."""
        return max(int(self.room(joint) // self.graph), 0)
