"""What a run writes down: one JSON line per optimizer update, with digests so that two runs can be compared exactly."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn


def digest(tensors: Iterable[Tensor | None]) -> str:
    """sha256 over the raw bytes of the tensors, in their order; a missing tensor counts as such."""
    total = hashlib.sha256()
    for tensor in tensors:
        plain = None if tensor is None else tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
        total.update(b"none" if plain is None else plain.tobytes())
    return total.hexdigest()


class Metrics:
    """Counts policy forwards and the seconds between updates, and appends a line per update on rank 0."""

    def __init__(self, path: Path | None, policy: nn.Module, rank: int) -> None:
        self._path = path if rank == 0 else None
        self._policy = policy
        policy.register_forward_pre_hook(self._count)
        if self._path:
            self._path.unlink(missing_ok=True)
        self.restart()

    def _count(self, *_: object) -> None:
        self._forwards["grad" if torch.is_grad_enabled() else "no_grad"] += 1

    def restart(self) -> None:
        """Begin counting anew, e.g. after an evaluation, which is not part of any update."""
        self._forwards = {"grad": 0, "no_grad": 0}
        self._since = time.perf_counter()

    def gradients(self) -> str | None:
        """Digest of the gradients as they are now (this rank's shard), if metrics are wanted."""
        return digest(p.grad for p in self._policy.parameters()) if self._path else None

    def record(self, **values: Any) -> None:
        """Write one update's line and begin counting anew."""
        seconds = time.perf_counter() - self._since
        if self._path:
            weights = digest(self._policy.parameters())
            line = values | {"weights": weights, "forwards": self._forwards, "seconds": round(seconds, 4)}
            with self._path.open("a") as out:
                out.write(json.dumps(line) + "\n")
        self.restart()
