"""Every codemod against its golden files: NAME.in.py becomes NAME.out.py, or is refused as NAME.yaml says."""

from pathlib import Path

import libcst as cst
import pytest
import yaml

from leangrpo_tools.codemods.params import PARAMS
from leangrpo_tools.codemods.registry import CODEMODS
from leangrpo_tools.recipe import Edit
from leangrpo_tools.transform import Patched, transform

GOLDEN = Path(__file__).parents[1] / "golden"
CASES = sorted(GOLDEN.glob("*/*.in.py"))


def _name(path: Path) -> str:
    return f"{path.parent.name}-{path.name.removesuffix('.in.py')}"


@pytest.mark.parametrize("path", CASES, ids=_name)
def test_golden(path: Path) -> None:
    said = yaml.safe_load(path.with_name(path.name.replace(".in.py", ".yaml")).read_text())
    params = PARAMS[path.parent.name].model_validate(said["params"])
    edit = Edit("x.py", path.parent.name, params, said["count"], "as the golden file says")
    result = transform("x.py", path.read_bytes(), [edit])
    out = path.with_name(path.name.replace(".in.py", ".out.py"))
    if "refused" in said:
        assert not out.exists()
        assert isinstance(result, list)
        assert (result[0].taken is not None) == (said["refused"] == "taken")
        assert "x.py: " + path.parent.name in result[0].text()
        return
    assert isinstance(result, Patched)
    assert result.data.decode() == out.read_text()
    assert len(result.places[0].lines) == said["count"]


def test_each_codemod_has_golden_files_and_a_before_and_after() -> None:
    assert set(CODEMODS) == set(PARAMS)
    for name, find in CODEMODS.items():
        cases = [path for path in CASES if path.parent.name == name]
        refused = [path for path in cases if not path.with_name(path.name.replace(".in.", ".out.")).exists()]
        assert refused and len(cases) > len(refused), name
        words = __import__(find.__module__, fromlist=["x"]).__doc__ or ""
        assert "Before::" in words or "Before:" in words, name
        assert "After" in words, name


def test_golden_outputs_parse_and_belong_to_an_input() -> None:
    for path in GOLDEN.glob("*/*.out.py"):
        cst.parse_module(path.read_bytes())
        assert path.with_name(path.name.replace(".out.", ".in.")).exists()
