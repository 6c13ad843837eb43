"""Processes of a bench take turns, a rollout each."""

import threading
import time
from pathlib import Path

from leangrpo_rehearsal.interleave import STOP, Turns, give, order


def test_each_round_is_begun_by_another_run() -> None:
    found = order({"a": 3, "b": 3, "c": 4})
    by_turn = {turn: name for name, mine in found.items() for turn in mine}
    assert "".join(by_turn[turn] for turn in range(10)) == "abcbcacabc"
    assert all(mine == sorted(mine) for mine in found.values()) and order({}) == {}


def test_one_at_a_time(tmp_path: Path) -> None:
    """Each rollout by itself; a second rank does not end its run's turns."""
    file, running, went = tmp_path / "turn", set[str](), list[str]()
    give(file, 0)

    def run(name: str, mine: list[int]) -> None:
        own = Turns(file, mine, leads=True)
        for number in range(len(mine)):
            assert own.wait() and own.left == (number < len(mine) - 1)
            running.add(name)
            assert running == {name}
            time.sleep(0.01)
            went.append(name)
            running.discard(name)
            own.over()
        assert not own.wait()

    threads = [threading.Thread(target=run, args=job) for job in order({"a": 2, "b": 3}).items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert "".join(went) == "abbab"
    follower = Turns(file, [5, 6], leads=False)
    assert follower.wait()
    follower.over()
    assert int(file.read_text()) == 5 and not follower.left


def test_nobody_waits_for_a_run_that_has_failed(tmp_path: Path) -> None:
    file, beats = tmp_path / "turn", list[str]()
    give(file, 0)
    waits = Turns(file, [1], leads=True)
    timer = threading.Timer(0.2, give, (file, STOP))
    timer.start()
    assert not waits.wait(beats.append) and "waiting for its turn" in beats
    waits.over()
    assert int(file.read_text()) == STOP
