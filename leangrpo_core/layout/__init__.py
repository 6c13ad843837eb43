"""LEANGRPO_LAYOUT and LEANGRPO_UPDATES: a rollout drawn and trained in parts."""

from .layout import Layout

__all__ = ["Layout"]
