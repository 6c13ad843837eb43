"""The runtime as it goes into a patched tree."""

from __future__ import annotations

from leangrpo_tools import __version__, data
from leangrpo_tools.lost import VENDORED
from leangrpo_tools.recipe import Recipe
from leangrpo_tools.tree import Content


def files(recipe: Recipe) -> dict[str, Content]:
    """The Python files of the runtime and a marker, by their path in the tree; none where an installed one is used."""
    if not recipe.vendored:
        return {}
    root, folder = data.core_path(), recipe.vendor
    found = {
        f"{folder}/{item.relative_to(root).as_posix()}": Content(item.read_bytes(), 0o644)
        for item in sorted(root.rglob("*.py"))
        if "__pycache__" not in item.parts
    }
    text = f"leangrpo-kit {__version__}\nCopied here by apply-patch; revert-patch removes it. Do not edit.\n"
    return {**found, f"{folder}/{VENDORED}": Content(text.encode(), 0o644)}
