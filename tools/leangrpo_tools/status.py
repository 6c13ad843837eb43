"""``leangrpo list`` and ``leangrpo status``: what the kit knows, and what a folder is."""

from __future__ import annotations

from pathlib import Path

from leangrpo_tools import __version__, fetch, journal, lock
from leangrpo_tools import recipe as recipes
from leangrpo_tools import state as states
from leangrpo_tools.lock import EmbeddedEntry
from leangrpo_tools.tree import Tree


def listing() -> list[dict[str, object]]:
    """Every upstream with its pin, its scripts and whether it can be used without network."""
    found: list[dict[str, object]] = []
    for name, entry in lock.load().upstreams.items():
        recipe = recipes.load(name)
        found.append(
            {
                "name": name,
                "pin": entry.pin,
                "from": entry.origin,
                "cached": not isinstance(entry, EmbeddedEntry) and fetch.cached(name, entry),
                "scripts": {
                    script.name: {
                        "file": script.file,
                        "updates_per_rollout": script.updates_per_rollout,
                        "launch": list(script.launch),
                    }
                    for script in recipe.scripts.values()
                },
                "refused": {name: left.model_dump() for name, left in recipe.refused.items()},
            }
        )
    return found


def status(dest: Path) -> dict[str, object]:
    """Whether a tree is patched, by which version, and what was edited since then. Changes nothing."""
    tree = Tree(dest)
    state = states.load(tree)
    if state is None:
        return {"dest": str(tree.root), "patched": False, "interrupted": journal.pending(tree)}
    current = None
    if state.upstream in lock.load().upstreams:
        current = state.kit == __version__ and state.recipe == recipes.load(state.upstream).sha256
    return {
        "dest": str(tree.root),
        "patched": True,
        "interrupted": journal.pending(tree),
        "upstream": state.upstream,
        "commit": state.commit,
        "kit": state.kit,
        "up_to_date": current,
        "scripts": state.scripts,
        "edited": states.edited(tree, state),
        "conflicting": [name for name, item in state.files.items() if item.merge],
        "missing": states.missing(tree, state),
        "files": sorted(state.files),
    }
