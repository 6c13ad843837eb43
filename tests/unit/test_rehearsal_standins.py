"""What a rehearsal puts in place of things that a CPU or a copy of the tree lacks, and how it words torch's errors."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from support import minitrees
from torch import nn

from leangrpo_core import values
from leangrpo_rehearsal import eightbit, stubs
from leangrpo_tools.apply import apply
from leangrpo_tools.rehearsal import causes, runs, trees
from leangrpo_tools.rehearsal.rehearse import _tested, find_script


@pytest.mark.parametrize(("name", "base"), [("AdamW8bit", "AdamW"), ("PagedAdamW8bit", "AdamW"), ("SGD8bit", "SGD")])
def test_an_8_bit_optimizer_steps_as_torch_does(
    name: str, base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What only bitsandbytes understands is left out; torch's hooks see each step; the stand-in is written down."""
    monkeypatch.setattr(eightbit, "used", [])
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    for module in ("bitsandbytes", "bitsandbytes.optim"):
        monkeypatch.setitem(sys.modules, module, ModuleType(module))
        monkeypatch.delitem(sys.modules, module)
    stubs.install(("bitsandbytes",), always=("bitsandbytes",))
    import bitsandbytes as bnb  # pyright: ignore[reportMissingImports]
    from bitsandbytes.optim import AdamW8bit  # pyright: ignore[reportMissingImports]

    assert issubclass(AdamW8bit, torch.optim.AdamW)
    weights = [nn.Parameter(torch.ones(3)) for _ in range(2)]
    ours = getattr(bnb.optim, name)([weights[0]], lr=0.1, weight_decay=0.01, min_8bit_size=1)
    theirs = getattr(torch.optim, base)([weights[1]], lr=0.1, weight_decay=0.01)
    for weight, optimizer in zip(weights, (ours, theirs), strict=True):
        weight.grad = torch.tensor([1.0, -2.0, 0.5])
        optimizer.step()
    assert torch.equal(*weights) and not torch.equal(weights[0], torch.ones(3))
    eightbit.write(tmp_path)
    assert json.loads((tmp_path / "stand_ins.json").read_text()) == [name]


def test_it_is_only_replaced_where_the_script_asks_for_it(tmp_path: Path) -> None:
    (tmp_path / "with.py").write_text("import bitsandbytes as bnb\n")
    (tmp_path / "without.py").write_text("import torch\n")
    assert [eightbit.asked_for(tmp_path / name) for name in ("with.py", "without.py", "none.py")] == [
        True,
        False,
        False,
    ]


def test_relative_paths_lead_to_a_copy_of_the_tree(tmp_path: Path) -> None:
    """Data and configurations are found, code is not there twice, the rehearsal's own files win, the tree stays."""
    tree, workdir = tmp_path / "tree", tmp_path / "work"
    for name in ("dataset/x.json", "config/a.yaml", "config/a.py", ".leangrpo/state.json", "prompts/train.txt"):
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_text("theirs")
    (tree / "outside").symlink_to("/etc")
    before = sorted(path for path in tree.rglob("*"))
    (tmp_path / "assets/prompts").mkdir(parents=True)
    (tmp_path / "assets/prompts/train.txt").write_text("ours")
    launched: list[dict] = []
    script = SimpleNamespace(launch_natively=lambda workdir, config: SimpleNamespace(argv=(), env={}))
    server = SimpleNamespace(run=lambda call, jobs, logs, timeout_s: launched.extend(jobs) or [])
    stage = runs.Stage(server, script, "m", runs.Config(), tmp_path, assets=tmp_path / "assets")  # type: ignore[arg-type]
    stage.run("native", tree, 1)
    workdir = Path(launched[0]["workdir"])
    (workdir / "dataset/x.json").write_text("changed by the script")
    found = {str(path.relative_to(workdir)): path.read_text() for path in workdir.rglob("*") if path.is_file()}
    assert found == {
        "dataset/x.json": "changed by the script", "config/a.yaml": "theirs", "prompts/train.txt": "ours",
    }  # fmt: skip
    assert sorted(tree.rglob("*")) == before and (tree / "dataset/x.json").read_text() == "theirs"


