"""How a rollout and its updates are cut into parts of whole prompt groups: arithmetic only.

Natively each of R ranks draws all M generations of each of its P prompts and trains `update` rows per optimizer step.
Here g = gcd(M, R, update) ranks, one after the other, are a team that serves one prompt at a time: each draws Q = M/g
generations. A team's parts are the prompts of its own ranks, so that over a rollout, and over each update, the ranks
together train the rows that they train natively. With g = 1 a part is one prompt of the rank itself.

Member m of a team draws generation m + g*q in its slot q, so slots come in the order of generations: what an update
trains natively of a prompt, the first rows or the next ones, is an equally long run of slots on each member.
"""

from dataclasses import dataclass
from math import gcd

from ..errors import LeanError


@dataclass(frozen=True)
class Part:
    """A prompt that a team serves at the same time: prompt number `slot` of the team's member `owner`."""

    slot: int
    owner: int


@dataclass(frozen=True)
class Cut:
    """One rollout, cut into parts.

    Attributes:
        prompts: P, per rank.
        group: M, generations per prompt.
        update: rows per rank that one optimizer update trains.
        ranks: R.
        shared: whether ranks share prompts; otherwise g = 1.
        on_policy: whether an update's rows are drawn just before it, by the policy as it is then.
    """

    prompts: int
    group: int
    update: int
    ranks: int
    shared: bool
    on_policy: bool

    def __post_init__(self) -> None:
        rows = self.prompts * self.group
        sizes = f"{self.prompts} x {self.group} samples per rank and rollout, {self.update} per update"
        whole = [n for n in range(1, rows + 1) if rows % n == 0 and (not self.on_policy or n % self.group == 0)]
        if rows % self.update:
            left = f"{sizes}: upstream leaves {rows % self.update} samples over"
            raise LeanError("LG613", left, f"set upstream's gradient accumulation to one of {whole}")
        if self.on_policy and self.update % self.group:
            raise LeanError(
                "LG613",
                f"{sizes}: an update would train a part of a prompt's samples, whose advantages need them all",
                f"set upstream's gradient accumulation to one of {whole}, or LEANGRPO_UPDATES=faithful",
            )
        if self.shared and self.team == 1 < self.ranks:
            fits = [n for n in whole if gcd(self.group, self.ranks, n) > 1]
            choice = f"set upstream's gradient accumulation to one of {fits}, or " if fits else "set "
            what = (
                f"{sizes}, {self.ranks} ranks: these numbers have no common divisor by which ranks could share prompts"
            )
            raise LeanError("LG613", what, f"{choice}LEANGRPO_LAYOUT=native")

    @property
    def team(self) -> int:
        """g, how many ranks serve a prompt together."""
        return gcd(self.group, self.ranks, self.update) if self.shared else 1

    @property
    def slots(self) -> int:
        """Q, how many of a prompt's generations each of them draws."""
        return self.group // self.team

    @property
    def updates(self) -> int:
        """K, optimizer updates per rollout."""
        return self.prompts * self.group // self.update

    def update_of(self, part: Part, slot: int) -> int:
        """Which update trains what is drawn in a slot of a part; from 0."""
        return (part.slot * self.group + slot * self.team) // self.update

    def first(self, part: Part) -> int:
        """How many leading slots of a part are trained by the policy that drew them."""
        if self.on_policy:
            return self.slots
        return sum(self.update_of(part, slot) == 0 for slot in range(self.slots))

    @property
    def parts(self) -> list[Part]:
        """All parts, in the order in which they are drawn.

        Unless updates are on-policy, those of which the first update trains nothing come first: the policy changes
        with it, and they must be drawn before.
        """
        every = [Part(slot, owner) for slot in range(self.prompts) for owner in range(self.team)]
        return every if self.on_policy else sorted(every, key=lambda part: self.first(part) > 0)
