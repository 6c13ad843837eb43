"""LEANGRPO_SCHEDULE=auto: measures a native window and one kept call, and chooses how windows run."""

from .auto import Auto

__all__ = ["Auto"]
