"""Runtime of leangrpo-kit: keeps the rollout's graphs so that the first update does not recompute them.

A patched tree holds a copy of this package and calls the methods of :data:`lean`. It needs torch and nothing else.
"""

from .errors import LeanError
from .run import VERSION
from .runtime import Lean, lean

__all__ = ["VERSION", "Lean", "LeanError", "lean"]
