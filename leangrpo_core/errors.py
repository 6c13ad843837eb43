"""Errors that stop a training run: each has a stable code, says what happened, why it matters and what to do."""

CODES = {
    "LG601": "a setting is unknown or has a value that is not allowed",
    "LG602": "ranks run with different settings",
    "LG603": "the optimizer stepped before the kept graphs were walked",
    "LG604": "the network changed between a replayed call and the flush",
    "LG605": "backward ran twice through one replayed output",
    "LG606": "a native call would meet kept graphs whose gradient is not known yet",
    "LG607": "the audit found another gradient than the native one",
    "LG608": "a kept call ran out of memory",
    "LG609": "replicas hold different gradients after the flush",
    "LG610": "a call into the runtime contradicts the one before it",
    "LG611": "another rank stopped, so this one cannot go on",
    "LG612": "gradients were not reduced although they were due",
    "LG613": "the layout or the updates that are asked for cannot be had with this script or these sizes",
    "LG614": "a call that has to be made again can no longer be made as it was",
}


class LeanError(RuntimeError):
    """Stops the run before a wrong gradient reaches the optimizer.

    Args:
        code: one of :data:`CODES`.
        what: what happened, with the figures.
        fix: the command, setting or place in the code that helps.
    """

    def __init__(self, code: str, what: str, fix: str) -> None:
        self.code = code
        self.what = what
        self.fix = fix
        super().__init__(f"{code}: {what}\n  likely cause: {CODES[code]}\n  what to do: {fix}")
