"""Public forks of DanceGRPO, taken from local clones. None of their code is kept in this repository.

Fill a folder where there is network, and name it in LEANGRPO_FORKS:

    python tests/support/forks.py FOLDER
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

TABLE = Path(__file__).parents[1] / "e2e" / "forks.yaml"
TEXT = {".py", ".sh", ".toml", ".yaml", ".yml", ".json"}


@dataclass(frozen=True)
class Fork:
    """One commit of a fork, and what is expected of its scripts."""

    repo: str
    commit: str
    scripts: list[dict[str, Any]]

    @property
    def name(self) -> str:
        """Short, for test ids."""
        return f"{self.repo}@{self.commit}"

    def git_dir(self, folder: Path) -> Path | None:
        """A bare or other clone below `folder`, named owner+repository, that has the commit."""
        base = folder / self.repo.replace("/", "+")
        for place in (base, base / "repo", base / ".git"):
            if (place / "objects").is_dir() and _git(place, "cat-file", "-e", f"{self.commit}^{{tree}}") is not None:
                return place
        return None

    def read(self, git_dir: Path, file: str) -> bytes:
        """A file's bytes in the fork."""
        content = _git(git_dir, "cat-file", "blob", f"{self.commit}:{file}")
        assert content is not None, f"{git_dir} lacks {file}"
        return content

    def checkout(self, git_dir: Path, dest: Path) -> Path:
        """The fork's code as a repository of its own; large files, which mirrors may lack, stay away."""
        listing = _git(git_dir, "ls-tree", "-r", "-z", self.commit)
        assert listing is not None
        for line in listing.decode("utf-8", "surrogateescape").split("\0"):
            head, _, name = line.partition("\t")
            if Path(name).suffix not in TEXT:
                continue
            content = _git(git_dir, "cat-file", "blob", head.split()[2])
            if content is not None:
                (dest / name).parent.mkdir(parents=True, exist_ok=True)
                (dest / name).write_bytes(content)
        for command in (["init", "-q"], ["add", "-A", "-f"], ["commit", "-q", "-m", self.name]):
            who = ["-c", "user.name=u", "-c", "user.email=u@x", "-c", "core.autocrlf=false"]
            subprocess.run(["git", "-C", str(dest), *who, *command], check=True, capture_output=True)
        return dest


def load() -> list[Fork]:
    """The table."""
    return [Fork(**item) for item in yaml.safe_load(TABLE.read_text(encoding="utf-8"))]


def _git(git_dir: Path, *args: str) -> bytes | None:
    done = subprocess.run(["git", "--git-dir", str(git_dir), *args], capture_output=True)
    return done.stdout if done.returncode == 0 else None


def fill(folder: Path) -> None:
    """Clone every fork that is not there yet, without files of more than a megabyte."""
    for repo in dict.fromkeys(fork.repo for fork in load()):
        dest = folder / repo.replace("/", "+")
        if not dest.exists():
            url = f"https://github.com/{repo}"
            subprocess.run(["git", "clone", "--bare", "--filter=blob:limit=1m", url, str(dest)], check=True)


if __name__ == "__main__":
    fill(Path(sys.argv[1]))
