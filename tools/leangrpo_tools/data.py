"""Where the kit keeps its own data, and where it caches what it fetched."""

from __future__ import annotations

import importlib.util
import os
import sys
from functools import cache
from pathlib import Path

from leangrpo_tools.errors import KitError
from leangrpo_tools.reading import absolute


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
    """The cache folder: ``LEANGRPO_CACHE``, or the platform's user cache. It may not exist yet.

    A relative ``XDG_CACHE_HOME`` is ignored, as its standard says. Raises LG112 where no folder belongs to the user.
    """
    chosen = os.environ.get("LEANGRPO_CACHE")
    if chosen:
        return absolute(chosen)
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or _home() / "AppData" / "Local") / "leangrpo-kit" / "cache"
    if sys.platform == "darwin":
        return _home() / "Library" / "Caches" / "leangrpo-kit"
    given = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(given) if os.path.isabs(given) else _home() / ".cache") / "leangrpo-kit"


def _home() -> Path:
    """The user's folder: ``HOME``, or what the system knows where that is empty or not absolute."""
    found = os.environ.get("HOME") or ""
    if sys.platform != "win32" and not os.path.isabs(found):
        import pwd

        try:
            found = pwd.getpwuid(os.getuid()).pw_dir
        except KeyError:
            found = ""
    elif sys.platform == "win32":
        found = os.path.expanduser("~")
    if not os.path.isabs(found):
        raise KitError(
            "LG112",
            "there is no folder for the cache",
            cause="HOME is empty or relative, and the system knows no other folder of yours",
            fix="export LEANGRPO_CACHE=FOLDER",
        )
    return Path(found)
