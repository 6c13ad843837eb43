"""Which packages a rehearsal needs in the training environment, and how new."""

from __future__ import annotations

import re

FLOORS = {
    "torch": "2.5", "diffusers": "0.32", "transformers": "4.40", "accelerate": "1.0", "peft": "0.10", "absl-py": "",
    "ml-collections": "", "numpy": "", "pillow": "", "safetensors": "",
}  # fmt: skip
"""The oldest version that was tried, by package; empty where none is known not to work."""
MODULES = {"absl-py": "absl", "ml-collections": "ml_collections", "pillow": "PIL"}
SINCE = {
    "diffusers:WanTransformer3DModel": "0.33",
    "diffusers:FluxKontextPipeline": "0.35",
    "diffusers:QwenImageTransformer2DModel": "0.35",
    "diffusers:QwenImageEditPipeline": "0.35",
    "transformers:Qwen2_5_VLForConditionalGeneration": "4.49",
}
"""The release that brought what a script preloads, where it is newer than the floor."""
WORKS = "diffusers 0.35.2, peft 0.17.1 and transformers 4.56.2 work with every script"
SHOWN = ("torch", "diffusers", "transformers", "accelerate", "peft")


def module(package: str) -> str:
    """The name by which a package is imported."""
    return MODULES.get(package, package)


def of(preload: tuple[str, ...], own: tuple[tuple[str, str], ...] = ()) -> list[tuple[str, str, str]]:
    """Package, oldest version and why, by what is preloaded, and by what a script has of its `own`.

    Any version is empty; so is why, where none was tried.
    """
    packages = {module(package): package for package in FLOORS}
    found: dict[str, tuple[str, str]] = {}
    for name in preload:
        package = packages.get(re.split("[.:]", name)[0])
        if package is None:
            continue
        floor, why = found.get(package, (FLOORS[package], ""))
        if name in SINCE and older(floor, SINCE[name]):
            floor, why = SINCE[name], f", which has {name.partition(':')[2]}"
        found[package] = (floor, why)
    for package, floor in own:
        found[package] = (floor, ", which has what upstream's script calls")
    return [(package, *needed) for package, needed in found.items()]


def older(version: str, floor: str) -> bool:
    """Whether a version is older than the floor, by the numbers of its release."""
    return _numbers(version) < _numbers(floor)


def _numbers(version: str) -> tuple[int, ...]:
    release = re.match(r"[0-9.]*", version)
    return tuple(int(part) for part in (release[0] if release else "").split(".") if part)
