"""The arithmetic of shared prompts: every update trains what it trains natively, or the sizes are refused."""

import itertools
from collections import Counter

import pytest

from leangrpo_core import LeanError
from leangrpo_core.layout.parts import Cut, Part


def natively(prompts: int, group: int, update: int, ranks: int) -> list[Counter[tuple[int, int, int]]]:
    """Per update the samples of all ranks: (rank of the prompt, its number, generation)."""
    found = []
    for first in range(0, prompts * group, update):
        rows = range(first, first + update)
        found.append(Counter((rank, row // group, row % group) for rank in range(ranks) for row in rows))
    return found


def cut_up(cut: Cut) -> list[Counter[tuple[int, int, int]]]:
    """The same of the parts that each rank draws."""
    found = [Counter[tuple[int, int, int]]() for _ in range(cut.updates)]
    for rank, part, slot in itertools.product(range(cut.ranks), cut.parts, range(cut.slots)):
        owner, generation = rank // cut.team * cut.team + part.owner, slot * cut.team + rank % cut.team
        found[cut.update_of(part, slot)][(owner, part.slot, generation)] += 1
    return found


def test_every_update_trains_the_samples_that_it_trains_natively() -> None:
    accepted = 0
    for prompts, group, ranks in itertools.product((1, 2, 3), (1, 2, 3, 4, 6, 8, 12), (1, 2, 3, 4, 6, 8, 16)):
        for update in range(1, prompts * group + 1):
            try:
                cut = Cut(prompts, group, update, ranks, shared=True, on_policy=False)
            except LeanError as refused:
                assert refused.code == "LG613"
                continue
            accepted += 1
            assert cut_up(cut) == natively(prompts, group, update, ranks)
            # As many rows on each rank as natively, of the first update in a leading run of each part.
            assert sum(cut.first(part) for part in cut.parts) == update
            for part in cut.parts:
                assert [cut.update_of(part, slot) == 0 for slot in range(cut.slots)] == (
                    [True] * cut.first(part) + [False] * (cut.slots - cut.first(part))
                )
            # What the first update leaves alone is drawn before it ends.
            assert [cut.first(part) > 0 for part in cut.parts] == sorted(cut.first(part) > 0 for part in cut.parts)
    assert accepted > 300


def test_an_update_may_end_inside_a_prompt() -> None:
    """Rows 0-7, 8-15, 16-23 of two prompts of 12; four ranks share a prompt, so that each update has two slots."""
    cut = Cut(2, 12, 8, 8, shared=True, on_policy=False)
    assert (cut.team, cut.slots, cut.updates) == (4, 3, 3)
    assert [[cut.update_of(Part(slot, 0), q) for q in range(3)] for slot in range(2)] == [[0, 0, 1], [1, 2, 2]]


@pytest.mark.parametrize(("group", "ranks", "team", "slots"), [(12, 8, 4, 3), (6, 4, 2, 3), (6, 2, 2, 3), (2, 4, 2, 1)])
def test_sizes_that_the_paper_leaves_open(group: int, ranks: int, team: int, slots: int) -> None:
    cut = Cut(1, group, group, ranks, shared=True, on_policy=False)
    assert (cut.team, cut.slots, len(cut.parts)) == (team, slots, team)


def test_the_presets_of_dancegrpo() -> None:
    """8 GPUs: two prompts of 12, an update each. 16 GPUs: a prompt of 12, a third of it per update."""
    eight = Cut(2, 12, 12, 8, shared=True, on_policy=False)
    assert [part.slot for part in eight.parts] == [1] * 4 + [0] * 4
    assert [eight.first(part) for part in eight.parts] == [0] * 4 + [3] * 4
    sixteen = Cut(1, 12, 4, 16, shared=True, on_policy=False)
    assert (sixteen.updates, [sixteen.first(part) for part in sixteen.parts]) == (3, [1] * 4)


def test_on_policy_goes_through_the_prompts_in_order() -> None:
    cut = Cut(2, 12, 12, 8, shared=True, on_policy=True)
    assert cut.parts == [Part(slot, owner) for slot in range(2) for owner in range(4)]
    assert all(cut.first(part) == 3 for part in cut.parts)


@pytest.mark.parametrize(
    ("sizes", "ranks", "on_policy", "what", "fix"),
    [
        ((2, 12, 7), 8, False, "leaves 3 samples over", "one of [1, 2, 3, 4, 6, 8, 12, 24]"),
        ((2, 12, 16), 8, True, "leaves 8 samples over", "one of [12, 24]"),
        ((1, 12, 4), 16, True, "a part of a prompt's samples", "one of [12], or LEANGRPO_UPDATES=faithful"),
        ((1, 12, 3), 8, False, "3 per update, 8 ranks: these numbers", "[2, 4, 6, 12], or LEANGRPO_LAYOUT=native"),
        ((1, 9, 9), 8, False, "9 per update, 8 ranks: these numbers", "set LEANGRPO_LAYOUT=native"),
    ],
)
def test_refused_with_the_numbers_that_would_do(
    sizes: tuple[int, int, int], ranks: int, on_policy: bool, what: str, fix: str
) -> None:
    with pytest.raises(LeanError, match="LG613") as refused:
        Cut(*sizes, ranks, shared=True, on_policy=on_policy)
    assert what in refused.value.what
    assert fix in refused.value.fix
