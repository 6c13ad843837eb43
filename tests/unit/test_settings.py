"""Settings: what is allowed, where it comes from, what is said otherwise."""

import re
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from leangrpo_core import settings
from leangrpo_core.errors import CODES, LeanError
from leangrpo_core.report import Report
from leangrpo_tools import config


def test_defaults() -> None:
    found = settings.parse({})
    assert found == settings.Settings("retain", None, "upstream", "first")
    assert found.text() == "schedule=retain budget_gb=measured sync=upstream audit=first order=held-first inputs=exact"


def test_the_file_that_a_patch_leaves_has_every_setting_with_its_default() -> None:
    lines = [line.removeprefix("# ") for line in config.DEFAULTS.splitlines()]
    written = dict(line.split(": ") for line in lines if re.fullmatch(r"[a-z_]+: \S+", line))
    known = {field.name.replace("budget_bytes", "budget_gb") for field in fields(settings.Settings)}
    assert set(written) == known - {"given"}
    assert settings.parse(written) == settings.parse({})


@pytest.mark.parametrize(
    ("audit", "windows"), [("off", []), ("first", [1, 2, 3]), ("every:1", [1, 2, 3, 4, 5]), ("every:2", [1, 3, 5])]
)
def test_audited_windows(audit: str, windows: list[int]) -> None:
    found = settings.parse({"audit": audit})
    # the third window is the first that could be audited
    assert [window for window in range(1, 6) if found.audits(window, audited=window > 3)] == windows


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("schedule", "retian"),
        ("schedule", ""),
        ("budget_gb", "-1"),
        ("budget_gb", "nan"),
        ("budget_gb", "lots"),
        ("offload_gb", "measured"),
        ("offload_gb", "-1"),
        ("audit", "every:0"),
        ("audit", "every:"),
        ("audit", "always"),
        ("audit", "every:1.5"),
    ],
)
def test_refused_values_name_what_is_allowed(name: str, value: str) -> None:
    with pytest.raises(LeanError, match="LG601") as caught:
        settings.parse({name: value})
    assert settings.ALLOWED[name] in str(caught.value)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"buffers": "affine"}, True),
        ({"buffers": "sample"}, False),
        ({"buffers": "affine", "schedule": "reweight"}, False),
        ({"buffers": "affine", "schedule": "auto"}, False),
        ({"buffers": "affine", "schedule": "recompute"}, False),  # the off switch, beside settings that are left as is
    ],
)
def test_buffers_that_nothing_uses_are_said(values: dict[str, str], said: bool, capsys: pytest.CaptureFixture) -> None:
    Report().start(settings.parse(values), "0")
    assert ("set LEANGRPO_SCHEDULE=reweight" in capsys.readouterr().out) == said


def test_host_memory_is_named_where_it_is_set() -> None:
    assert settings.parse({"offload_gb": "0"}) == settings.parse({})
    found = settings.parse({"offload_gb": "unlimited", "budget_gb": "40"})
    assert (
        found.text()
        == "schedule=retain budget_gb=40 sync=upstream audit=first order=held-first inputs=exact offload_gb=unlimited"
    )


def test_unknown_variable_lists_the_known_ones() -> None:
    with pytest.raises(LeanError, match="LG601") as caught:
        settings.load({"LEANGRPO_SHEDULE": "retain"}, Path("/nowhere/x.py"))
    assert "LEANGRPO_SHEDULE" in str(caught.value) and "did you mean schedule (LEANGRPO_SCHEDULE)?" in str(caught.value)
    assert "shedule" in str(caught.value) and all(name in str(caught.value) for name in settings.ALLOWED)


def test_environment_overrides_the_file(tmp_path: Path) -> None:
    config = tmp_path / ".leangrpo" / "config.yaml"
    config.parent.mkdir()
    config.write_text("# comment\nschedule: recompute  # off\n\nbudget_gb: '12'\n")
    package = tmp_path / "pkg" / "_leangrpo" / "settings.py"
    found = settings.load({"LEANGRPO_BUDGET_GB": "0.5", "LEANGRPO_REPORT_DIR": "/x", "HOME": "/"}, package)
    assert found == settings.Settings("recompute", 0.5, "upstream", "first")
    assert found.budget_bytes == 5e8


@pytest.mark.parametrize("text", ["schedule recompute", "schedule: retain\nschedule: retain", "colour: red"])
def test_broken_file(tmp_path: Path, text: str) -> None:
    config = tmp_path / ".leangrpo" / "config.yaml"
    config.parent.mkdir()
    config.write_text(text)
    with pytest.raises(LeanError, match="LG601"):
        settings.load({}, tmp_path / "a" / "b.py")


def test_error_text() -> None:
    error = LeanError("LG602", "what", "fix")
    assert str(error).splitlines() == ["LG602: what", f"  likely cause: {CODES['LG602']}", "  what to do: fix"]


def test_an_installed_runtime_finds_the_config_of_the_script_that_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / ".leangrpo" / "config.yaml"
    config.parent.mkdir()
    config.write_text("schedule: recompute\n")
    monkeypatch.setattr(sys.modules["__main__"], "__file__", str(tmp_path / "pkg" / "train.py"), raising=False)
    assert settings.load({}).schedule == "recompute"
    assert settings.load({}, tmp_path.parent / "x.py").schedule == "retain"
