"""FlowGRPO's own presets, read as text, beside what running its config gives. Only here it is run."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from pathlib import Path

import pytest

from leangrpo_tools import data, fetch, lock, recipe
from leangrpo_tools.errors import KitError
from leangrpo_tools.plan import facts, plan
from leangrpo_tools.plan.pyeval import Evaluator
from leangrpo_tools.plan.pynames import Function
from leangrpo_tools.plan.pyvalues import Entries

pytestmark = pytest.mark.upstream
FILES = ("config/grpo.py", "config/grpo_guard.py")
RUN = """
import importlib.util, json, sys, types
try:
    import ml_collections
except ImportError:
    class ConfigDict(dict):
        __getattr__ = dict.__getitem__
        def __setattr__(self, name, value):
            if isinstance(value, dict) and not isinstance(value, ConfigDict):
                value = ConfigDict(value)
            old = self.get(name)
            self[name] = float(value) if type(old) is float and type(value) is int else value
        def items(self):
            return dict.items(self)
    sys.modules["ml_collections"] = types.SimpleNamespace(ConfigDict=ConfigDict)
    import ml_collections

def load_source(name, path):
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module

sys.modules["imp"] = types.SimpleNamespace(load_source=load_source)

def leaves(config, before=""):
    found = {}
    for name, value in config.items():
        inner = isinstance(value, ml_collections.ConfigDict)
        found.update(leaves(value, f"{before}{name}.") if inner else {before + name: repr(value)})
    return found

found = {}
for path in sys.argv[1:]:
    module = load_source("config", path)
    for name, value in vars(module).items():
        if isinstance(value, types.FunctionType) and name != "get_config":
            found[f"{path}:{name}"] = leaves(module.get_config(name))
print(json.dumps(found))
"""


load_once, scripts_once, lock_once = map(functools.cache, (facts.load, recipe.scripts_of, lock.load))


@pytest.fixture(autouse=True)
def _kit_s_data_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name, once in (
        (facts, "load", load_once),
        (recipe, "scripts_of", scripts_once),
        (lock, "load", lock_once),
    ):
        monkeypatch.setattr(module, name, once)


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    entry = lock.load().upstreams["flowGRPO"]
    assert isinstance(entry, lock.GitEntry)
    if not fetch.cached("flowGRPO", entry):
        pytest.skip("flowGRPO is not in the cache; fill it with: apply-patch flowGRPO /tmp/x [--source PATH]")
    folder = tmp_path_factory.mktemp("real") / "flowGRPO"
    fetch.checkout("flowGRPO", entry, folder)
    return folder


def test_every_entry_of_every_preset_is_what_running_it_gives(tree) -> None:
    command = [sys.executable, "-c", RUN, *(str(tree / file) for file in FILES)]
    done = subprocess.run(command, cwd=tree, capture_output=True, text=True, check=True)
    ran = json.loads(done.stdout)
    read: dict[str, dict[str, str]] = {}
    for file in FILES:
        evaluator = Evaluator(tree)
        module = evaluator.load(tree / file)
        for name, function in list(module.names.items()):
            if isinstance(function, Function) and name != "get_config":
                config = evaluator.call(module, "get_config", [name])
                assert isinstance(config, Entries) and config.others is None
                read[f"{tree / file}:{name}"] = {key: repr(value) for key, value in config.leaves().items()}
    assert read == ran
    assert len(ran) > 25 and all(len(values) > 50 for values in ran.values())


def test_every_preset_of_a_known_script_is_planned(tree, monkeypatch) -> None:
    monkeypatch.chdir(tree)
    for name, script in facts.load("flowGRPO").scripts.items():
        assert script.presets
        for preset in script.presets:
            if preset == "pickscore_sd3_fast":
                continue  # upstream's script stops with it: it has no sde_type
            report = plan("flowGRPO", preset=preset, ranks=None if "wan" not in preset else 8)
            assert (report.script, report.rollout.updates) == (name, 2), preset
            assert report.rollout.leftover == 0


@pytest.mark.parametrize(
    ("file", "ranks", "calls", "graphs", "ratio"),
    [
        ("single_node/grpo.sh", 1, {"no_grad": 80, "grad": 72}, 36, 1.13),
        ("multi_node/sd3.sh", 32, {"no_grad": 40, "grad": 36}, 18, 1.13),
        ("multi_node/sd3_fast.sh", 32, {"no_grad": 40, "grad": 12}, 6, 1.1),
        ("multi_node/sd3_grpo_guard.sh", 16, {"no_grad": 80, "grad": 72}, 36, 1.18),
        ("single_node/grpo_flux.sh", 8, {"no_grad": 288, "grad": 240}, 0, 1.0),
        ("multi_node/flux_fast.sh", 32, {"no_grad": 72, "grad": 36}, 0, 1.0),
        ("multi_node/flux_kontext.sh", 28, {"no_grad": 72, "grad": 60}, 0, 1.0),
        ("single_node/grpo_qwenimage.sh", 8, {"no_grad": 160, "grad": 32}, 16, 1.06),
        ("multi_node/qwenimage_edit.sh", 32, {"no_grad": 40, "grad": 36}, 18, 1.13),
    ],
)
def test_shipped_launch_files(tree, file, ranks, calls, graphs, ratio) -> None:
    report = plan("flowGRPO", tree / "scripts" / file)
    assert (report.ranks, report.rollout.graphs, round(report.rollout.ratio, 2)) == (ranks, graphs, ratio)
    assert report.rollout.network_calls(False) == calls and report.rollout.updates == 2


def test_a_script_that_is_left_alone(tree) -> None:
    with pytest.raises(KitError) as caught:
        plan("flowGRPO", tree / "scripts/multi_node/bagel/main.sh")
    assert caught.value.code == "LG210" and "scripts/train_bagel.py" in caught.value.what


def test_readme_says_what_the_example_prints(tree) -> None:
    preset = f"{tree}/config/grpo.py:general_ocr_sd3_4gpu"
    report = plan("flowGRPO", ranks=4, gpu_gb=140, preset=preset, overrides=["train.beta=0"])
    memory, best = report.memory, report.table.recommended
    assert memory and memory.graph and best
    said = (
        f"The second prints {memory.graph / 1e9:.3g} GB for each graph (of a call with {report.rollout.batch} "
        f"samples), of which {best.held.fit} of {best.held.graphs} fit: ratio {best.ratio:.2f}, "
        f"and {report.rollout.ratio:.2f} if"
    )
    readme = " ".join((data.data_root() / "README.md").read_text(encoding="utf-8").split())
    assert said in readme
