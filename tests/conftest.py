"""Common to all tests: no settings of the shell leak in, one thread per process."""

import os

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _clean_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("LEANGRPO_") and name not in ("LEANGRPO_CACHE", "LEANGRPO_VENV"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("LEANGRPO_AUDIT", "off")
