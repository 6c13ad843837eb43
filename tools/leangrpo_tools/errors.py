"""Every error the commands can end with, under one stable code each.

Codes: LG1xx lock file and sources, LG2xx recipes and anchors, LG3xx the tree being patched, LG4xx rehearsal, LG5xx
planning. LG6xx belongs to the runtime, which cannot import this package. Exit codes: 1 the thing asked about is not
so, 2 usage, 3 cannot be done here (network, missing source, foreign state).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Code:
    """One entry of the registry: a short title and the exit status that goes with it."""

    title: str
    exit_code: int


CODES: dict[str, Code] = {
    "LG101": Code("the lock file is invalid", 2),
    "LG102": Code("unknown upstream", 2),
    "LG103": Code("the destination is taken", 2),
    "LG104": Code("no network", 3),
    "LG105": Code("the source cannot be read", 3),
    "LG106": Code("the disk is full", 3),
    "LG107": Code("the source lacks the pinned commit or version", 3),
    "LG108": Code("wrong hash", 1),
    "LG109": Code("the source lacks files", 3),
    "LG110": Code("git does not work here", 3),
    "LG111": Code("the kit's data is missing", 3),
    "LG112": Code("a folder cannot be written", 3),
    "LG113": Code("the bundle is damaged", 3),
    "LG114": Code("the bundle does not fit", 3),
    "LG115": Code("pip does not work here", 3),
    "LG116": Code("the pinned wheel cannot be unpacked", 1),
    "LG117": Code("nothing to gain from this upstream", 1),
    "LG120": Code("unknown error code", 2),
    "LG121": Code("the command line is not understood", 2),
    "LG131": Code("a path cannot be used", 2),
    "LG132": Code("the cache is damaged", 3),
    "LG122": Code("a package that the kit needs is missing or too old", 3),
    "LG199": Code("an unexpected error", 3),
    "LG201": Code("an anchor does not match", 1),
    "LG202": Code("the recipe is invalid", 2),
    "LG203": Code("unknown script", 2),
    "LG204": Code("syntax error in a file to patch", 1),
    "LG205": Code("a file cannot be kept byte for byte", 1),
    "LG206": Code("a name is taken in a file to patch", 1),
    "LG207": Code("the patched text is not valid Python", 1),
    "LG208": Code("a file is too large to patch", 1),
    "LG209": Code("--anchor names no place", 2),
    "LG210": Code("this script is left alone", 2),
    "LG301": Code("not a patched tree", 2),
    "LG302": Code("edits and patch changed the same lines", 1),
    "LG303": Code("a path leaves the tree", 1),
    "LG305": Code("a file cannot be written", 3),
    "LG306": Code("a file to patch is missing", 1),
    "LG307": Code("the vendored folder is taken", 1),
    "LG308": Code("the state file is lost or unreadable", 3),
    "LG309": Code("an interrupted run cannot be completed", 1),
    "LG310": Code("the tree belongs to another upstream", 2),
    "LG311": Code("--script-as names no file for a script", 2),
    "LG312": Code("another commit or version than the pin", 1),
    "LG401": Code("could not rehearse", 3),
    "LG402": Code("the rehearsal's recorder failed", 3),
    "LG405": Code("this interpreter cannot rehearse", 3),
    "LG403": Code("no such rehearsal", 2),
    "LG411": Code("the rehearsal matches, and nothing was replayed", 1),
    "LG412": Code("the rehearsal matches, and not all that could be was replayed", 1),
    "LG413": Code("the rehearsal matches, and graphs were held that no update used", 1),
    "LG404": Code("a package of the training environment is missing or too old", 3),
    "LG501": Code("the launch file cannot be read", 2),
    "LG502": Code("the launch file does not start a known script", 2),
    "LG503": Code("the number of ranks is not known", 2),
    "LG504": Code("the value of a flag is not known", 2),
    "LG505": Code("the launch makes no sense as it is written", 1),
    "LG506": Code("this script cannot be planned", 2),
    "LG507": Code("the kit's planning data is invalid", 2),
    "LG508": Code("the config cannot be read", 2),
    "LG509": Code("an entry of the config is not known", 2),
}


class KitError(Exception):
    """An error that a user can act on: what happened, the likely cause, and what helps."""

    def __init__(self, code: str, what: str, *, cause: str = "", fix: str = "") -> None:
        super().__init__(what)
        self.code = code
        self.what = what
        self.cause = cause
        self.fix = fix

    @property
    def exit_code(self) -> int:
        """The exit status of the command."""
        return CODES[self.code].exit_code

    def __str__(self) -> str:
        lines = [f"error {self.code}: {self.what}"]
        if self.cause:
            lines.append(f"cause: {self.cause}")
        if self.fix:
            lines.append(f"fix: {self.fix}")
        return "\n".join(lines)

    def to_json(self) -> dict[str, object]:
        """The error as plain data, for ``--json``."""
        return {"code": self.code, "what": self.what, "cause": self.cause, "fix": self.fix}
