"""The parts of reweighting alone: multiples, fits, buffers, gradients per sample."""

import math

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from leangrpo_core.reweight import grads, multiples
from leangrpo_core.reweight.buffers import Buffers, Gradient
from leangrpo_core.reweight.multiples import NO_MULTIPLE, NOT_FINITE, SPREAD, coefficient, fit, measure


def part(
    c: float, bend: float = 0.0, dtype: torch.dtype = torch.float32, seed: int = 0
) -> tuple[list[Tensor], list[Tensor]]:
    """v = c u, bent by so much of its length, over two outputs."""
    generator = torch.Generator().manual_seed(seed)
    us = [torch.randn(size, generator=generator, dtype=torch.float64) for size in ((1, 64, 8), (1, 16))]
    bends = [torch.randn(u.shape, generator=generator, dtype=torch.float64) for u in us]
    vs = [c * u + bend * abs(c) * u.norm() / off.norm() * off for u, off in zip(us, bends, strict=True)]
    return [v.to(dtype) for v in vs], [u.to(dtype) for u in us]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_multiple_is_found(dtype: torch.dtype) -> None:
    c, reason = coefficient(measure([part(-0.37, dtype=dtype, seed=seed) for seed in range(3)]))
    assert not reason
    assert c == pytest.approx(-0.37, rel={torch.float64: 1e-7, torch.float32: 1e-6, torch.bfloat16: 1e-3}[dtype])


@pytest.mark.parametrize(
    ("dtype", "bend", "found"),
    [
        (torch.float32, 1e-7, ""),
        (torch.float32, 1e-5, NO_MULTIPLE),
        (torch.bfloat16, 1e-3, ""),
        (torch.bfloat16, 5e-2, NO_MULTIPLE),
    ],
)
def test_what_is_no_multiple(dtype: torch.dtype, bend: float, found: str) -> None:
    assert coefficient(measure([part(2.0, dtype=dtype), part(2.0, bend, dtype)]))[1] == found


@pytest.mark.parametrize(
    ("dtype", "off", "found"),
    [
        (torch.float32, 1e-7, ""),
        (torch.float32, 1e-4, SPREAD),
        (torch.bfloat16, 1e-4, ""),
        (torch.bfloat16, 1e-2, SPREAD),
    ],
)
def test_steps_that_count_unequally(dtype: torch.dtype, off: float, found: str) -> None:
    """Rounding of single values averages out, so a weight of a step's own is seen far below it."""
    parts = [part(2.0, dtype=dtype), part(2.0 * (1 + off), dtype=dtype, seed=1)]
    assert coefficient(measure(parts))[1] == found


def test_zero_and_not_finite() -> None:
    nothing = [torch.zeros(1, 4)]
    some = [torch.ones(1, 4)]
    assert coefficient(measure([(nothing, some)])) == (0.0, "")
    assert coefficient(measure([(nothing, some), (some, some)]))[1] == SPREAD
    assert coefficient(measure([(some, nothing)]))[1] == NO_MULTIPLE
    for v, u in (([some[0] * math.nan], some), (some, [some[0] * math.inf])):
        c, reason = coefficient(measure([(v, u)]))
        assert math.isnan(c) and reason == NOT_FINITE


def test_the_line_that_explains_most() -> None:
    points = {row: (x, 0.5 - 2.0 * x) for row, x in enumerate([0.0, 0.25, -1.0, 3.0, 0.7])}
    found = fit(points, 1e-6)
    assert found.explained == set(points) and (found.a, found.b) == pytest.approx((0.5, -2.0), abs=1e-12)
    clipped = points | {3: (3.0, -1.0), 2: (-1.0, 1.0)}
    found = fit(clipped, 1e-6)
    assert found.explained == {0, 1, 4} and (found.a, found.b) == pytest.approx((0.5, -2.0), abs=1e-12)
    assert fit({7: (0.0, 1.5)}, 1e-6) == (1.5, 0.0, frozenset({7}))
    assert fit({}, 1e-6) == (0.0, 0.0, frozenset())


def gradient(seed: int) -> Gradient:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(5, 3, generator=generator), None, torch.randn(7, generator=generator)]


@pytest.mark.parametrize("offset", [0.0, 10.0, 1000.0])
def test_two_sums_give_any_affine_weights(offset: float) -> None:
    rewards = [offset + r for r in (0.28, 0.31, -0.2, 0.9, 0.28)]
    buffers = Buffers(affine=True, group=5, base=10)
    for row, reward in enumerate(rewards, start=10):
        grads = buffers.of(row, 3)
        grads[:] = gradient(row)
        buffers.complete([row])
        buffers.reward(row, reward)
    assert buffers.peak == 3 and buffers.live == 2 and not buffers.single and not buffers.waited
    group = buffers.groups[0]
    a, b = 0.4, -1.7
    weights = {row: a + b * x for row, x in group.rewards.items()}
    total = buffers.take({}, {0: (a, b)})
    for place in (0, 2):
        expected = sum(weights[row] * gradient(row)[place].double() for row in weights)  # type: ignore[union-attr]
        torch.testing.assert_close(total[place].double(), expected, rtol=0, atol=2e-6)  # type: ignore[union-attr]
    assert total[1] is None and buffers.live == 0


