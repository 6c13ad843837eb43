"""What a user may write for a patched folder."""

from __future__ import annotations

from pathlib import Path

from leangrpo_tools import lock
from leangrpo_tools.errors import KitError


def folder_of(target: str) -> Path:
    """A folder given by path, or by the name of the upstream (in any case) that it was made for.

    Raises LG102 when it is neither, LG301 when the upstream is known but has no folder here.
    """
    if Path(target).is_dir():
        return Path(target)
    if "/" in target or target.startswith("."):
        raise KitError("LG301", f"{target} is not a folder", cause="a mistyped path", fix="give an existing folder")
    name = lock.load().find(target)
    folder = Path(name)
    if not folder.is_dir():
        raise KitError(
            "LG301",
            f"there is no folder {name} here ({Path.cwd()})",
            cause="not patched yet, or patched elsewhere",
            fix=f"give its path, or run apply-patch {name}",
        )
    return folder
