"""What torch's own errors mean in a patched tree, in words."""

from __future__ import annotations

import re

KNOWN = (
    (
        r"element 0 of tensors does not require grad",
        "the loss does not depend on the network: the policy call ran under no_grad, or what it returned was detached",
    ),
    (
        r"Trying to backward through the graph a second time|have been modified by an inplace operation",
        "a graph was walked twice, or its weights had changed: the rollout may lack the no_grad that the patch "
        "expects, or the optimizer stepped before lean.flush",
    ),
    (
        r"weight' must be 2-D|size mismatch.*\b0\b|setStorage.*out of bounds|invalid for input of size 0",
        "weights were used of which FSDP holds shards only: the call went to the module inside the wrapper, or to a "
        "copy of it, and not to the wrapped network",
    ),
    (
        r"op\.preamble\.length <= op\.nbytes|gloo::EnforceNotMet|Connection closed by peer",
        "ranks were in different collectives: one of them left out lean.flush, a policy call or a backward that the "
        "others made",
    ),
)


def of(message: str) -> str:
    """The likely cause of a known error, in brackets behind its message; else nothing."""
    for pattern, words in KNOWN:
        if re.search(pattern, message):
            return f" (likely cause: {words})"
    return ""
