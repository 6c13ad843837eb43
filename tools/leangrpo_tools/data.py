"""Where the kit keeps its own data, and where it caches what it fetched."""

from __future__ import annotations

import importlib.util
import os
import sys
from functools import cache
from pathlib import Path

from leangrpo_tools.errors import KitError


@cache
def data_root() -> Path:
    """The folder with ``upstreams.lock`` and ``patches/``: the checkout, or the data installed with the wheel."""
    here = Path(__file__).resolve()
    for folder in here.parents:
        if (folder / "upstreams.lock").is_file() and (folder / "patches").is_dir():
            return folder
    for entry in map(Path, sys.path):
        if (entry / "leangrpo_kit_data" / "upstreams.lock").is_file():
            return (entry / "leangrpo_kit_data").resolve()
    raise KitError(
        "LG111",
        f"neither a checkout of the kit nor its installed data was found from {here.parent}",
        cause="the installation is incomplete",
        fix="pip install --force-reinstall leangrpo-kit",
    )


def lock_path() -> Path:
    """The lock file."""
    return data_root() / "upstreams.lock"


def recipe_path(upstream: str) -> Path:
    """The recipe of an upstream, by its exact name."""
    return data_root() / "patches" / upstream / "recipe.yaml"


def core_path() -> Path:
    """The folder of the runtime that is vendored into patched trees. It is located, not imported."""
    checkout = data_root() / "leangrpo_core"
    if checkout.is_dir():
        return checkout
    spec = importlib.util.find_spec("leangrpo_core")
    if spec is None or not spec.submodule_search_locations:
        raise KitError(
            "LG111",
            "the runtime package leangrpo_core was not found",
            cause="the installation is incomplete",
            fix="pip install --force-reinstall leangrpo-kit",
        )
    return Path(next(iter(spec.submodule_search_locations)))


def rehearsal_path() -> Path:
    """The folder of the package that rehearsals run in the training interpreter, beside this one."""
    return Path(__file__).parent.parent / "leangrpo_rehearsal"


def cache_dir() -> Path:
    """The cache folder: ``LEANGRPO_CACHE``, or the platform's user cache. It may not exist yet."""
    chosen = os.environ.get("LEANGRPO_CACHE")
    if chosen:
        return Path(chosen).expanduser().absolute()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "leangrpo-kit"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA", Path.home() / "AppData" / "Local")) / "leangrpo-kit" / "cache"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "leangrpo-kit"
