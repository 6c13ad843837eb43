"""What the kit knows about an upstream's launch flags or config: `patches/<Upstream>/plan.yaml`, read strictly."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from leangrpo_tools import data, yamlfile
from leangrpo_tools.errors import KitError
from leangrpo_tools.plan.networks import Graph, Made, Strict


class Flags(Strict):
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
    frames: str | None = None
    guidance: str | None = None
    """Above 1 each call takes the unconditional input, too."""
    selected: str | None = None
    """How many of the generated samples are trained at all."""
    window: str | None = None
    """How many steps are trained in place of a fraction, where `windowed` is so."""
    windowed: str | None = None
    """FLAG=VALUE."""
    models: list[str] = Field(default_factory=list)
    """Where the network is loaded from; the first that is given counts."""
    strategy: str | None = None
    """FSDP's sharding strategy."""
    offload: str | None = None
    """A switch: FSDP keeps weights in host memory."""
    master: str | None = None
    """Other than `fp32`, FSDP gathers weights and reduces gradients in bf16."""

    def needed(self) -> list[str]:
        """All of them, those first that every plan needs."""
        values = (value for name, value in self if name != "windowed" and isinstance(value, str))
        switched = self.windowed.partition("=")[0] if self.windowed else None
        return list(dict.fromkeys([*values, *self.models, *([switched] if switched else [])]))


class Entries(Strict):
    """Names of the config's entries (`train.beta`) that a plan needs, for upstreams that keep settings in a config.

    A rollout on one rank is `batches` (times `repeats`) network batches of `rows` samples each.
    """

    batches: str
    rows: str
    group: str
    accumulation: str
    passes: str
    """How often each sample is trained."""
    steps: str
    fraction: str | None = None
    """The share of the steps that is trained: int(steps * share)."""
    window: str | None = None
    """How many steps are trained; 0 stands for all but the last. One of `fraction` and `window` is given."""
    repeats: str | None = None
    guidance: str | None = None
    """Above 1 the rollout also evaluates the unconditional input."""
    train_guidance: str | None = None
    """A switch: the update evaluates it, too."""
    reference: str | None = None
    """Above 0 the update also evaluates a reference policy, without gradient."""
    reward_reference: str | None = None
    """Above 0 the rollout does so."""
    lora: str | None = None
    """A switch: a LoRA is trained, not the whole network."""
    precision: str | None = None
    model: str | None = None
    """Where the network is loaded from."""
    height: str | None = None
    width: str | None = None
    frames: str | None = None

    @model_validator(mode="after")
    def _one_rule(self) -> Entries:
        if (self.fraction is None) == (self.window is None):
            raise ValueError("give one of fraction and window: how many steps are trained")
        return self


class ConfigFacts(Strict):
    """Where upstream keeps its settings, if in a Python config."""

    file: str
    """The path in upstream's tree of the file that presets are looked for in."""
    flag: str
    """The flag that names file and preset (`FILE:NAME`), and before a dot one entry."""
    function: str
    """What the training script calls with the preset's name."""
    ddp: str = ""
    """The path in upstream's tree of accelerate's configuration for DDP."""
    ranks: str | None = None
    """The local name in which presets keep the number of ranks that they are written for."""
    entries: Entries


class Offers(Strict):
    """What the runtime can do with a script beside `retain` with upstream's layout and updates."""

    reweight: bool = False
    shared: bool = False
    """LEANGRPO_LAYOUT=shared: the script draws whole prompt groups on every rank."""
    on_policy: bool = False
    """LEANGRPO_UPDATES=on-policy: advantages are taken within a prompt group."""


