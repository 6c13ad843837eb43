"""Commands that fetch, patch, check and plan diffusion-RL training repositories."""

__version__ = "0.1.0"
