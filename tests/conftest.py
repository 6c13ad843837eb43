"""Common to all tests: no settings of the shell leak in, one thread per process."""

import os

import pytest
import torch
from support import rounding

if os.environ.get(rounding.NAME) == "by-shape":
    rounding.install()
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [rounding.STARTUP, os.environ.get("PYTHONPATH")]))
torch.set_num_threads(1)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests marked `matrix` run only if they are asked for: `-m matrix`."""
    if "matrix" not in config.option.markexpr:
        config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("matrix")])
        items[:] = [item for item in items if not item.get_closest_marker("matrix")]


@pytest.fixture(autouse=True)
def _clean_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("LEANGRPO_") and name not in ("LEANGRPO_CACHE", "LEANGRPO_VENV"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("LEANGRPO_AUDIT", "off")
    for name in ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "LINES"):  # nor the terminal's
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
