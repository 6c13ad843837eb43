"""What a native window shows of the calls of a patched tree that Reweight needs."""

from typing import Any

from ..window import numbers


class Noticed:
    """Of one rollout and its updates.

    Attributes:
        scored: upstream's step function, which gives the log-prob of a sample, is one of those calls.
        reference: the update evaluates the network without grad, too, as for a KL term.
        best_of: which samples are trained is known with their rewards only.
        team: how many ranks share a prompt.
    """

    def __init__(self) -> None:
        self.scored = self.reference = self.best_of = False
        self.team = 1
        self._told = self._late = False
        self._waiting: set[int] = set()

    def rolls(self, rows: Any) -> None:
        """The rollout goes on with these rows."""
        now = set(numbers(rows))
        self._late = self._late or not self._waiting <= now
        self._waiting |= now

    def rewarded(self) -> None:
        """Rewards of the rows so far are there."""
        self._told = True
        self._waiting.clear()

    @property
    def in_time(self) -> bool:
        """Whether each sample's reward was known before the next sample was begun."""
        return self._told and not self._late

    def why_not(self) -> str:
        """Why no gradient can be kept in place of graphs, as far as it shows here, or nothing."""
        if not self.scored:
            return "no step function of the rollout is known to give a log-prob"
        if self.reference:
            return "the update evaluates a reference, whose term of the loss is no multiple of the log-prob"
        return "samples are chosen by their rewards" if self.best_of else ""