class ScriptFacts(Strict):
    """One training script."""

    program: str
    """Its path in upstream's tree."""
    training: Literal["full", "lora"] = "full"
    leftover: Literal["discarded", "carried", "refused"] = "discarded"
    """What becomes of samples after the last full accumulation: their gradient is dropped, or joins the next rollout's
    first update, or upstream refuses to start."""
    flags: dict[str, str | list[str] | None] = Field(default_factory=dict)
    """Where this script's names differ from the upstream's."""
    always_checkpointed: bool = False
    """Activation checkpointing whatever the flags say."""
    notes: list[str] = Field(default_factory=list)
    no_replay: str | None = None
    """Why nothing of this script can be replayed although its numbers can be planned."""
    network: str | None = None
    """The kit's name of the network that upstream trains with it; others of its class are known, too."""
    folders: dict[str, str] = Field(default_factory=dict)
    """Where upstream tells to keep networks, and the kit's names for them."""
    made: Made | None = None
    """In place of `network`."""
    graphs: dict[str, Graph] = Field(default_factory=dict)
    """By network: what is trained of it, and what autograd saves."""
    text_tokens: int = 0
    images: int = 1
    """Of a sample among a call's tokens: 2 where the network also reads one to edit."""
    stored_bytes: int = 4
    """Of a weight, its gradient and its moments."""
    stored_as_gathered: bool = False
    """Weights are loaded in the precision that FSDP gathers them in."""
    uncounted: str = ""
    """Why no formula gives a graph's bytes."""
    unreadable: str | None = None
    """Why this script's launch file does not hold the numbers at all."""
    entries: dict[str, str | None] = Field(default_factory=dict)
    """Where this script's entries differ from the upstream's."""
    presets: list[str] = Field(default_factory=list)
    """Upstream's presets that are written for this script."""
    file: str | None = None
    """Where they are kept, if not with the others."""
    needs: list[str] = Field(default_factory=list)
    """Entries without which the script stops."""
    calls: int = Field(default=1, ge=1)
    """Network calls per batch and step with guidance."""
    guided_inputs: int = Field(default=1, ge=1)
    """Network inputs per sample in one call with guidance."""
    rounded_under: list[str] = Field(default_factory=list)
    """Precisions under which upstream rounds the network's input between rollout and update."""
    rounded_inputs: bool = False
    """What is planned takes LEANGRPO_INPUTS=rounded for granted, where a precision of 16 bits is set."""
    wrapper: Literal["fsdp", "ddp", "none"] | None = None
    """Where it is not the upstream's."""
    gathered_bytes: int = 4
    """Of a weight, as FSDP gathers it."""
    reduced_bytes: int = 4
    """Of a gradient, as it is reduced."""
    low_precision: bool = False
    """Weights or their reduction are 16-bit, so the runtime reduces as upstream does, whatever LEANGRPO_SYNC says."""
    offers: Offers | None = None
    """Where they are not the upstream's."""


class Facts(Strict):
    """One upstream's `plan.yaml`."""

    flags: Flags | None = None
    config: ConfigFacts | None = None
    defaults: dict[str, int | float | bool | str] = Field(default_factory=dict)
    """Defaults of the flags at the pin, for when a script's own source is not at hand."""
    wrapper: Literal["fsdp", "ddp"] = "fsdp"
    """What upstream wraps its networks in where there are several ranks."""
    offers: Offers = Offers()
    scripts: dict[str, ScriptFacts]

    def flags_of(self, script: ScriptFacts) -> Flags:
        """The flag names of one script, its own deviations included."""
        return Flags.model_validate((self.flags.model_dump() if self.flags else {}) | script.flags)

    def entries_of(self, script: ScriptFacts) -> Entries:
        """The entry names of one script of an upstream with a config, its own deviations included."""
        return Entries.model_validate((self.config.entries.model_dump() if self.config else {}) | script.entries)

    @model_validator(mode="after")
    def _one_kind(self) -> Facts:
        if (self.flags is None) == (self.config is None):
            raise ValueError("give one of flags and config: where upstream's settings are")
        return self


def load(upstream: str) -> Facts:
    """The planning data of an upstream, by its exact name. Raises LG507 with every problem, LG506 if there is none."""
    path = data.recipe_path(upstream).with_name("plan.yaml")
    if not path.is_file():
        known = sorted(item.parent.name for item in path.parent.parent.glob("*/plan.yaml"))
        cause = "upstream ships no launch files: the numbers stand in a script or config of your own, which is not read"
        fix = f"leangrpo list says what its updates per rollout are; plan reads {', '.join(known)}"
        raise KitError("LG506", f"{upstream} cannot be planned", cause=cause, fix=fix)
    return yamlfile.load(path, Facts, "LG507", "reinstall the kit, or correct the file")
