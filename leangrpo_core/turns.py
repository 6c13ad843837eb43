"""Which policy calls are the last before gradients are due: the last of an update, and of a prompt group."""

from dataclasses import dataclass


@dataclass
class Turns:
    """The policy calls of the updates after one rollout, by number. Before a rollout each call stands alone.

    An update walks all steps of a batch of rows before the next batch. If it makes another number of calls, it is only
    less well known which one is the last: whoever asks must still see for himself at the boundary.

    Attributes:
        trained: steps per row, and so calls per batch.
        batch: rows per call.
        window: rows per update.
        group: rows per prompt group; a batch with rows of two groups belongs to the first one.
        by_group: whether the last call of a group counts, too.
        rows: of the rollout. After its last call gradients are due, too, however full the update is: what upstream
            does with them then, it does to reduced ones. None where its updates take rows of several rollouts.
    """

    trained: int = 1
    batch: int = 1
    window: int = 1
    group: int = 1
    by_group: bool = False
    rows: int | None = None
    _made: int = 0  # calls
    _since: int = 0  # calls since the rollout, or since all its rows were trained
    _boundary: bool = False

    def __post_init__(self) -> None:
        self.trained, self.batch = max(self.trained, 1), max(self.batch, 1)
        self.window, self.group = max(self.window, 1), max(self.group, 1)

    def next(self) -> tuple[bool, bool]:
        """Counts a call: whether gradients were due after the one before, in this update, and are after this one."""
        before, self._made = self._boundary, self._made + 1
        rows, rest = self._made // self.trained * self.batch, self._made % self.trained
        self._boundary = not rest and (
            self._ends(rows, self.window) or (self.by_group and self._ends(rows, self.group))
        )
        self._since += 1
        if self.rows and self._since == self.trained * -(-self.rows // self.batch):
            self._since, self._boundary = 0, True
        return before, self._boundary

    def _ends(self, rows: int, every: int) -> bool:
        """Whether the batch that makes it `rows` is the last one that begins within a stretch of `every` rows."""
        return (rows - self.batch) // every < rows // every

    def update_over(self) -> None:
        """The boundary is here, whatever was counted."""
        update = self.trained * -(-self.window // self.batch)
        self._made = -(-self._made // update) * update
        self._boundary = False
