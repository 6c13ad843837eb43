"""LEANGRPO_OFFLOAD_GB: graphs whose saved tensors lie in host memory give the same bits, and what they take is counted.

Host and device are one here, so bytes are counted by weak references and by what copies were made.
"""

import gc
import itertools
import json
import math
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from weakref import ref

import pytest
import torch
from support import ranks
from support.check import assert_same
from support.grpo import Block, Config, Hooks, Policy, Result, train
from support.offloaded import TOKENS, KeywordPolicy, checkpointed, trio
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl
from torch.utils.checkpoint import checkpoint

from leangrpo_core import Lean, LeanError, checkpoints, host, offload
from leangrpo_core.host import HostMemory
from leangrpo_core.memory import Row, Sizes

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _every_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "SMALL", 0)


def run(lean: Lean | None, kind: str, config: Config, hooks: Hooks | None = None) -> Result:
    torch.manual_seed(0)
    classes = {"plain": Policy, "positional": Policy, "reentrant": Policy}
    net = classes.get(kind, KeywordPolicy)(checkpointing=kind == "positional")
    if kind in ("keyword", "reentrant"):
        checkpointed(CheckpointImpl.REENTRANT if kind == "reentrant" else CheckpointImpl.NO_REENTRANT)(net)
    return train(lean, net, torch.optim.AdamW(net.parameters(), lr=1e-2), config, hooks)


def windows(folder: Path) -> list[dict[str, Any]]:
    file = folder / "rank0.jsonl"
    found = [json.loads(line) for line in file.read_text().splitlines()]
    file.unlink()
    return found


@pytest.fixture
def budgets(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str, float, float], dict[str, Any]]:
    """Sets the budgets, in graphs of a kind of network; returns the figures of a window without any."""
    monkeypatch.setenv("LEANGRPO_REPORT_DIR", str(tmp_path))

    def use(kind: str, device: float, on_host: float, **config: Any) -> dict[str, Any]:
        run(Lean(), kind, Config(tokens=TOKENS, rollouts=1, **config))
        figures = windows(tmp_path)[-1]
        monkeypatch.setenv("LEANGRPO_BUDGET_GB", f"{device * figures['graph_bytes'] / 1e9:.12f}")
        text = "unlimited" if on_host == math.inf else f"{on_host * figures['graph_bytes'] / 1e9:.12f}"
        monkeypatch.setenv("LEANGRPO_OFFLOAD_GB", text)
        return figures

    return use


