"""A toy upstream as a wheel, an index that serves it, and a kit that pins it."""

from __future__ import annotations

import hashlib
import stat
import threading
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import yaml

from leangrpo_tools import lock

NAME = "toy_trainer-1.2-py3-none-any.whl"
TRAIN = '"""A toy."""\n\n\ndef train(model, optimizer):\n    model.loss().backward()\n    optimizer.step()\n'
FILES = {
    "toy_trainer/__init__.py": "",
    "toy_trainer/train.py": TRAIN,
    "toy_trainer/run.sh": "#!/bin/sh\npython -m toy_trainer.train\n",
    "toy_trainer/crlf.txt": "one\r\ntwo\r\n",
    ".gitattributes": "* text eol=lf\n*.py filter=mine\n",
    "toy_trainer-1.2.dist-info/METADATA": "Metadata-Version: 2.1\nName: toy-trainer\nVersion: 1.2\n",
    "toy_trainer-1.2.dist-info/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    "toy_trainer-1.2.dist-info/RECORD": "toy_trainer/train.py,,\ntoy_trainer/__init__.py,,\n../../bin/toy,,\n",
}
RECIPE = """\
format: 1
upstream: toy
vendor: toy_trainer/_leangrpo
scripts:
  train:
    file: toy_trainer/train.py
    rehearsal: toy
    updates_per_rollout: "1"
    edits:
      - codemod: insert_import
        params: {statement: "from toy_trainer._leangrpo import lean"}
        reason: The runtime lives inside the package.
      - codemod: insert_before
        params: {function: train, call: optimizer.step, statement: "lean.flush(model, optimizer)"}
        reason: Kept graphs are walked before the step.
"""


def member(name: str, mode: int = stat.S_IFREG | 0o644) -> zipfile.ZipInfo:
    """A member of a zip file with the mode that Unix tools would give it."""
    item = zipfile.ZipInfo(name)
    item.orig_filename = item.filename = name
    item.external_attr, item.create_system = mode << 16, 3
    return item


def make_wheel(path: Path) -> str:
    """The toy wheel, with group-writable files as some tools pack them. Returns its sha256."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as out:
        for name, text in FILES.items():
            out.writestr(member(name, stat.S_IFREG | (0o775 if name.endswith(".sh") else 0o664)), text)
    return hashlib.sha256(path.read_bytes()).hexdigest()


def entry(sha256: str, **other: str) -> lock.PypiEntry:
    """The lock's entry for it."""
    values = {"project": "Toy.Trainer", "version": "1.2", "filename": NAME, "licence": "MIT", "sha256": sha256}
    return lock.PypiEntry.model_validate({"kind": "pypi", **values, **other})


def pin(kit_root: Path, found: lock.PypiEntry) -> None:
    """Put the toy upstream into a kit's lock, and its recipe beside the others."""
    path = kit_root / "upstreams.lock"
    content = yaml.safe_load(path.read_text())
    content["upstreams"]["toy"] = found.model_dump()
    path.write_text(yaml.safe_dump(content))
    (kit_root / "patches/toy").mkdir(exist_ok=True)
    (kit_root / "patches/toy/recipe.yaml").write_text(RECIPE)


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        self.server.seen.append(self.path)  # type: ignore[attr-defined]


@contextmanager
def index(folder: Path, wheel: Path) -> Iterator[tuple[str, list[str]]]:
    """Serve the wheel as a package index below ``folder``. Gives its URL, and the paths asked for so far."""
    page = folder / "simple/toy-trainer"
    page.mkdir(parents=True)
    (page / "index.html").write_text(f'<html><body><a href="/{NAME}">{NAME}</a></body></html>')
    (folder / NAME).write_bytes(wheel.read_bytes())
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(folder)))
    server.seen = []  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield f"http://user:hidden@127.0.0.1:{server.server_port}/simple", server.seen  # type: ignore[attr-defined]
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
