"""Launch files that are none: nothing is read without end."""

import os
from pathlib import Path

import pytest

from leangrpo_tools.errors import KitError
from leangrpo_tools.plan import plan

TEXT = "torchrun --nproc_per_node=8 fastvideo/train_grpo_flux.py --sampling_steps 16\n"


@pytest.mark.parametrize("kind", ["device", "pipe", "folder", "large"])
def test_what_is_no_launch_file_is_not_read_to_its_end(kind: str, tmp_path) -> None:
    """A device has no end, opening a pipe waits for a writer, and no launch file has a mebibyte."""
    path = Path("/dev/zero") if kind == "device" else tmp_path / "launch.sh"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "large":
        path.write_text(TEXT + "#" * (1 << 20))
    with pytest.raises(KitError, match="1 MiB" if kind == "large" else "not a regular file") as caught:
        plan("DanceGRPO", path)
    assert caught.value.code == "LG501"


def test_a_number_of_ranks_beyond_all_measure(tmp_path) -> None:
    path = tmp_path / "launch.sh"
    path.write_text(TEXT.replace("=8", "=1" + "0" * 30))
    with pytest.raises(KitError) as caught:
        plan("DanceGRPO", path)
    assert caught.value.code == "LG503" and "0" * 30 in caught.value.what
