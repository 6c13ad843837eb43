"""Videos that stay in memory, and a stand-in for the VideoAlign reward model that scores them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from leangrpo_rehearsal import stubs

if TYPE_CHECKING:
    from leangrpo_rehearsal.recorder import Recorder


def videos_in_memory() -> dict[str, Any]:
    """diffusers' `export_to_video` keeps the first frame, [height, width, 3] uint8, and OpenCV reads it back.

    Returns the frames by the name of the file they were exported to.
    """
    import diffusers.utils
    import numpy

    frames: dict[str, Any] = {}

    def export_to_video(video: Any, path: str, *args: Any, **kwargs: Any) -> str:
        frames[Path(path).name] = (numpy.asarray(video[0]) * 255).round().astype("uint8")
        return path

    class VideoCapture:
        """Reads back the first frame."""

        def __init__(self, path: str) -> None:
            self.name = Path(path).name

        def isOpened(self) -> bool:
            return self.name in frames

        def read(self) -> tuple[bool, Any]:
            return True, frames[self.name]

        def release(self) -> None:
            pass

    diffusers.utils.export_to_video = export_to_video  # type: ignore[attr-defined]
    stubs.fake("cv2", VideoCapture=VideoCapture, cvtColor=lambda frame, code: frame, COLOR_BGR2RGB=0)
    return frames


def video_align(recorder: Recorder, frames: dict[str, Any]) -> None:
    """Puts upstream's module of VideoAlign into `sys.modules`: two deterministic scores of each video's first frame."""
    import torch

    from leangrpo_rehearsal.scripts.hpsv2 import FakeReward

    score = FakeReward(recorder)

    class VideoVLMRewardInference:
        """Visual quality and motion quality."""

        def __init__(self, path: str, device: Any = None, dtype: Any = None) -> None:
            pass

        def reward(self, paths: list[str], captions: list[str], use_norm: bool = True) -> list[dict[str, float]]:
            found = []
            for path, caption in zip(paths, captions, strict=True):
                frame = torch.from_numpy(frames[Path(path).name]).float() / 255
                letters = torch.tensor([ord(letter) % 7 for letter in caption])
                both = [score(frame, letters + what)["image_features"].item() for what in (0, 1)]
                found.append(dict(zip(("VQ", "MQ"), both, strict=True)))
            return found

    stubs.fake("fastvideo.models.videoalign.inference", VideoVLMRewardInference=VideoVLMRewardInference)