class Net(nn.Module):
    def forward(self, state: torch.Tensor, extra: dict | None = None) -> torch.Tensor:
        return state


def test_a_forward_that_hides_its_parameters_is_named_and_not_looked_through() -> None:
    """What took its place may make something of an argument that is absent: then None is another argument."""
    import functools

    state = torch.ones(1)
    spelt = ({"extra": None}, {})
    plain, hiding, showing = Net(), Net(), Net()
    inner = hiding.forward

    def profiled(*args: object, **kwargs: object) -> object:
        return inner(*args, **kwargs)  # type: ignore[arg-type]

    hiding.forward = profiled  # type: ignore[method-assign]
    showing.forward = functools.wraps(showing.forward)(lambda *a, f=showing.forward, **k: f(*a, **k))  # type: ignore
    for net, same in ((plain, True), (showing, True), (hiding, False)):
        first, second = (values.named(net, (state,), kwargs) for kwargs in spelt)
        assert (first.keys() == second.keys()) is same and bool(values.hidden(net)) is not same
    assert "profiled" in values.hidden(hiding) and "functools.wraps" in values.hidden(hiding)


def test_torchs_own_errors_get_their_cause() -> None:
    """Errors as torch raises them here, and one that is nobody's."""

    def message(fails: object) -> str:
        with pytest.raises(RuntimeError) as caught:
            fails()  # type: ignore[operator]
        return str(caught.value)

    weight = torch.ones(2, requires_grad=True)
    walked = (weight * weight).sum()
    walked.backward()
    found = [
        causes.of(message(lambda: torch.ones(1).sum().backward())),
        causes.of(message(walked.backward)),
        causes.of(message(lambda: nn.functional.embedding(torch.tensor([0]), torch.ones(0)))),
        causes.of(message(lambda: nn.functional.linear(torch.ones(2, 4), torch.ones(0)))),
        causes.of(message(lambda: torch.ones(2) @ torch.ones(3))),
    ]
    assert ["no_grad" in found[0], "twice" in found[1], "FSDP" in found[2], "FSDP" in found[3]] == [True] * 4, found
    assert found[4] == ""


def test_the_file_that_was_tested_is_the_users(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    shutil.copytree(minitrees.TREE, tree, ignore=shutil.ignore_patterns("__pycache__"))
    (tree / "mini_grpo/train.py").rename(tree / "mini_grpo/ours.py")
    apply("mini", tree=tree, script_as=["train=mini_grpo/ours.py"])
    found = trees.export(tree, tmp_path / "copies", "train")
    script = find_script(found.rehearsal)
    assert found.file == "mini_grpo/ours.py" and script.path == "mini_grpo/train.py"
    for copy in (found.native, found.patched):
        assert (copy / script.path).read_text() == (copy / found.file).read_text()
    assert _tested(script, script.configure(), found.file)[0].startswith("mini_grpo/ours.py, 1 rank")
    assert _tested(script, script.configure(), "")[0].startswith("mini_grpo/train.py, 1 rank")


def test_a_rank_that_a_signal_has_ended_is_explained_without_the_names_of_c_modules(tmp_path: Path) -> None:
    log = tmp_path / "logs/patched/rank1.err"
    log.parent.mkdir(parents=True)
    log.write_text(
        "terminate called after throwing an instance of 'gloo::EnforceNotMet'\n"
        "  what():  op.preamble.length <= op.nbytes. 8 vs 4\nFatal Python error: Aborted\n\n"
        'Current thread 0x1 (most recent call first):\n  File "reduce.py", line 3 in all_reduce\n\n'
        "Extension modules: numpy._core, torch._C, yaml._yaml (total: 100)\n"
    )
    stage = runs.Stage(None, None, "m", runs.Config(ranks=2), tmp_path)  # type: ignore[arg-type]
    text = stage.explain("patched", [runs.RankExit(0, 0), runs.RankExit(1, -6)])
    assert "Extension modules" not in text and "ended by signal 6" in text and "line 3 in all_reduce" in text
    assert "lean.flush" in text and "Fatal Python error" in text
