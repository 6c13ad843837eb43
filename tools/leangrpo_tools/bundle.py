"""One file for machines without network: the kit, its recipes and the pinned files of one upstream.

A bundle is a zip file. ``bundle.json`` lists every member with its sha256 and is checked first; the upstream is checked
again against ``upstreams.lock``, whose hashes do not come from the bundle. ``python FILE apply NAME --bundle FILE``
runs the kit out of the bundle itself, where its dependencies are installed but the kit is not.
"""

from __future__ import annotations

import hashlib
import json
import zipfile
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from leangrpo_tools import __version__, data, fetch, gitcache, lock, registry
from leangrpo_tools.disk import guard_disk
from leangrpo_tools.errors import KitError
from leangrpo_tools.lock import EmbeddedEntry, Entry, GitEntry, PypiEntry
from leangrpo_tools.reading import MIB, opened

MANIFEST = "bundle.json"
PACK, WHEEL = HELD = "upstream.pack", "upstream.whl"
"""Where the upstream's files are: of one in git, and of one of a package registry."""
KIT = "kit/"
LARGEST, LARGEST_MANIFEST = 512 * MIB, 16 * MIB
MAIN = """\
import atexit, pathlib, shutil, sys, tempfile, zipfile

if sys.version_info < (3, 10):
    sys.exit("leangrpo-kit needs Python 3.10 or newer")
folder = tempfile.mkdtemp(prefix="leangrpo-kit-")
atexit.register(shutil.rmtree, folder, True)
with zipfile.ZipFile(pathlib.Path(__file__).parent) as bundle:
    bundle.extractall(folder, [name for name in bundle.namelist() if name.startswith("kit/")])
sys.path[0:1] = [folder + "/kit/tools", folder + "/kit"]
sys.argv[0] = "leangrpo"
from leangrpo_tools.main import leangrpo

leangrpo()
"""


