"""What is known of all variables at a place of the file, and where several ways meet."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from leangrpo_tools.plan.shell.values import Value, merge


@dataclass
class State:
    """What is known at a place of the file.

    Attributes:
        variables: by name; `@` is the arguments, `NAME()` a function: its text, and the line before it. What is not
            here is the environment's.
        exported: names that programs get.
        lost: why a variable that is not here may still have a value that is not from the environment.
        dead: nothing after this place is run.
    """

    variables: dict[str, Value] = field(default_factory=dict)
    exported: set[str] = field(default_factory=set)
    lost: str = ""
    dead: bool = False

    def copy(self) -> State:
        return State(dict(self.variables), set(self.exported), self.lost, self.dead)

    def become(self, other: State) -> None:
        """Take over what is known at another place."""
        vars(self).update(vars(other.copy()))

    def lose(self, why: str) -> None:
        """Any variable may have another value from here on."""
        self.variables = {name: merge([value, None], why) for name, value in self.variables.items()}
        self.lost = self.lost or why


def join(states: Iterable[State], why: str) -> State:
    """What is known where several ways meet."""
    ways = list(states)
    alive = [state for state in ways if not state.dead] or ways[:1]
    names = dict.fromkeys(name for state in alive for name in state.variables)
    variables = {name: merge((state.variables.get(name) for state in alive), why) for name in names}
    exported = set().union(*(state.exported for state in alive))
    return State(variables, exported, next((state.lost for state in alive if state.lost), ""), alive[0].dead)
