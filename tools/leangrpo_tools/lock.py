"""``upstreams.lock``: what is pinned, validated strictly.

``python -m leangrpo_tools.lock`` prints the content hash of every embedded upstream as it is now; with ``--write`` it
puts them into the lock file.
"""

from __future__ import annotations

import difflib
import hashlib
import os
import re
import sys
from pathlib import Path, PurePosixPath
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from leangrpo_tools import data, yamlfile
from leangrpo_tools.disk import LONGEST_NAME
from leangrpo_tools.errors import KitError

FIX = "restore upstreams.lock from the kit's repository, or correct the lines above"


def inside(path: str) -> str:
    """Accept a relative path with forward slashes that stays inside its root."""
    parts = PurePosixPath(path).parts
    if not parts or path.startswith(("/", "-")) or "\\" in path or ".." in parts or ".git" in path.lower().split("/"):
        raise ValueError("must be a relative path inside the tree")
    if "\0" in path or any(len(os.fsencode(part)) > LONGEST_NAME for part in parts):
        raise ValueError(f"has a name that no file can have: a NUL in it, or more than {LONGEST_NAME} bytes")
    if str(PurePosixPath(path)) != path.rstrip("/"):
        raise ValueError(f"write it as {PurePosixPath(path)}")
    return path


def _no_option(url: str) -> str:
    if not url or url.startswith("-") or any(ord(char) < 33 for char in url):
        raise ValueError("must be a URL or a path")
    return url


