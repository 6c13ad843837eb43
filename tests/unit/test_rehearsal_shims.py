"""Stand-ins, hooks and the fork server, each in a process of its own where they change torch."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from leangrpo_rehearsal import base, importhook
from leangrpo_tools import apply
from leangrpo_tools.errors import KitError
from leangrpo_tools.rehearsal import bench, verify
from leangrpo_tools.rehearsal.client import ForkServer
from leangrpo_tools.rehearsal.runs import Injection


def run(code: str, tmp_path: Path) -> str:
    """The output of a fresh interpreter."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, cwd=tmp_path, timeout=120,
        env={"PYTHONPATH": ":".join(sys.path), "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_device_has_a_generator_of_its_own(tmp_path: Path) -> None:
    out = run(
        """
        import torch
        from leangrpo_rehearsal import devicerng
        devicerng.install()
        device = torch.device("cpu")
        def noise_then_permutation(moved):
            torch.manual_seed(3)
            if moved:
                order = torch.randperm(8)
            noise = [torch.randn(4, device=device), torch.randn_like(torch.zeros(3)), torch.rand(2, device=device)]
            if not moved:
                order = torch.randperm(8)
            return noise, order
        (a, p), (b, q) = noise_then_permutation(False), noise_then_permutation(True)
        assert torch.equal(p, q) and all(torch.equal(x, y) for x, y in zip(a, b))
        torch.manual_seed(3)
        before = torch.get_rng_state()
        torch.randn(4, device=device), torch.randn_like(torch.zeros(3))
        assert torch.equal(before, torch.get_rng_state())
        torch.randn(4, device="cpu")
        assert not torch.equal(before, torch.get_rng_state())
        mine = torch.Generator().manual_seed(5)
        assert torch.equal(torch.randn(4, device=device, generator=mine), torch.randn(4, generator=mine.manual_seed(5)))
        print("fine")
        """,
        tmp_path,
    )
    assert out == "fine\n"


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_cuda_calls_end_up_on_the_cpu(tmp_path: Path, precision: str) -> None:
    out = run(
        f"""
        import os, pathlib, torch, torch.distributed as dist
        from leangrpo_rehearsal import shims
        shims.install({precision!r}, pathlib.Path("store").absolute(), 20)
        torch.cuda.set_device(0); torch.cuda.synchronize()
        assert torch.zeros(1).to(torch.cuda.current_device()).device.type == "cpu"
        with torch.autocast("cuda", torch.bfloat16):
            print(torch.nn.Linear(2, 2)(torch.ones(1, 2)).dtype)
        with torch.amp.autocast("cuda", enabled=False):
            assert torch.nn.Linear(2, 2)(torch.ones(1, 2)).dtype == torch.float32
        torch.save({{"a": torch.ones(1)}}, "file.pt")
        torch.load("file.pt", map_location="cuda:cpu")
        os.environ.update(RANK="0", WORLD_SIZE="1")
        dist.init_process_group("nccl")
        assert dist.get_backend() == "gloo"
        value = torch.tensor([4.0])
        dist.all_reduce(value, op=dist.ReduceOp.AVG)
        assert value.item() == 4.0
        loader = torch.utils.data.DataLoader([1, 2], batch_size=2, num_workers=4, pin_memory=True,
                                             collate_fn=lambda rows: (tuple(rows), "text"))
        assert list(loader) == [[[1, 2], "text"]]
        """,
        tmp_path,
    )
    assert out.strip() == ("torch.bfloat16" if precision == "bf16" else "torch.float32")


def test_stubs_stand_in_for_missing_modules_only(tmp_path: Path) -> None:
    out = run(
        """
        from leangrpo_rehearsal import stubs
        print(sorted(stubs.install(["json", "no_such_module"], always=("wandb",))))
        import no_such_module.deep.inside as inside
        from no_such_module import Base, decorate
        from no_such_module.x import Y
        class Mine(Base, ): pass
        @decorate(1)
        def f(): return 7
        import wandb
        wandb.init(project="x", config=object()); wandb.log({"a": 1}, step=1)
        import json
        assert json.loads("1") == 1 and wandb.run is not None
        """,
        tmp_path,
    )
    assert out.strip() == "['no_such_module', 'wandb']"


def test_a_hook_runs_right_after_its_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "hooked_package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "part.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    seen: list[int] = []
    importhook.after_import("hooked_package.part", lambda module: seen.append(module.value))
    import hooked_package.part  # type: ignore[import-not-found]

    assert seen == [1] and hooked_package.part.value == 1


def test_usage_errors_cost_no_import() -> None:
    for wrong in ({"schedule": "eager"}, {"precision": "fp16"}, {"budget": "many"}):
        with pytest.raises(KitError) as caught:
            verify("mini", script="mini", **wrong)  # type: ignore[arg-type]
        assert caught.value.code == "LG403" and caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("name", "script", "chosen", "words"),
    [
        ("mini", "train", {"options": [("depth", "3")]}, "unknown option depth; this script has"),
        ("dancegrpo", "flux", {"options": [("side", "64"), ("depth", "3")]}, "unknown option depth; this script has"),
        (
            "dancegrpo",
            "flux",
            {"options": [("generations", "3")], "updates_per_rollout": 2},
            "divide 3 samples; 1, 3 do",
        ),
    ],
)
def test_what_a_script_cannot_do_is_said_before_a_tree_is_made(
    name: str, script: str, chosen: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_tree(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a tree was made")

    monkeypatch.setattr(apply, "apply", no_tree)
    for command in (verify, bench):
        with pytest.raises(KitError, match="LG403") as caught:
            command(name, script=script, **chosen)
        assert words in caught.value.what


def test_the_server_reports_a_module_it_cannot_import(tmp_path: Path) -> None:
    with ForkServer(tmp_path) as server, pytest.raises(KitError) as caught:
        server.preload(("no_such_module_anywhere",))
    assert caught.value.code == "LG401" and "no_such_module_anywhere" in caught.value.what


def test_injections_choose_variant_and_rank() -> None:
    fault = Injection("a.py:b", ranks=(1,), variants=("patched",))
    assert fault.applies("patched", 1)
    assert not fault.applies("patched", 0) and not fault.applies("native", 1)


def test_sizes_follow_upstreams_arithmetic() -> None:
    config = base.Config(updates=3, updates_per_rollout=2)
    assert (config.rollouts, config.accumulation, base.Script().trained(config)) == (2, 2, 3)


@pytest.mark.parametrize(
    ("ranks", "schedule", "sync", "synchronised", "bitwise"),
    [
        (1, "retain", "late", True, True),
        (2, "retain", "upstream", True, True),
        (2, "retain", "late", True, False),
        (2, "recompute", "late", True, False),
        (2, "recompute", "late", False, False),
        (2, "retain", "upstream", False, True),
    ],
)
def test_bounds(ranks: int, schedule: str, sync: str, synchronised: bool, bitwise: bool) -> None:
    script, config = base.Script(), base.Config(ranks=ranks, schedule=schedule, sync=sync)
    script.synchronised = synchronised
    assert script.averaged(config) == (sync == "late" and ranks > 1 and not synchronised)
    bound = script.bound(config)
    assert bound.bitwise is bitwise and (bitwise or bound.rel_l2 == 1e-6)
