"""DPOK is refused with figures: they are drawn here as its training loop draws, and compared with what is said."""

import random
from pathlib import Path

import pytest

from leangrpo_tools import lock
from leangrpo_tools.apply import apply
from leangrpo_tools.errors import KitError

STEPS, BUFFER, UPDATES, ACCUMULATED = 50, 1000, 5, 12


def drawn(prompts: int, batch: int, rollouts: int = 400) -> tuple[float, int]:
    """States of the first update that the latest rollout evaluated, on average, and all evaluations per rollout.

    Each rollout appends a state per prompt and step to a buffer, which keeps the last ones. Each update takes batches
    of different states from all of it; the trained network and a frozen one evaluate each.
    """
    numbers, buffer, found = random.Random(0), [], []
    for rollout in range(rollouts):
        buffer = [*buffer, *[rollout] * (prompts * STEPS)][-BUFFER:]
        updates = [[numbers.sample(buffer, batch) for _ in range(ACCUMULATED)] for _ in range(UPDATES)]
        if len(buffer) == BUFFER:
            found.append(sum(state == rollout for states in updates[0] for state in states))
    trained = UPDATES * ACCUMULATED * batch
    return sum(found) / len(found), prompts * STEPS + 2 * trained


@pytest.mark.parametrize(
    ("prompts", "batch", "of_first", "said"),
    [
        (6, 2, 7.2, "7.2 of the 24 states of that step, on average, of the 540"),
        (10, 4, 24.0, "24 of 980, 2.4 %"),
    ],
)
def test_figures(prompts: int, batch: int, of_first: float, said: str) -> None:
    mean, every = drawn(prompts, batch)
    # One update's standard deviation is about 2.2 and 2.4; that of the mean of nearly 400 a twentieth of it.
    assert mean == pytest.approx(of_first, abs=0.6)
    assert of_first == ACCUMULATED * batch * prompts * STEPS / BUFFER
    reason = " ".join(lock.load().refused["DPOK"].reason.split())
    assert said in reason and f"{100 * of_first / every:.1f} %" in reason and str(every) in reason


def test_it_is_an_error_of_its_own(tmp_path: Path) -> None:
    for name in ("DPOK", "dpok"):
        with pytest.raises(KitError) as caught:
            apply(name, tmp_path / "d")
        assert caught.value.code == "LG117" and "1.3 % of the forwards" in caught.value.cause
    assert not (tmp_path / "d").exists()


def test_a_refused_name_is_not_pinned_too(tmp_path: Path) -> None:
    from leangrpo_tools import data

    text = data.lock_path().read_text(encoding="utf-8").replace("\n  DPOK:", "\n  Trl-ddpo:")
    (tmp_path / "l").write_text(text)
    with pytest.raises(KitError) as caught:
        lock.load(tmp_path / "l")
    assert (
        caught.value.code == "LG101" and "trl-ddpo is given in more than one case, or refused, too" in caught.value.what
    )
