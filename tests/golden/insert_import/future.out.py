from __future__ import annotations
from pack._leangrpo import lean
x = 1
