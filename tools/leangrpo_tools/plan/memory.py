"""What a rank must hold, by formula, and how many kept graphs fit beside it.

Under FSDP1 or FSDP2, bytes per rank for P parameters, P' of them trained, on R ranks, in fp32 with bf16 autocast:
weights 4P/R, gradients 4P'/R, AdamW 8P'/R; three gathered units 3 x 4U (the one at work and what FSDP gathers
ahead) and one full gradient 4U, U being the largest unit. A joint backward gathers every unit and holds full
gradients: 4(P + P').
A graph with checkpointed blocks holds the input of each block in bf16, and bf16 copies of the root's weights that
autocast made for it.

Under DDP every rank holds 4P + 12P' and nothing is gathered. A graph without checkpointing holds what autograd saved:
so much per token of each input, and the copies of frozen weights that autocast makes for each call.
"""

from __future__ import annotations

from dataclasses import dataclass

from leangrpo_tools.plan.facts import Model

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
        checkpointed: every block is.
        frames: latent frames.
        gpu_bytes: memory of a GPU.
        other_bytes: what else stays on it: VAE, text encoders, reward model, workspaces.
    """

    model: Model
    trained: float
    ranks: int
    pixels: float
    gpu_bytes: float
    other_bytes: float = 0.0
    sharded: bool = True
    checkpointed: bool = True
    inputs: int = 1
    """Network inputs per call: samples, and with guidance in the same call as many again."""
    frames: int = 1

    @property
    def states(self) -> float:
        """Weights, gradients and AdamW's two moments, sharded."""
        return (4 * self.model.parameters + 12 * self.trained) / (self.ranks if self.sharded else 1)

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
    def graph(self) -> float:
        """One kept graph: that of one network call."""
        model = self.model
        image = self.pixels / model.patch**2 * self.frames
        if not self.checkpointed:
            saved = image * model.image_token_bytes + model.text_tokens * model.text_token_bytes
            return self.inputs * saved + model.call_bytes
        tokens = image + model.text_tokens
        return 2 * (self.inputs * model.blocks * tokens * model.width + model.root_parameters)

    @property
    def choices(self) -> dict[str, bool]:
        """The values of LEANGRPO_SYNC that make a difference, and whether each means a joint backward."""
        return {"upstream": False, "late": True} if self.sharded else {"upstream": False}

    def fitting(self, joint: bool) -> int:
        """How many graphs fit beside the rest."""
        rest = self.states + self.other_bytes + (self.full if joint else self.units)
        return max(int((self.gpu_bytes * (1 - MARGIN) - rest) // self.graph), 0)
