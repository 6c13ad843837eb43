"""Which network is counted: by `--network`, else by the path that the launch file or config gives the script.

A path stands for a network only if it is the name of its repository (any case, with or without the organisation), a
hub's cache of that repository, or the folder that upstream itself tells to keep it in. A folder of one's own may hold
anything: it is never counted as another network, whatever its name is like.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass

from leangrpo_tools.errors import KitError
from leangrpo_tools.plan.networks import Network, load

OPTION = "--network"


@dataclass(frozen=True)
class Named:
    """The network that is counted, and how it is known; or why none is.

    Attributes:
        name: the kit's name for it; empty where it is not known.
        given: the path or name as it was written.
        source: the flag, entry or option with it, or why there is none.
        network: its sizes; None where they are not known.
        why: why it is not known.
        help: what to do then.
    """

    name: str = ""
    given: str = ""
    source: str = ""
    network: Network | None = None
    why: str = ""
    help: str = ""

    @property
    def told(self) -> str:
        """For a reader."""
        given = f"{self.source} {self.given}".strip()
        if not self.name:
            return f"not known: {self.why}"
        size = f", {self.network.parameters / 1e9:.4g} billion parameters" if self.network else ""
        return f"{self.name}{size} ({given})"

    def to_json(self) -> dict[str, object]:
        """Plain data."""
        found: dict[str, object] = {"name": self.name or None, "given": self.given or None, "from": self.source}
        found["parameters"] = self.network.parameters if self.network else None
        return found | {"unknown": self.why or None, "help": self.help or None}


def trainable(kind: str) -> list[str]:
    """The kit's names of the networks of a class."""
    return [name for name, network in load().items() if network.kind == kind]


def kind_of(name: str | None) -> str | None:
    """The class of a network of the kit."""
    return load()[name].kind if name else None


def upstreams(name: str, why: str) -> Named:
    """The network that upstream itself trains with a script, where no path is given."""
    return Named(name, "", f"what upstream trains with this script: {why}", load()[name])


def asked(name: str, kind: str | None) -> Named:
    """The network that the command line names. Raises LG504 where it is none that such a script could train."""
    wanted = _plain(name)
    by_name = {key: key for key in load()} | _repositories()
    found = by_name.get(wanted)
    choice = trainable(kind) if kind else []
    if found is None or found not in choice:
        what = f"{OPTION} {name} is no network that the kit knows"
        cause = "sizes are counted for public networks only"
        if found is not None:
            what = f"{OPTION} {found} is not what this script trains"
            cause = f"it loads a {kind}, and that is a {load()[found].kind}" if kind else "it makes its own network"
        near = difflib.get_close_matches(wanted, choice, 1, 0.5)
        first = f"{OPTION} {near[0]}, or one of: " if near else "one of: "
        fix = first + ", ".join(choice) if choice else f"leave {OPTION} away"
        raise KitError("LG504", what, cause=cause, fix=fix)
    return Named(found, "" if wanted == found else name, OPTION, load()[found])


def by_path(path: str, source: str, kind: str, folders: Mapping[str, str], why: str = "") -> Named:
    """The network that a script of this class loads from there.

    Args:
        path: as the launch file or config has it.
        source: the flag or entry with it.
        kind: the class that the script loads, in diffusers.
        folders: upstream's own folders, and what it tells to keep there.
        why: why a variable in it is not known.
    """
    choice = trainable(kind)
    fix = f"say which it is: {OPTION} {' | '.join(choice)}"
    if "$" in path or "`" in path:
        return Named("", path, source, None, f"{source} is {path}: {why or 'a variable, which is not known'}", fix)
    plain = _plain(path)
    name = {_plain(folder): known for folder, known in folders.items()}.get(plain.removeprefix("./"))
    name = name or _repositories().get(plain) or _cached(plain)
    if name is None:
        why = f"{source} is {path}, which is no repository that the kit knows"
        like = _repositories().get(plain.replace("\\", "/").rsplit("/", 1)[-1])
        if like:
            why += f"; its last part is the name of {like}, but a folder may hold another network"
            fix = f"if it is that one: {OPTION} {like}" if like in choice else fix
        return Named("", path, source, None, why, fix)
    network = load()[name]
    if network.kind != kind:
        why = f"{source} is {path}, which has a {network.kind}, and the script loads a {kind}"
        return Named("", path, source, None, why, f"correct the path, or {fix}")
    return Named(name, path, source, network)


def _plain(path: str) -> str:
    return path.strip().rstrip("/").lower()


def _repositories() -> dict[str, str]:
    """The kit's names by those of repositories, with the organisation and without."""
    found = {}
    for name, network in load().items():
        for repository in network.repositories:
            found[repository.lower()] = name
            found[repository.lower().rpartition("/")[2]] = name
    return found


def _cached(plain: str) -> str | None:
    """The network of a hub's cache: `models--organisation--name/snapshots/...`."""
    for part in plain.split("/"):
        if part.startswith("models--"):
            return _repositories().get(part.removeprefix("models--").replace("--", "/"))
    return None