def _project(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?", name):
        raise ValueError("must be the name of a project: letters, digits, dots, underscores and hyphens")
    return name


def _version(text: str) -> str:
    if not re.fullmatch(r"[0-9][A-Za-z0-9.!+]*", text):
        raise ValueError("must be one version, such as 0.23.1")
    return text


def _pure_wheel(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9_.]+-[A-Za-z0-9_.!+]+-[A-Za-z0-9_.]+-none-any\.whl", name):
        raise ValueError("must be a wheel for every machine: NAME-VERSION-PYTHON-none-any.whl")
    return name


RelativePath = Annotated[str, AfterValidator(inside)]
Sha1 = Annotated[str, Field(pattern=r"^[0-9a-f]{40}$")]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


def plain_name(project: str) -> str:
    """The one spelling that stands for all spellings of a project's name."""
    return re.sub(r"[-_.]+", "_", project).lower()


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class GitEntry(_Strict):
    """A commit of a git repository. ``exclude`` are files or folders (with a trailing slash) left out of checkouts."""

    kind: Literal["git"]
    url: Annotated[str, AfterValidator(_no_option)]
    commit: Sha1
    tree: Sha1
    exclude: list[RelativePath] = []
    licence: str

    @property
    def pin(self) -> str:
        """What is pinned, as text."""
        return self.commit

    @property
    def origin(self) -> str:
        """Where it is fetched from, as text."""
        return self.url

    def excluded(self, path: str) -> bool:
        """Whether a file of the repository stays out of the checkout."""
        return any(path == item or (item.endswith("/") and path.startswith(item)) for item in self.exclude)


class EmbeddedEntry(_Strict):
    """A tree shipped inside the kit, pinned by the hash of its content (:func:`content_hash`)."""

    kind: Literal["embedded"]
    path: RelativePath
    sha256: Sha256
    licence: str

    @property
    def pin(self) -> str:
        """What is pinned, as text."""
        return "sha256:" + self.sha256

    @property
    def origin(self) -> str:
        """Where it is, as text."""
        return "the kit itself"


class PypiEntry(_Strict):
    """A pure-Python wheel of a package registry, pinned by the sha256 of the file."""

    kind: Literal["pypi"]
    project: Annotated[str, AfterValidator(_project)]
    version: Annotated[str, AfterValidator(_version)]
    filename: Annotated[str, AfterValidator(_pure_wheel)]
    sha256: Sha256
    licence: str

    @model_validator(mode="after")
    def _one_release(self) -> PypiEntry:
        name, version = self.filename.split("-")[:2]
        if (plain_name(name), version) != (plain_name(self.project), self.version):
            raise ValueError(f"filename: {name} {version}, but the entry pins {self.release}")
        return self

    @property
    def release(self) -> str:
        """Project and version."""
        return f"{self.project} {self.version}"

    @property
    def pin(self) -> str:
        """What is pinned, as text."""
        return "sha256:" + self.sha256

    @property
    def origin(self) -> str:
        """Where it is fetched from, as text."""
        return f"the package registry, {self.release}"


Entry = Annotated[GitEntry | EmbeddedEntry | PypiEntry, Field(discriminator="kind")]


class RefusedUpstream(_Strict):
    """An upstream that was read, at these commits, and is left alone, and why."""

    url: Annotated[str, AfterValidator(_no_option)]
    folder: RelativePath
    read: dict[RelativePath, Sha1]
    reason: Annotated[str, Field(min_length=10)]


class Lock(_Strict):
    """The lock file: a format number, the pinned upstreams by name, and those that are refused."""

    format: Literal[1]
    upstreams: dict[str, Entry] = Field(min_length=1)
    refused: dict[str, RefusedUpstream] = {}

    def find(self, name: str) -> str:
        """The exact name of an upstream given in any case.

        Raises LG102 with the known and the nearest names, LG117 with the reason for one that is refused.
        """
        known = {item.lower(): item for item in self.upstreams}
        if name.lower() in known:
            return known[name.lower()]
        for refused, entry in self.refused.items():
            if name.lower() == refused.lower():
                raise KitError(
                    "LG117",
                    f"{refused} ({entry.url}, folder {entry.folder}) is not patched",
                    cause=entry.reason.strip(),
                    fix="train with upstream's own code: a patch would save next to nothing",
                )
        near = difflib.get_close_matches(name.lower(), list(known), n=1, cutoff=0.5)
        hint = f"; did you mean {known[near[0]]}?" if near else ""
        raise KitError(
            "LG102",
            f"there is no upstream {name!r}{hint}",
            cause=f"known: {', '.join(self.upstreams)}",
            fix="leangrpo list",
        )


def load(path: Path | None = None) -> Lock:
    """Read the lock file. Raises LG101 with every problem at once."""
    where = path or data.lock_path()
    lock = yamlfile.load(where, Lock, "LG101", FIX)
    every = [*lock.upstreams, *lock.refused]
    names = [name.lower() for name in every]
    doubled = sorted({name for name in names if names.count(name) > 1})
    bad = [name for name in every if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_.-]*", name)]
    problems = [(0, f"upstreams: {name} is given in more than one case, or refused, too") for name in doubled]
    problems += [(0, f"upstreams: {name!r} is no plain name") for name in bad]
    if problems:
        raise yamlfile.problem_list("LG101", where, problems, FIX)
    return lock


def files_of(root: Path) -> list[Path]:
    """The files of an embedded tree, sorted by their relative path; compiled files do not count."""
    found = [item for item in root.rglob("*") if item.is_file() and "__pycache__" not in item.parts]
    return sorted((item for item in found if item.suffix != ".pyc"), key=lambda item: item.relative_to(root).as_posix())


def content_hash(root: Path) -> str:
    """sha256 over one line per file, ``<sha256 of the content>  <path>``, in the order of :func:`files_of`."""
    lines = [
        f"{hashlib.sha256(item.read_bytes()).hexdigest()}  {item.relative_to(root).as_posix()}\n"
        for item in files_of(root)
    ]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def _refresh(write: bool) -> None:
    path = data.lock_path()
    text = path.read_text(encoding="utf-8")
    for name, entry in load(path).upstreams.items():
        if isinstance(entry, EmbeddedEntry):
            now = content_hash(data.data_root() / entry.path)
            print(f"{name}: {now} ({'as locked' if now == entry.sha256 else f'locked: {entry.sha256}'})")
            text = text.replace(entry.sha256, now)
    if write:
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    _refresh("--write" in sys.argv[1:])
