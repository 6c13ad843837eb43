"""Which rows ran in one call: noted in a patched run, repeated in a native one, and what a network is wrapped in."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from leangrpo_core import keep, replay
from leangrpo_rehearsal import shapes

POLICY = "policy_for_shapes:Policy"


class Policy(nn.Module):
    """Rows are independent, but each call says how many there were."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.rows: list[list[float]] = []

    def forward(self, state: torch.Tensor, *, shared: torch.Tensor, scale: float = 1.0) -> tuple[torch.Tensor, dict]:
        self.rows.append(state[:, 0].tolist())
        return self.layer(state) * scale + shared, {"sum": state.sum(1)}


def run(code: str, tmp_path: Path) -> str:
    """The output of a fresh interpreter."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, cwd=tmp_path, timeout=120,
        env={"PYTHONPATH": ":".join(sys.path), "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def policy(monkeypatch: pytest.MonkeyPatch) -> Iterator[Policy]:
    module = types.ModuleType("policy_for_shapes")
    module.Policy = type("Policy", (Policy,), {"forward": Policy.forward})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "policy_for_shapes", module)
    yield module.Policy()  # type: ignore[attr-defined]


def repeated(tmp_path: Path, **calls: list[Any]) -> shapes.Repeated:
    (tmp_path / "shapes.json").write_text(json.dumps({"rollout": [], "update": []} | calls))
    return shapes.Repeated(tmp_path / "shapes.json")


def part(*places: int, rows: int | None = None) -> shapes.Part:
    return {"places": list(places), "rows": rows or len(places)}


@pytest.mark.parametrize("copies", [1, 2])
def test_a_call_is_cut_and_put_together_again(policy: Policy, tmp_path: Path, copies: int) -> None:
    """Rows keep their places, in each copy; what is no tensor of rows reaches every part whole."""
    state = torch.arange(4.0 * copies)[:, None] + torch.zeros(3)
    shared = torch.ones(3)
    with torch.no_grad():
        whole = policy(state, shared=shared, scale=2.0)
    cut = [4, copies, [part(2), part(0, 1, 3)]]
    repeated(tmp_path, rollout=[None, cut]).install([POLICY])
    policy.rows.clear()
    with torch.no_grad():
        for _ in range(3):  # the first and the third as they are
            out, more = policy(state, shared=shared, scale=2.0)
            assert torch.allclose(out, whole[0]) and torch.equal(more["sum"], whole[1]["sum"])
    places = [[2], [0, 1, 3]]
    seen = [[float(place + 4 * copy) for copy in range(copies) for place in rows] for rows in places]
    assert policy.rows == [state[:, 0].tolist(), *seen, state[:, 0].tolist()]


def test_a_row_runs_among_as_many_as_when_it_was_kept(policy: Policy, tmp_path: Path) -> None:
    """Rows that are only there for the number have no part in result or gradient."""
    state, shared = torch.randn(2, 3), torch.zeros(3)
    policy(state, shared=shared)[0].square().sum().backward()
    weight = policy.layer.weight
    assert weight.grad is not None
    natively, weight.grad = weight.grad, None
    repeated(tmp_path, update=[[2, 1, [part(1, rows=3), part(0, rows=4)]]]).install([POLICY])
    policy.rows.clear()
    policy(state, shared=shared)[0].square().sum().backward()
    assert [len(rows) for rows in policy.rows] == [3, 4]
    assert weight.grad is not None and torch.allclose(weight.grad, natively, rtol=1e-5)


def test_other_rows_than_the_native_calls_are_no_repetition(policy: Policy, tmp_path: Path) -> None:
    repeated(tmp_path, rollout=[[4, 1, [part(0), part(1, 1, 3)]]]).install([POLICY])
    with torch.no_grad(), pytest.raises(ValueError, match="other rows"):
        policy(torch.zeros(4, 3), shared=torch.zeros(3))


def test_what_a_patched_run_does_is_noted(policy: Policy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls of the rollout, whole and cut, calls that nobody keeps, and replays: in the order of the native calls."""
    for module, name in ((keep, "rollout_call"), (keep, "take"), (replay.Replay, "run")):
        monkeypatch.setattr(module, name, getattr(module, name))
    notes = shapes.Notes()
    notes.install([POLICY])
    state, shared = torch.zeros(4, 3), torch.zeros(3)

    def kept_in_parts(*_: Any, **__: Any) -> None:
        for places in ([1], [0, 2, 3]):
            args, kwargs = keep.take((state,), {"shared": shared}, 4, 1, places)
            with torch.set_grad_enabled(len(places) == 1):
                policy(*args, **kwargs)

    monkeypatch.setattr(keep, "rollout_call", kept_in_parts)
    notes._watch_keep(keep)
    call, other = (types.SimpleNamespace(rows=rows) for rows in (3, 1))
    rows = [types.SimpleNamespace(call=call, place=2), types.SimpleNamespace(call=other, place=0)]
    replayed = types.SimpleNamespace(_places=[0, 2], _keys="abc", _copies=1, rows=rows)
    monkeypatch.setattr(replay.Replay, "run", lambda self: policy(state[:1], shared=shared))
    notes._watch_replay(replay)

    with torch.no_grad():
        policy(state, shared=shared)
        keep.rollout_call()  # type: ignore[call-arg]
    policy(state, shared=shared)
    replay.Replay.run(replayed)  # type: ignore[arg-type,call-arg]
    notes.write(tmp_path)
    assert json.loads((tmp_path / "shapes.json").read_text()) == {
        "rollout": [None, [4, 1, [part(1), part(0, 2, 3)]]],
        "update": [None, [3, 1, [part(0, rows=3), part(2, rows=1), part(1)]]],
    }


