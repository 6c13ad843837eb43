"""What the kit knows about an upstream's launch flags: `patches/<Upstream>/plan.yaml`, read strictly."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from leangrpo_tools import data, yamlfile
from leangrpo_tools.errors import KitError


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Flags(_Strict):
    """Upstream's names (without the dashes) for the quantities a plan needs. None: upstream has no such flag."""

    prompts: str
    generations: str
    accumulation: str
    steps: str
    fraction: str
    grouped: str | None = None
    """A switch without which every prompt is sampled once only."""
    checkpointing: str | None = None
    checkpointed_share: str | None = None
    height: str | None = None
    width: str | None = None
    selected: str | None = None
    """How many of the generated samples are trained at all."""


class Model(_Strict):
    """Sizes of the network that a script trains, for bytes by formula. Counts; `width` and tokens as in its blocks."""

    parameters: float
    largest_unit: float
    """Parameters of the largest unit that is sharded on its own."""
    root_parameters: float
    """Parameters outside all blocks."""
    blocks: int
    width: int
    patch: int
    """Pixels along each side of what becomes one token."""
    text_tokens: int


class ScriptFacts(_Strict):
    """One training script."""

    program: str
    """Its path in upstream's tree."""
    training: Literal["full", "lora"] = "full"
    leftover: Literal["discarded", "carried", "refused"] = "discarded"
    """What becomes of samples after the last full accumulation: their gradient is dropped, or joins the next rollout's
    first update, or upstream refuses to start."""
    flags: dict[str, str | None] = Field(default_factory=dict)
    """Where this script's names differ from the upstream's."""
    always_checkpointed: bool = False
    """Activation checkpointing whatever the flags say."""
    notes: list[str] = Field(default_factory=list)
    no_replay: str | None = None
    """Why nothing of this script can be replayed although its numbers can be planned."""
    model: Model | None = None
    trained_parameters: float | None = None
    """Where not all of the model's are trained."""
    unreadable: str | None = None
    """Why this script's launch file does not hold the numbers at all."""


class Facts(_Strict):
    """One upstream's `plan.yaml`."""

    flags: Flags
    defaults: dict[str, int | float | bool] = Field(default_factory=dict)
    """Defaults of the flags at the pin, for when a script's own source is not at hand."""
    scripts: dict[str, ScriptFacts]

    def flags_of(self, script: ScriptFacts) -> Flags:
        """The flag names of one script, its own deviations included."""
        return Flags.model_validate(self.flags.model_dump() | script.flags)


def load(upstream: str) -> Facts:
    """The planning data of an upstream, by its exact name. Raises LG507 with every problem, LG506 if there is none."""
    path = data.recipe_path(upstream).with_name("plan.yaml")
    if not path.is_file():
        known = sorted(item.parent.name for item in path.parent.parent.glob("*/plan.yaml"))
        raise KitError("LG506", f"the kit has no planning data for {upstream}", fix=f"it can plan {', '.join(known)}")
    return yamlfile.load(path, Facts, "LG507", "reinstall the kit, or correct the file")
