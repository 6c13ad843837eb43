"""What a rehearsal can end with, in one place: the verdicts, the warnings that go with one, and exit statuses."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence

NOTHING_REPLAYED = "LG411"
PARTLY_REPLAYED = "LG412"
HELD_IN_VAIN = "LG413"


@dataclasses.dataclass(frozen=True)
class Warned:
    """Something that makes no number wrong and that a user has to know. `code` is one of `errors.CODES`."""

    code: str
    text: str


class Verdict(enum.Enum):
    """What both trees' runs say of the patch; the values are those of the text and of `verdict` in JSON."""

    MATCH = "MATCH"
    WARNED = "MATCH with warnings"
    MISMATCH = "MISMATCH"

    @classmethod
    def of(cls, problems: Sequence[str], warnings: Sequence[Warned]) -> Verdict:
        """One problem makes a mismatch, whatever else there is."""
        if problems:
            return cls.MISMATCH
        return cls.WARNED if warnings else cls.MATCH

    def exit_code(self, strict: bool = False) -> int:
        """0 or, for a mismatch, 1. With `strict` a warning is 1, too."""
        return int(self is Verdict.MISMATCH or (strict and self is Verdict.WARNED))