@pytest.mark.parametrize(
    ("kind", "bf16"),
    [
        ("plain", False),
        ("plain", True),
        ("positional", True),
        ("keyword", False),
        ("keyword", True),
        ("reentrant", True),
    ],
)
def test_bitwise(kind: str, bf16: bool, budgets: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """All is kept, in bounds, and every update is the native one; the audit agrees."""
    one = budgets(kind, 4.5, math.inf, bf16=bf16)
    monkeypatch.setenv("LEANGRPO_AUDIT", "first")
    config = Config(bf16=bf16, tokens=TOKENS, rollouts=1)
    assert_same(run(Lean(), kind, config), run(None, kind, config))
    for window in windows(tmp_path):
        assert (window["kept"], window["replayed"], window["recomputed"]) == (12, 12, 0), window
        assert 8 <= window["offloaded"] <= 9 and window["reasons"] == {}
        assert window["graph_bytes"] == one["graph_bytes"]
        assert window["peak_held_bytes"] <= 4.5 * one["graph_bytes"]
        assert 0.9 * one["graph_bytes"] < window["host_bytes"] <= one["graph_bytes"]
        assert window["peak_host_bytes"] == window["offloaded"] * window["host_bytes"]
        assert window["audit_rel_l2"] == 0.0


@pytest.mark.parametrize(
    ("kind", "graphs"), [("plain", 0.0), ("plain", 0.5), ("plain", 4.0), ("plain", 100.0), ("keyword", 1.0)]
)
def test_the_host_budget_is_kept(
    kind: str, graphs: float, budgets: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Never over it, not for a moment; what is over it is recomputed, and the reason says so."""
    one = budgets(kind, 2.5, graphs)["graph_bytes"]
    most = 0
    copy = host.Copy.__init__

    def watched(self: host.Copy, tensor: Tensor, memory: HostMemory, lane: host.Lane) -> None:
        nonlocal most
        copy(self, tensor, memory, lane)
        most = max(most, memory.used)

    monkeypatch.setattr(host.Copy, "__init__", watched)
    config = Config(tokens=TOKENS, rollouts=1)
    assert_same(run(Lean(), kind, config), run(None, kind, config))
    (window,) = windows(tmp_path)
    assert most <= graphs * one
    assert window["kept"] == window["replayed"] == min(2 + math.floor(graphs), 12)
    assert window["offloaded"] <= graphs and window["peak_host_bytes"] <= graphs * one
    assert window["peak_held_bytes"] <= 2.5 * one
    both = "over LEANGRPO_BUDGET_GB and LEANGRPO_OFFLOAD_GB"
    named = {0.0: {"over LEANGRPO_BUDGET_GB"}, 100.0: set()}.get(graphs, {both})
    assert set(window["reasons"]) == named and sum(window["reasons"].values()) == 12 - window["kept"]
    line = capsys.readouterr().out.splitlines()[-1]
    assert ("in host memory" in line) == (window["offloaded"] > 0), line


def test_room() -> None:
    """Against all ways to divide the places: as many as possible, and of those as many as possible on the device."""
    for graph, left, on_host in ((10, 1, 9), (10, 0, 10), (10, 3, 16), (10, 10, 0)):
        sizes = Sizes()
        sizes.rows["cond"] = Row(graph, left, on_host)
        for budget, limit, selected in itertools.product((0, 5, 12, 35, 200), (1, 16, 50, math.inf), (1, 4, 12)):
            ways = [
                (here + there, here)
                for here in range(selected + 1)
                for there in range(selected + 1 - here)
                if here * graph + there * left <= budget and there * on_host <= limit
            ]
            device, total = sizes.room(budget, limit, selected)
            found = (min(total, selected), min(device, selected))
            assert found == max(ways), (graph, left, on_host, budget, limit, selected)
        assert sizes.room(35, 0, 12) == (3, 3) and sizes.room(math.inf, 50, 12) == (math.inf, math.inf)
    assert Sizes().room(35, 50, 12) == (0, math.inf)


# -- one forward ------------------------------------------------------------------------------------------------------


class Net(nn.Module):
    """`forward` is whatever a test gives it."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.function = function
        self.weight, self.frozen = nn.Parameter(torch.randn(6, 6)), nn.Parameter(torch.randn(6, 6), requires_grad=False)
        self.register_buffer("table", torch.randn(6, 6))

    def forward(self, *args: Any) -> Any:
        return self.function(self, *args)


def moved(net: nn.Module, *args: Any, memory: HostMemory | None = None, **kwargs: Any) -> tuple[Any, offload.Moved]:
    with offload.to_host(net, (args, kwargs), memory or HostMemory(math.inf), CPU) as found:
        out = net(*args, **kwargs)
    return out, found


def gradient(net: Net, out: Tensor) -> Tensor:
    net.weight.grad = None
    (out * torch.arange(1.0, 1 + out.numel()).view(out.shape)).sum().backward()
    assert net.weight.grad is not None
    return net.weight.grad


def same(function: Callable[..., Any], *args: Any, copied: int) -> None:
    """The gradient has native's bits, and `copied` values of 4 bytes were copied, which are given back."""
    net, memory = Net(function), HostMemory(math.inf)
    expected = gradient(net, net(*args))
    out, found = moved(net, *args, memory=memory)
    assert memory.used == found.host_bytes == found.bytes == 4 * copied
    torch.testing.assert_close(gradient(net, out), expected, rtol=0, atol=0)
    del out
    assert memory.used == 0


def test_weights_buffers_and_arguments_stay() -> None:
    """Also views of them, trainable or not; of `x @ weight` nothing else is saved."""
    x = torch.randn(6, 6)
    same(lambda net, x: x @ net.weight, x, copied=0)
    same(lambda net, x: x[1:, :3] @ net.weight.t()[:3], x, copied=0)
    same(lambda net, x: net.weight * net.table[:, :1] @ net.frozen.t(), x, copied=0)
    same(lambda net, x: net.weight * net.table[:, :1] @ net.weight.t(), x, copied=36)  # the product


def test_what_modules_hold_stays() -> None:
    net = Net(lambda net, x: net.weight * net.kept)
    net.kept = torch.randn(6, 6)
    assert moved(net, torch.ones(1))[1].bytes == 0


def test_one_copy_per_storage() -> None:
    """Saved three times, as parts and as views, of layouts that a copy of the view alone would lose."""

    def split(net: Net, x: Tensor) -> Tensor:
        q, k, v = (x @ net.weight).view(2, 9, 2).unbind(0)[0].t().expand(3, 2, 9).unbind(0)
        return q @ k.t() * v.sum() + torch.sin(q)[:, :2]

    same(split, torch.randn(6, 6), copied=36 + 4 + 1)  # and q @ k, v.sum()


def test_a_storage_written_between_two_uses_is_two() -> None:
    def twice(net: Net, x: Tensor) -> Tensor:
        y = torch.ones(6, 6)
        first = net.weight * y
        y.add_(1)
        return first + net.weight * y

    net, memory = Net(twice), HostMemory(math.inf)
    out, found = moved(net, torch.ones(1), memory=memory)
    assert found.bytes == 2 * 36 * 4
    grad = gradient(net, out)
    torch.testing.assert_close(grad, torch.arange(1.0, 37).view(6, 6) * 3, rtol=0, atol=0)


def test_walked_twice_and_thrown_away() -> None:
    net, memory = Net(lambda net, x: torch.sin(torch.exp(net.weight))), HostMemory(math.inf)
    out, _ = moved(net, torch.ones(1), memory=memory)
    assert memory.used == 36 * 4  # exp's result, saved by both
    out.sum().backward(retain_graph=True)
    first = net.weight.grad
    net.weight.grad = None
    out.sum().backward()
    torch.testing.assert_close(net.weight.grad, first, rtol=0, atol=0)
    assert memory.used == 0
    out, _ = moved(net, torch.ones(1), memory=memory)
    assert memory.used
    del out
    gc.collect()
    assert memory.used == 0


def test_on_the_device_no_longer_than_natively() -> None:
    """A storage that several saved tensors share is brought back once and let go after the last of them."""
    alive: list[int] = []
    made: list[Any] = []

    def function(net: Net, x: Tensor) -> Tensor:
        y = x @ net.weight
        y.register_hook(lambda grad: alive.append(sum(storage() is not None for storage in made)))
        return torch.sin(y) + torch.cos(y) + torch.tanh(torch.relu(y) * 2)

    net = Net(function)
    out, _ = moved(net, torch.randn(6, 6))
    original = torch.empty

    def noted(*args: Any, **kwargs: Any) -> Tensor:
        tensor = original(*args, **kwargs)
        if args == (144,):
            made.append(ref(tensor))
        return tensor

    torch.empty, undo = noted, torch.empty
    try:
        out.sum().backward(retain_graph=True)
    finally:
        torch.empty = undo
    assert len(made) == 3 and alive == [0]  # y once for both; the results of relu and tanh
    assert not any(storage() is not None for storage in made)


@pytest.mark.parametrize("small", [0, 1 << 16])
def test_a_write_in_place_is_noticed(small: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without hooks torch checks that; into what stays it must be noticed, what was copied it cannot reach."""
    monkeypatch.setattr(offload, "SMALL", small)
    x, seen = torch.randn(6, 6), []

    def function(net: Net, x: Tensor) -> Tensor:
        seen.append(torch.exp(x))
        return net.weight * x + net.weight * seen[-1]

    net = Net(function)
    expected = gradient(net, net(x))
    out, _ = moved(net, x)
    x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()
    x.sub_(1)
    out, _ = moved(net, x)
    seen[-1].add_(1)
    if small:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()
    else:
        torch.testing.assert_close(gradient(net, out), gradient(net, net(x)), rtol=0, atol=0)
        assert not torch.equal(expected, torch.zeros(6, 6))


@pytest.mark.parametrize(("kind", "keeps"), [("keyword", False), ("untouched", True), ("own function", True)])
def test_inputs_of_checkpoints_leave_the_device(kind: str, keeps: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks take keywords and a pair: their tensors die with the forward, unless a closure keeps them."""

    def own(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return checkpoint(function, *args, use_reentrant=False, **kwargs)

    net, inputs = KeywordPolicy(), []
    checkpointed()(net)
    if kind == "untouched":
        monkeypatch.setattr(offload, "saving_keywords", lambda net: nullcontext())
    before = [module.checkpoint_fn for module in net.blocks]
    if kind == "own function":
        for module in net.blocks:
            setattr(module, "checkpoint_fn", own)  # noqa: B010 (see `checkpoints.py`)

    def look(module: nn.Module, args: Any, kwargs: Any) -> None:
        assert not args and list(kwargs) == ["x", "pair", "context", "scale"] and type(kwargs["pair"]) is tuple
        inputs.extend(ref(tensor) for tensor in (kwargs["x"], kwargs["context"], *kwargs["pair"]))

    blocks = [block for block in net.modules() if isinstance(block, Block)]
    handles = [block.register_forward_pre_hook(look, with_kwargs=True) for block in blocks]
    arguments = torch.randn(1, TOKENS, 8), torch.zeros(1), torch.randn(1, 8)
    out, _ = moved(net, *arguments)
    assert len(inputs) == 12 and any(tensor() is not None for tensor in inputs) == keeps
    assert [module.checkpoint_fn for module in net.blocks] == (before if kind != "own function" else [own] * 3)
    for handle in handles:
        handle.remove()
    out[0].square().sum().backward()
    grads = [p.grad for p in net.parameters()]
    net.zero_grad()
    net(*arguments)[0].square().sum().backward()
    for ours, p in zip(grads, net.parameters(), strict=True):
        torch.testing.assert_close(ours, p.grad, rtol=0, atol=0)


def test_nothing_is_held_after_the_flush(budgets: Any) -> None:
    budgets("plain", 1.5, math.inf)
    lean, used = Lean(), []

    def look(net: nn.Module) -> None:
        used.append(lean._run.host.used)

    hooks = Hooks(before_flush=look, after_flush=look)
    run(lean, "plain", Config(tokens=TOKENS, rollouts=2), hooks)
    assert used[0] > 0 and used[2] > 0 and used[1] == used[3] == 0


def test_compiled_networks_are_refused_by_name(budgets: Any, tmp_path: Path) -> None:
    budgets("plain", 1.5, math.inf)
    torch.manual_seed(0)
    net = Policy()
    net.blocks[0].compile(backend="eager")
    train(Lean(), net, torch.optim.AdamW(net.parameters()), Config(tokens=TOKENS, rollouts=1))
    (window,) = windows(tmp_path)
    assert window["offloaded"] == 0 and any("not in host memory: torch.compile" in text for text in window["reasons"])


def test_no_host_memory_left(budgets: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    budgets("plain", 1.5, math.inf)

    def full(*args: Any, **kwargs: Any) -> Tensor:
        raise RuntimeError("can't allocate memory")

    original = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, **k: full() if "pin_memory" in k else original(*a, **k))
    with pytest.raises(LeanError, match="LG608: no host memory"):
        run(Lean(), "plain", Config(tokens=TOKENS, rollouts=1))


# -- CUDA's way, with its streams played ------------------------------------------------------------------------------


class Stream:
    """Runs what it is given when it is waited for."""

    def __init__(self, device: Any = None) -> None:
        self.done, self.waited = False, 0

    def wait_stream(self, other: Any) -> None:
        self.waited += 1

    def record_event(self) -> Any:
        stream = self

        class Event:
            def query(self) -> bool:
                return stream.done

        return Event()

    def synchronize(self) -> None:
        self.done = True


@pytest.fixture
def lane(monkeypatch: pytest.MonkeyPatch) -> host.CudaLane:
    @contextmanager
    def within(stream: Any) -> Iterator[None]:
        yield

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "stream", within)
    return host.CudaLane(CPU)


def test_a_tensor_stays_until_its_copy_is_there(lane: host.CudaLane) -> None:
    stream: Any = lane._stream
    tensors: deque[Tensor] = deque(torch.randn(4) for _ in range(3))
    alive = [ref(tensor.untyped_storage()) for tensor in tensors]
    copies = [torch.empty(16, dtype=torch.uint8) for _ in tensors]
    pointers = [tensor.data_ptr() for tensor in tensors]
    for copy in copies[:2]:
        tensor = tensors.popleft()
        lane.copy(copy, host.flat(tensor), tensor)
    del tensor
    assert [held.data_ptr() for _, held, _ in lane._under_way] == pointers[:2] and stream.waited == 2
    stream.done = True
    lane.copy(copies[2], host.flat(tensors[0]), tensors[0])
    assert not lane._under_way and alive
    lane.finish()


def test_a_write_during_the_copy_is_noticed(lane: host.CudaLane) -> None:
    tensor = torch.randn(4)
    lane.copy(torch.empty(16, dtype=torch.uint8), host.flat(tensor), tensor)
    tensor.add_(1)
    with pytest.raises(RuntimeError, match="written in place"):
        lane.finish()


def test_pinned_blocks_are_counted_as_torch_allocates_them() -> None:
    assert [host.size_of(size, True) for size in (0, 1, 2, 3, 4096, 4097)] == [0, 1, 2, 4, 4096, 8192]
    assert host.size_of(4097, False) == 4097


# -- ranks ------------------------------------------------------------------------------------------------------------


def agreeing(rank: int, world: int, kind: str, options: dict[str, Any]) -> Any:
    """One rank has host memory for two graphs less than the other."""
    room = HostMemory.has_room
    if options.pop("uneven", False):
        HostMemory.has_room = lambda self, size: room(self, size) and self.used + size <= (3 - 2 * rank) * 22000
    return trio(rank, world, kind, options)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("kind", "sync", "uneven"), [("fsdp-orig", "upstream", True), ("fsdp2", "late", False)])
def test_two_ranks(kind: str, sync: str, uneven: bool) -> None:
    """Bitwise as with all graphs on the device. Gathered weights are not copied, and ranks hold the same prefix."""
    options = {"policy": KeywordPolicy, "wrapped": checkpointed(), "env": {"LEANGRPO_SYNC": sync}, "uneven": uneven,
               "config": {"rollouts": 1}}  # fmt: skip
    found = ranks.run(agreeing, 2, kind, options)
    for native, device, on_host in found:
        assert_same(on_host.result, device.result) if not uneven else assert_same(on_host.result, native.result)
        window = on_host.window
        assert window["host_bytes"] == 21600  # as without a wrapper
        assert window["offloaded"] > 0 and window["replayed"] == found[0][2].window["replayed"]
        assert window["replayed"] == 6 or uneven
        assert window["peak_held_bytes"] <= 1.6 * window["graph_bytes"]
    assert not uneven or found[0][2].window["replayed"] < 6


def test_checkpoint_wrapper_is_known() -> None:
    assert checkpoints.CheckpointWrapper is not None
