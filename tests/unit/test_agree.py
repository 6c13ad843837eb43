"""A rank that stops: the others stop with its name instead of waiting for a time-out."""

import os
import signal
import sys
import time
from typing import Any

import pytest
import torch
from support import ranks
from support.grpo import Config, Hooks, Policy, train
from torch.nn.parallel import DistributedDataParallel

from leangrpo_core import Lean, agree


def verdicts(rank: int, world: int) -> Any:
    return agree.minimum(5 - rank), agree.anyones([rank == 1, False]), agree.everyones(rank), agree.anyones([])


def test_verdicts() -> None:
    assert ranks.run(verdicts, 2) == [(4, [True, False], [0, 1], [])] * 2


def stop_in_the_rollout(rank: int, world: int, how: str) -> None:
    """Rank 1 stops in the middle of its rollout; rank 0 waits for it where the ranks agree."""

    def middle(out: torch.Tensor, row: int, step: int) -> torch.Tensor:
        if rank == 1 and (row, step) == (2, 3):
            if how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if how == "raises":
                raise ValueError("the reward model's server is gone")
            time.sleep(600)
        return out

    net = DistributedDataParallel(Policy())
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    try:
        train(Lean(), net, optimizer, Config(rank=rank, rollouts=1), Hooks(rollout_output=middle))
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)  # as the interpreter does when a script ends so
        if rank == 1:
            time.sleep(8)  # a process can take long to die: its connections stay open
        raise


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("raises", "rank 1 stopped: ValueError: the reward model's server is gone"),
        ("killed", "rank 1 did not come to lean.flush"),
    ],
)
def test_the_others_stop_with_its_name(how: str, text: str) -> None:
    began = time.monotonic()
    with pytest.raises(ranks.RankFailed) as caught:
        ranks.run(stop_in_the_rollout, 2, how)
    assert "LG611" in caught.value.errors[0] and text in caught.value.errors[0]
    assert time.monotonic() - began < 30 * ranks.patience()