class Manifest(BaseModel):
    """What a bundle says of itself. ``files`` has the sha256 of every other member, by name."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)
    format: Literal[1]
    kit: str
    upstream: str
    entry: Entry
    contents: str
    files: dict[str, str]


@dataclass
class BundleResult:
    """What ``make`` did."""

    upstream: str
    file: Path
    bytes: int = 0
    members: int = 0
    notices: list[str] = field(default_factory=list)


def make(name: str, output: Path, source: str | None = None) -> BundleResult:
    """Write a bundle of one upstream, fetching it first if it is not in the cache."""
    locked = lock.load()
    upstream = locked.find(name)
    entry = locked.upstreams[upstream]
    notices = fetch.unused(upstream, entry, source)
    members = {KIT + path: file.read_bytes() for path, file in _kit_files().items()}
    members["__main__.py"] = MAIN.encode()
    if isinstance(entry, GitEntry):
        members[PACK] = gitcache.pack(upstream, entry, source)
    elif isinstance(entry, PypiEntry):
        members[WHEEL] = registry.get(upstream, entry, source)
    manifest = Manifest(
        format=1,
        kit=__version__,
        upstream=upstream,
        entry=entry,
        contents=kit_hash(),
        files={path: hashlib.sha256(content).hexdigest() for path, content in sorted(members.items())},
    )
    text = json.dumps(manifest.model_dump(mode="json"), indent=1) + "\n"
    temp = output.with_name(output.name + ".part")
    with guard_disk(output.parent):
        try:
            with zipfile.ZipFile(temp, "w", zipfile.ZIP_DEFLATED) as out:
                for path, content in {MANIFEST: text.encode(), **members}.items():
                    method = zipfile.ZIP_STORED if path in HELD else zipfile.ZIP_DEFLATED  # they are compressed
                    out.writestr(zipfile.ZipInfo(path), content, method)
            temp.replace(output)
        finally:
            temp.unlink(missing_ok=True)
    return BundleResult(upstream, output, output.stat().st_size, len(members) + 1, notices)


def use(file: Path, upstream: str, entry: Entry) -> None:
    """Check a bundle against this kit and its lock, and put the upstream that it holds into the cache.

    Raises LG113 for a file that is no bundle or is damaged, LG114 for one of another upstream, pin or kit.
    """
    try:
        with opened(file) as content, zipfile.ZipFile(content) as found:
            _bound(found, file)
            manifest = _manifest(found, file)
            wrong = _misfit(manifest, upstream, entry)
            if wrong:
                raise KitError(
                    "LG114",
                    f"{file}: {wrong}",
                    cause="made for something else, or by another version of the kit",
                    fix=f"leangrpo bundle {upstream} --output FILE, with this kit; or, with the bundle's own kit: "
                    f"python {file} apply {manifest.upstream} --bundle {file}",
                )
            member = PACK if isinstance(entry, GitEntry) else WHEEL
            held = None
            for name, expected in manifest.files.items():
                held_here = found.read(name)
                if hashlib.sha256(held_here).hexdigest() != expected:
                    raise _damaged(file, f"{name} has another hash than bundle.json says")
                held = held_here if name == member else held
    except OSError as err:
        raise KitError("LG113", f"{file} cannot be read: {err.strerror or err}", fix=f"ls -l {file}") from err
    except (zipfile.BadZipFile, zlib.error, KeyError, EOFError, NotImplementedError, RuntimeError, ValueError) as err:
        raise _damaged(file, str(err).strip("\"'")) from err
    if isinstance(entry, EmbeddedEntry):
        return
    if gitcache.whole(upstream, entry) if isinstance(entry, GitEntry) else registry.cached(entry):
        return
    if held is None:
        raise _damaged(file, f"it holds no {member}")
    if isinstance(entry, GitEntry):
        gitcache.fill_from_pack(upstream, entry, held, str(file))
    else:
        registry.put(entry, held, str(file))


def kit_hash() -> str:
    """sha256 over the names and contents of everything that decides what a patched tree looks like."""
    lines = [f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {name}\n" for name, file in _kit_files().items()]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def _kit_files() -> dict[str, Path]:
    """The kit's files by the name they have in its repository, wherever it is installed."""
    root = data.data_root()
    folders = {
        "leangrpo_core": data.core_path(),
        "patches": root / "patches",
        "tools/leangrpo_rehearsal": data.rehearsal_path(),
        "tools/leangrpo_tools": Path(__file__).parent,
    }
    found = {"upstreams.lock": data.lock_path()}
    for name, folder in folders.items():
        found |= {f"{name}/{item.relative_to(folder).as_posix()}": item for item in lock.files_of(folder)}
    return dict(sorted(found.items()))


def _bound(found: zipfile.ZipFile, file: Path) -> None:
    """Refuse what would not fit into memory; a member gives no more bytes than it says here."""
    size = sum(item.file_size for item in found.infolist())
    if size > LARGEST or found.getinfo(MANIFEST).file_size > LARGEST_MANIFEST:
        raise _damaged(file, f"it unpacks to {size >> 20} MiB, and no bundle has more than {LARGEST >> 20}")


def _manifest(found: zipfile.ZipFile, file: Path) -> Manifest:
    try:
        return Manifest.model_validate_json(found.read(MANIFEST))
    except ValidationError as err:
        first = err.errors(include_url=False, include_context=False)[0]
        place = ".".join(map(str, first["loc"])) or "the whole file"
        raise _damaged(file, f"{MANIFEST}: {place}: {first['msg']}") from err


def _misfit(manifest: Manifest, upstream: str, entry: Entry) -> str:
    if manifest.upstream != upstream:
        return f"it holds {manifest.upstream}, not {upstream}"
    if manifest.entry != entry:
        return f"it holds {upstream} at {manifest.entry.pin}, upstreams.lock says {entry.pin}"
    if manifest.contents != kit_hash():
        return f"its kit ({manifest.kit}) differs from this one ({__version__})"
    return ""


def _damaged(file: Path, detail: str) -> KitError:
    return KitError(
        "LG113",
        f"{file} is no bundle, or a damaged one: {detail}",
        cause="an interrupted copy, or another kind of file",
        fix="copy it again, or make it again: leangrpo bundle NAME --output FILE",
    )