def test_groups_have_sums_of_their_own_and_samples_wait() -> None:
    buffers = Buffers(affine=True, group=2)
    for row in range(4):
        grads = buffers.of(row, 3)
        if row != 1:  # one reward never comes, the others before the gradient is complete
            buffers.reward(row, float(row))
        grads[:] = gradient(row)
        buffers.complete([row])
    assert set(buffers.groups) == {0, 1} and set(buffers.single) == {1} and buffers.waited
    total = buffers.take({1: -1.0}, {0: (2.0, 0.0), 1: (1.0, 0.5)})
    expected = 2 * gradient(0)[0] - gradient(1)[0] + gradient(2)[0] + 1.5 * gradient(3)[0]  # type: ignore[operator]
    torch.testing.assert_close(total[0], expected, rtol=1e-6, atol=1e-6)


def test_a_weight_of_zero_leaves_zeros() -> None:
    """As a backward pass with zeros would: AdamW treats a weight without a gradient otherwise."""
    buffers = Buffers()
    buffers.of(0, 2)[:] = [torch.ones(2), None]
    buffers.of(1, 2)[:] = [None, torch.ones(3)]
    torch.testing.assert_close(buffers.take({0: 2.0, 1: 0.0}, {}), [torch.full((2,), 2.0), torch.zeros(3)])


def test_a_gradient_that_is_not_finite_stays_out_of_the_sums() -> None:
    buffers = Buffers(affine=True, group=2)
    buffers.of(0, 1)[:] = [torch.tensor([1.0, math.inf])]
    buffers.complete([0])
    buffers.reward(0, 1.0)
    assert set(buffers.single) == {0} and not buffers.groups
    torch.testing.assert_close(buffers.take({0: 0.0}, {}), [torch.zeros(2)])


class Block(nn.Module):
    """What LoRA leaves: frozen layers, and two small ones beside each."""

    def __init__(self, width: int = 12, rank: int = 3) -> None:
        super().__init__()
        self.base = nn.Linear(width, width).requires_grad_(False)
        self.down, self.up = nn.Linear(width, rank, bias=False), nn.Linear(rank, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.base(x) + self.up(self.down(x)))


class Net(nn.Module):
    def __init__(self, checkpointing: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.shift = Block()  # on a vector per sample, as modulations are, and used twice
        self.checkpointing = checkpointing

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        for block in self.blocks:
            if self.checkpointing:
                x = checkpoint(block, x, use_reentrant=self.checkpointing == "reentrant")  # type: ignore[assignment]
            else:
                x = block(x)
            x = x + self.shift(t)[:, None]
        return x


@pytest.mark.parametrize("checkpointing", ["", "plain"])
@pytest.mark.parametrize("copies", [1, 2])
def test_gradients_per_sample(checkpointing: str, copies: int) -> None:
    """One backward of four samples against four backward passes of one."""
    torch.manual_seed(0)
    net, rows = Net(checkpointing), 4
    parameters = [p for p in net.parameters() if p.requires_grad]
    x, t, u = torch.randn(copies * rows, 5, 12), torch.randn(copies * rows, 12), torch.randn(copies * rows, 5, 12)
    assert grads.why_not(net) == ""
    found = grads.PerSample(net, parameters, rows, copies)
    with found.recording():
        out = net(x, t)
    torch.testing.assert_close(out, net(x, t), rtol=0, atol=0)
    with found.recording():
        out.backward(u)
    assert all(p.grad is None for p in parameters) and not found.refusal
    for row in range(rows):
        mine = [row + copy * rows for copy in range(copies)]
        expected = torch.autograd.grad(Net.forward(_plain(net), x[mine], t[mine]), parameters, u[mine])
        for grad, truth in zip(found.of(row), expected, strict=True):
            assert grad is not None
            torch.testing.assert_close(grad, truth, rtol=1e-5, atol=1e-6)
            assert float((grad - truth).norm() / truth.norm()) <= 1e-6


def _plain(net: Net) -> Net:
    net.checkpointing = ""
    return net


def test_gradients_per_sample_under_autocast() -> None:
    torch.manual_seed(0)
    net, rows = Net(""), 3
    parameters = [p for p in net.parameters() if p.requires_grad]
    x, t, u = torch.randn(rows, 5, 12), torch.randn(rows, 12), torch.randn(rows, 5, 12)
    found = grads.PerSample(net, parameters, rows, 1)
    with torch.autocast("cpu", torch.bfloat16):
        with found.recording():
            out = net(x, t)
        torch.testing.assert_close(out, net(x, t), rtol=0, atol=0)
    with found.recording():
        out.backward(u.to(out.dtype))
    exact = torch.autograd.grad(net(x, t), parameters, u)
    for place, truth in enumerate(exact):
        total = sum(found.of(row)[place] for row in range(rows))  # type: ignore[misc]
        assert isinstance(total, Tensor) and total.dtype == torch.float32
        assert float((total - truth).norm() / truth.norm()) <= 2e-2


def test_what_gradients_per_sample_refuse() -> None:
    net = Net("")
    net.norm = nn.LayerNorm(12)
    assert grads.why_not(net) == "norm.weight trains and is no weight of a plain linear layer"
    net = Net("")
    found = grads.PerSample(net, [p for p in net.parameters() if p.requires_grad], 2, 1)
    with found.recording():
        net.blocks[0](torch.randn(3, 12)).sum().backward()
    assert "not 1 x 2 rows" in found.refusal
    assert "forward" not in vars(net.blocks[0].down)


def test_tolerances_follow_the_dtype() -> None:
    assert multiples.allowed(torch.float32) == 2e-6
    assert multiples.allowed(torch.bfloat16) > 4e-3  # one rounding of the output's gradient, as measured
