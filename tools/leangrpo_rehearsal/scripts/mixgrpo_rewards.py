"""Stand-ins for MixGRPO's reward models: deterministic scores that differ between images and between models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from leangrpo_rehearsal import stubs
from leangrpo_rehearsal.recorder import Recorder
from leangrpo_rehearsal.scripts.hpsv2 import pixels_of, score

PACKAGE = "fastvideo.models.reward_model"


def install(recorder: Recorder) -> None:
    """Puts modules named as upstream's into `sys.modules`; its code that combines scores stays its own.

    Upstream scores in threads, so each model's scores are noted under its own name.
    """

    class Model:
        phase = 0.0

        def __init__(self, **kwargs: Any) -> None:
            pass

        def __call__(self, images: Sequence[Any], prompts: Sequence[str]) -> list[float]:
            pairs = zip(images, prompts, strict=True)
            found = [score(pixels_of(image), self.phase + len(prompt)) for image, prompt in pairs]
            for value in found:
                recorder.note(f"rewards of {type(self).__name__}", value)
            return [value.item() for value in found]

    class HPSClipRewardModel(Model):
        pass

    class CLIPScoreRewardModel(Model):
        phase = 1.0

        def __call__(self, prompts: Sequence[Any], images: Sequence[Any]) -> list[float]:
            return super().__call__(images, prompts)

    for name, model in {"hps_score": HPSClipRewardModel, "clip_score": CLIPScoreRewardModel}.items():
        stubs.fake(f"{PACKAGE}.{name}", **{model.__name__: model})
    for name, attribute in {
        "image_reward": "ImageRewardModel", "pick_score": "PickScoreRewardModel",
        "unified_reward": "UnifiedRewardModel",
    }.items():  # fmt: skip
        stubs.fake(f"{PACKAGE}.{name}", **{attribute: stubs.placeholder(attribute)})
