"""pip, run as a command of its own to download one pinned wheel, and what it means when it fails."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

from leangrpo_tools import data, processes
from leangrpo_tools.disk import disk_full
from leangrpo_tools.errors import KitError
from leangrpo_tools.gitcmd import FULL
from leangrpo_tools.lock import PypiEntry
from leangrpo_tools.reading import MIB, read_regular
from leangrpo_tools.sources import NETWORK

LARGEST = 256 * MIB
"""No wheel of more bytes is read."""
PIP = (
    "download", "--require-hashes", "--no-deps", "--only-binary", ":all:", "--no-cache-dir", "--no-input", "--no-color",
    "--disable-pip-version-check", "--progress-bar", "off", "--retries", "2",
)  # fmt: skip
UNREACHABLE = (*NETWORK, "connection broken", "max retries exceeded", "sslerror", "failed to establish", "timed out")
BY_HAND = "give the wheel itself, or a folder that holds it: --source PATH"


def download(entry: PypiEntry, url: str | None, folder: Path) -> bytes:
    """The wheel from the index at ``url``, by default from the one that pip is set up for; ``folder`` is for its files.

    Raises LG104 to LG108 and LG115.
    """
    if url is not None and any(ord(char) < 33 for char in url):
        raise KitError("LG105", f"{url!r} is no URL", fix="--source URL|PATH")
    # In a file and not on the command line, which other users see: the URL may hold a password. It replaces every index
    # that pip is set up for.
    listed = folder / "requirements.txt"
    listed.touch(0o600)
    wanted = f"{entry.project}=={entry.version} --hash=sha256:{entry.sha256}\n"
    listed.write_text((f"--index-url {url}\n" if url else "") + wanted, encoding="utf-8")
    said = _pip("-r", str(listed), "-d", str(folder / "found"), folder=folder)
    found = sorted((folder / "found").glob("*.whl"))
    if said is not None or not found:
        raise failure(said or "pip found no wheel", url, entry)
    return read_regular(found[0], LARGEST)


def _pip(*args: str, folder: Path) -> str | None:
    """Run ``pip download``. Returns None if it was done, else what pip says.

    It runs in a folder without Python files: ``python -m`` imports from where it is started.
    """
    command = [sys.executable or "python3", "-m", "pip", *PIP, *args]
    try:
        done = processes.run(command, folder, b"", dict(os.environ))
    except OSError as err:
        return f"No module named pip ({err})"
    return None if done.status == 0 else (done.stderr + done.stdout).decode("utf-8", "replace")


def failure(said: str, url: str | None, entry: PypiEntry) -> KitError:
    """The error that pip's output stands for."""
    text = said.lower()
    where = shown(url)
    errors = [line.removeprefix("ERROR: ").strip() for line in said.splitlines() if line.startswith("ERROR:")]
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    untrusted = [line for line in lines if "not a trusted or secure host" in line]
    detail = (untrusted or errors or lines or [""])[-1]
    if any(words in text for words in FULL):
        return disk_full(data.cache_dir())
    if "no module named pip" in text:
        return KitError(
            "LG115", f"{sys.executable} -m pip does not run: {detail}",
            cause="an environment without pip, as uv makes them",
            fix=f"python -m ensurepip, or uv pip install pip; or without pip: {BY_HAND}",
        )  # fmt: skip
    if "do not match the hashes" in text:
        got = re.search(r"got\s+([0-9a-f]{64})", text)
        return wrong(entry, where, f"it has the sha256 {got[1]}" if got else "its hash differs")
    if any(words in text for words in UNREACHABLE):
        # Such as: NewConnectionError('<object at 0x...>: Connection refused')
        broken = [
            re.sub(r".*<.*>: (.*?)'?\)*$", r"\1", why) for why in re.findall(r"connection broken by '(.*)': /", said)
        ]
        return KitError(
            "LG104", f"{where} cannot be reached: {broken[-1] if broken else detail}",
            cause="no network, a proxy, or a mistyped address",
            fix=f"run once where there is network (the cache is kept); or {BY_HAND}",
        )  # fmt: skip
    if "no matching distribution" in text and not untrusted:
        return KitError(
            "LG107", f"{where} has no {entry.release} as a wheel for this Python",
            cause="a mirror without it, or an index that refuses",
            fix=f"pip download --no-deps {entry.project}=={entry.version}; or {BY_HAND}",
        )  # fmt: skip
    return KitError(
        "LG105", f"{where} cannot be read: {detail}", cause="pip's own words; its settings may be wrong",
        fix=f"pip config list; pip download --no-deps {entry.project}=={entry.version}; or {BY_HAND}",
    )  # fmt: skip


def shown(source: str | None) -> str:
    """A source without the password that a URL may hold."""
    return re.sub(r"//[^/@]*@", "//", source) if source else "the package registry"


def wrong(entry: PypiEntry, source: str, detail: str) -> KitError:
    """The error for a file that is not the pinned one."""
    return KitError(
        "LG108",
        f"{source}: {detail}, the lock says {entry.sha256} for {entry.filename}",
        cause="another file, a damaged one, or a download that broke off",
        fix="run it again; use another --source; or restore upstreams.lock",
    )
