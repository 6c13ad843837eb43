"""One combination of the kit's settings, what it changes in a rollout, and why some combinations cannot run."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

from leangrpo_tools.plan.cost import Rollout

Wrapper = Literal["fsdp", "ddp", "none"]
WHOLE_ROUNDED = "FSDP would round a whole gradient to 16 bits, so graphs are kept instead"
LOW_PRECISION = "weights or their reduction are 16-bit: gradients are reduced as upstream does"


@dataclass(frozen=True)
class Choice:
    """Values of LEANGRPO_SCHEDULE, _LAYOUT, _SYNC, _UPDATES and _BUFFERS; those of upstream's behaviour by default."""

    schedule: str = "recompute"
    layout: str = "native"
    sync: str = "upstream"
    updates: str = "faithful"
    buffers: str = "sample"
    offloads: bool = False
    """Graphs without room on the device go to host memory."""
    inputs: str = field(default="exact", compare=False)
    """LEANGRPO_INPUTS, where graphs are kept at all."""

    @property
    def effort(self) -> tuple[int, ...]:
        """How far from the kit's defaults, for a choice between equals: exact before rounded, few settings first."""
        changed = (self.layout != "native", self.sync != "upstream", self.offloads, self.buffers != "sample")
        return (("retain", "recompute", "reweight").index(self.schedule), sum(changed), int(self.sync == "late"))

    def exports(self) -> list[str]:
        """The settings as shell lines; those at the kit's default are left out, the schedule never is."""
        values = {"SCHEDULE": self.schedule}
        values |= {"BUFFERS": self.buffers} if self.schedule == "reweight" else {}
        values |= {"LAYOUT": self.layout} if self.layout != "native" else {}
        values |= {"SYNC": self.sync} if self.sync != "upstream" else {}
        values |= {"UPDATES": self.updates} if self.updates != "faithful" else {}
        values |= {"INPUTS": self.inputs} if self.inputs != "exact" and self.schedule != "recompute" else {}
        return [f"export LEANGRPO_{name}={value}" for name, value in values.items()]


@dataclass(frozen=True)
class Case:
    """What a launch file or preset asks of the kit.

    Attributes:
        size: the rollout's size on one rank.
        ranks: R, the world size.
        wrapper: around the network.
        prompts: P, prompts per rank and rollout; 0 where groups are spread over ranks already.
        generations: M, samples per prompt.
        reweight, shared, on_policy: why the runtime cannot do this for the script at all; empty if it can.
        late: why gradients are always reduced as upstream does; empty if LEANGRPO_SYNC counts.
        flag: upstream's flag for samples per update.
        inputs: LEANGRPO_INPUTS, without which nothing could be kept.
        stays: FSDP leaves gathered weights in place from a forward to its backward.
    """

    size: Rollout
    ranks: int
    wrapper: Wrapper
    prompts: int = 0
    generations: int = 1
    reweight: str = ""
    shared: str = ""
    on_policy: str = ""
    late: str = ""
    flag: str = ""
    inputs: str = "exact"
    stays: bool = False
    refused: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Whole groups per update are needed for some settings; says with which numbers they are not given."""
        found = {
            "LEANGRPO_SCHEDULE=reweight": self.reweight,
            "LEANGRPO_LAYOUT=shared": self.shared or self._unshareable(),
            "LEANGRPO_UPDATES=on-policy": self.on_policy or self._ungrouped(),
            "LEANGRPO_SYNC=late": self.late,
        }
        object.__setattr__(self, "refused", {name: why for name, why in found.items() if why})

    @property
    def sharing(self) -> int:
        """g, how many ranks serve one prompt in the shared layout."""
        return math.gcd(self.generations, self.ranks, self.size.accumulation)

    @property
    def part(self) -> int:
        """Q, the samples of a prompt that one rank then draws."""
        return self.generations // self.sharing

    def _unshareable(self) -> str:
        group, update = self.generations, self.size.accumulation
        if self.prompts * group % update:
            return f"{self.prompts} x {group} samples of a rank are no multiple of the {update} of an update"
        if self.sharing == 1:
            return f"{self.ranks} ranks, {group} generations and {update} samples per update have no common divisor"
        return ""

    def _ungrouped(self) -> str:
        group, update = self.generations, self.size.accumulation
        drawn = self.prompts * group
        if update % group == 0 and drawn % update == 0:
            return ""
        fits = [group * n for n in range(1, self.prompts + 1) if drawn % (group * n) == 0]
        options = " or ".join(f"{self.flag} {samples}" for samples in fits)
        return f"each update must draw whole groups of {group}, and it has {update} samples: {options} would do"

    def choices(self, host: bool = False) -> Iterator[Choice]:
        """All that can run and differ from each other. `host`: there is host memory for graphs."""
        syncs = (
            ["upstream"] if self.wrapper != "fsdp" or self.ranks == 1 or self.late else ["upstream", "group", "late"]
        )
        layouts = ["native"] if "LEANGRPO_LAYOUT=shared" in self.refused else ["native", "shared"]
        policies = ["faithful"] if "LEANGRPO_UPDATES=on-policy" in self.refused else ["faithful", "on-policy"]
        for sync in syncs:
            if sync == "group" and self.groups(Choice(sync="group")) == 1:
                continue  # as late
            yield Choice(sync=sync)
            if not self.size.replayable or not self.size.updates:
                continue
            for layout in layouts:
                for updates in policies:
                    if updates == "on-policy" and self.size.updates == 1:
                        continue  # as faithful
                    retain = Choice("retain", layout, sync, updates, inputs=self.inputs)
                    yield retain
                    if host:
                        yield replace(retain, offloads=True)
                    if "LEANGRPO_SCHEDULE=reweight" in self.refused:
                        continue
                    yield replace(retain, schedule="reweight")
                    if 1 + 2 * self.live_groups(retain) < self.live(retain):
                        yield replace(retain, schedule="reweight", buffers="affine")

    def groups(self, choice: Choice) -> int:
        """Prompt groups of an update on one rank, by which LEANGRPO_SYNC=group reduces."""
        group = self.part if choice.layout == "shared" else self.generations
        return max(self.size.accumulation // group, 1) if self.prompts else 1

    def replayed(self, choice: Choice) -> float:
        """Samples per rollout that are trained without a second forward when everything fits."""
        if choice.schedule == "recompute":
            return 0
        return self.size.trained if choice.updates == "on-policy" else self.size.free

    def live(self, choice: Choice) -> int:
        """Samples whose graphs or gradients are held at the same time."""
        shared = choice.layout == "shared"
        if choice.updates == "on-policy":
            return self.part if shared else self.generations
        return min(self.part, self.size.replayed // self.sharing) if shared else self.size.replayed

    def live_groups(self, choice: Choice) -> int:
        """Prompt groups that those samples belong to; where groups are spread over ranks, each may be of another."""
        if not self.prompts:
            return self.live(choice)
        return 1 if choice.layout == "shared" else max(-(-self.live(choice) // self.generations), 1)
