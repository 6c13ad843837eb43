"""What a rank must hold under FSDP1 or FSDP2, by formula, and how many kept graphs fit beside it.

Bytes per rank for P parameters, P' of them trained, on R ranks, in fp32 with bf16 autocast:
weights 4P/R, gradients 4P'/R, AdamW 8P'/R; three gathered units 3 x 4U (the one at work and what FSDP gathers
ahead) and one full gradient 4U, U being the largest unit. A joint backward gathers every unit and holds full
gradients: 4(P + P').
A graph with checkpointed blocks holds the input of each block in bf16, and bf16 copies of the root's weights that
autocast made for it.
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
        gpu_bytes: memory of a GPU.
        other_bytes: what else stays on it: VAE, text encoders, reward model, workspaces.
    """

    model: Model
    trained: float
    ranks: int
    pixels: float
    gpu_bytes: float
    other_bytes: float = 0.0

    @property
    def states(self) -> float:
        """Weights, gradients and AdamW's two moments, sharded."""
        return (4 * self.model.parameters + 12 * self.trained) / self.ranks

    @property
    def units(self) -> float:
        """Gathered units and one unit's full gradient, as upstream has them and as `armed` does."""
        unit = self.model.largest_unit
        return 3 * 4 * unit + 4 * min(unit, self.trained)

    @property
    def full(self) -> float:
        """All units gathered and full gradients, as a joint backward has them."""
        return 4 * (self.model.parameters + self.trained) * (self.ranks - 1) / self.ranks

    @property
    def graph(self) -> float:
        """One kept graph with every block checkpointed."""
        tokens = self.pixels / self.model.patch**2 + self.model.text_tokens
        return 2 * (self.model.blocks * tokens * self.model.width + self.model.root_parameters)

    def fitting(self, joint: bool) -> int:
        """How many graphs fit beside the rest."""
        rest = self.states + self.other_bytes + (self.full if joint else self.units)
        return max(int((self.gpu_bytes * (1 - MARGIN) - rest) // self.graph), 0)