def test_replays_of_whole_calls_are_no_cut() -> None:
    call = types.SimpleNamespace(rows=2)
    rows = [types.SimpleNamespace(call=call, place=place) for place in (0, 1)]
    whole = types.SimpleNamespace(_places=[0, 1], _keys="ab", _copies=2, rows=rows)
    assert shapes._replayed(whole) is None


def test_in_fp64_nothing_is_left_in_fp32(tmp_path: Path) -> None:
    out = run(
        """
        import torch
        single, half = torch.ones(2), torch.bfloat16
        torch.save({"w": single, "n": torch.tensor([1])}, "w.pt")
        from leangrpo_rehearsal import double
        double.install()
        layer = torch.nn.Linear(2, 2)
        read = torch.load("w.pt")
        made = [torch.zeros(2), torch.zeros(2, dtype=torch.float32), torch.tensor([1.5]), single.to(half),
                torch.ones(2).float(), torch.ones(2).to(torch.bfloat16), read["w"], layer.half().weight,
                layer.to(torch.float32).weight, torch.arange(3, dtype=torch.float)]
        assert {item.dtype for item in made} == {torch.float64}, [item.dtype for item in made]
        assert read["n"].dtype == torch.tensor([1]).dtype == torch.int64
        torch.save(made, "again.pt")
        assert torch.equal(torch.load("again.pt")[2], torch.tensor([1.5]))
        print("fine")
        """,
        tmp_path,
    )
    assert out == "fine\n"


def test_the_wrapper_is_the_one_that_is_used(tmp_path: Path) -> None:
    out = run(
        f"""
        import torch, torch.distributed as dist
        from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
        from torch.nn.parallel import DistributedDataParallel as DDP
        from leangrpo_rehearsal import wrappers
        wrappers.install()
        dist.init_process_group("gloo", init_method="file://{tmp_path}/store", rank=0, world_size=1)
        wraps = [
            lambda net: net, DDP, lambda net: FSDP(net, device_id=torch.device("cpu")), lambda net: (DDP(net), net)[1],
            lambda net: net.append(DDP(torch.nn.Linear(4, 4))),
        ]
        if torch.__version__ >= "2.7":  # before, FSDP2 does not run on a CPU
            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.fsdp import fully_shard
            wraps.append(lambda net: fully_shard(net, mesh=init_device_mesh("cpu", (1,))))
        for wrap in wraps:
            net = torch.nn.Sequential(torch.nn.Linear(4, 4))
            wrap(net)(torch.zeros(1, 4))
            print("found", wrappers.around(net))
        """,
        tmp_path,
    )
    found = [line.removeprefix("found ") for line in out.splitlines() if line.startswith("found ")]
    # On one rank FSDP1 shards nothing. A DDP that nobody calls averages nothing.
    assert found[:5] == ["none", "DDP", "NO_SHARD", "none", "DDP of a part"] and found[5:] in ([], ["FSDP2"])
