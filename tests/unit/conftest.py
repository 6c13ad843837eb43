"""Fixtures that several files share."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch


@pytest.fixture
def in_float64() -> Any:
    """New networks and tensors are in double precision."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture
def windows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[], list[dict[str, Any]]]:
    """What the runtime has reported of each window so far."""
    monkeypatch.setenv("LEANGRPO_REPORT_DIR", str(tmp_path))
    return lambda: [json.loads(line) for line in (tmp_path / "rank0.jsonl").read_text().splitlines()]
