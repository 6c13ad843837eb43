"""What gradients per sample cost: one backward of a batch under LoRA that tells samples apart, beside the plain one.

    bash tools/test -m matrix tests/matrix/test_lora_backward.py -n 0 -s

Forward and backward of four samples in one call, the two ways in turn, with the plain one twice in each round to show
what two runs of the same work differ by. The figures are the medians of the rounds' ratios, by processor seconds.
"""

import statistics
import time
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from leangrpo_core.reweight.grads import PerSample, why_not

pytestmark = [pytest.mark.matrix, pytest.mark.slow]
WIDTH, LAYERS, BATCH, TOKENS, RANK = 256, 6, 4, 256, 32
ROUNDS, MOST = 15, 1.25


class Adapted(nn.Module):
    """A frozen linear layer with LoRA beside it."""

    def __init__(self, fan_in: int, fan_out: int) -> None:
        super().__init__()
        self.base = nn.Linear(fan_in, fan_out).requires_grad_(False)
        self.down, self.up = nn.Linear(fan_in, RANK, bias=False), nn.Linear(RANK, fan_out, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 2.0 * self.up(self.down(x))


class Block(nn.Module):
    """Attention of four heads, and a feed-forward part; LoRA on all but the feed-forward part, as in FlowGRPO."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (Adapted(WIDTH, WIDTH) for _ in range(4))
        self.before, self.between = (nn.LayerNorm(WIDTH).requires_grad_(False) for _ in range(2))
        self.feed = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        self.feed.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.before(x)
        q, k, v = (layer(y).unflatten(-1, (4, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        x = x + self.out(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.feed(self.between(x))


def test_a_batched_backward_costs_at_most_a_quarter_more() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(*(Block() for _ in range(LAYERS)))
    parameters = [p for p in net.parameters() if p.requires_grad]
    x, u = torch.randn(2, BATCH, TOKENS, WIDTH)
    assert why_not(net) == ""

    def plain() -> tuple[float, float]:
        began = time.process_time()
        out = net(x)
        middle = time.process_time()
        out.backward(u)
        ended = time.process_time()
        net.zero_grad()
        return middle - began, ended - middle

    def apart() -> tuple[float, float]:
        found = PerSample(net, parameters, BATCH, 1)
        began = time.process_time()
        with found.recording():
            out = net(x)
        middle = time.process_time()
        with found.recording():
            out.backward(u)
        ended = time.process_time()
        assert not found.refusal and all(grad is not None and len(grad) == BATCH for grad in found.sums)
        return middle - began, ended - middle

    def one_by_one() -> tuple[float, float]:
        forward = backward = 0.0
        for row in range(BATCH):
            began = time.process_time()
            out = net(x[row : row + 1])
            middle = time.process_time()
            out.backward(u[row : row + 1])
            backward += time.process_time() - middle
            forward += middle - began
            net.zero_grad()
        return forward, backward

    ways: dict[str, Callable[[], tuple[float, float]]] = {
        "plain": plain, "plain again": plain, "per sample": apart, "one sample a call": one_by_one,
    }  # fmt: skip
    for way in ways.values():
        way()
    rounds = [{name: way() for name, way in ways.items()} for _ in range(ROUNDS)]
    print(f"\nwidth {WIDTH}, {LAYERS} layers, batch {BATCH}, {TOKENS} tokens, LoRA of rank {RANK}; {ROUNDS} rounds")
    print(f"{'':18}  forward s  ratio  backward s  ratio")
    ratios = {}
    for name in ways:
        forward, backward = (statistics.median(one[name][part] for one in rounds) for part in (0, 1))
        by = [statistics.median(one[name][part] / one["plain"][part] for one in rounds) for part in (0, 1)]
        ratios[name] = by[1]
        print(f"{name:18}  {forward:9.4f}  {by[0]:5.2f}  {backward:10.4f}  {by[1]:5.2f}")
    assert ratios["per sample"] <= MOST
