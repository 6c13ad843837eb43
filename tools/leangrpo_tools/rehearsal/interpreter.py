"""The Python that rehearses: the kit's own, or the one that trains. Nothing is installed into it, or written there."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from leangrpo_tools import data
from leangrpo_tools.errors import KitError
from leangrpo_tools.rehearsal import needs

OLDEST = (3, 10)
PATIENCE_S = 120.0
MARK = "leangrpo: "
PROBE = """
import json, sys
try:
    from importlib import metadata, util
except ImportError:
    metadata = util = None
def version(name):
    try:
        return metadata.version(name)
    except Exception:
        return ""
def found(module):
    try:
        return util.find_spec(module) is not None
    except Exception:
        return False
asked = dict(item.split("=") for item in sys.argv[2:])
packages = dict((name, version(name)) for name, module in asked.items() if version(name) or found(module))
print(sys.argv[1] + json.dumps([list(sys.version_info[:3]), packages]))
"""
"""Says which Python it is and which packages it has, without importing one. Older Pythons can read it, too."""
OWN = ("PYTHONPATH", "PYTHONHOME", "__PYVENV_LAUNCHER__")
"""What another interpreter must not take over from the environment of the kit's."""


@dataclasses.dataclass(frozen=True)
class Interpreter:
    """`version` is Python's; `packages` holds the versions of those that rehearsals need, empty where not known."""

    path: str
    own: bool
    version: tuple[int, ...]
    packages: dict[str, str]

    def describe(self) -> str:
        """For the report."""
        known = [f"{name} {self.packages[name]}" for name in needs.SHOWN if self.packages.get(name)]
        python = ".".join(map(str, self.version))
        return f"{'the kit' if self.own else self.path}: Python {python}, {', '.join(known) or 'no torch'}"

    def require(self, script: str, preload: tuple[str, ...], own: tuple[tuple[str, str], ...] = ()) -> None:
        """Raises LG404 for the first package that a script's rehearsal needs and this environment lacks."""
        for package, floor, why in needs.of(preload, own):
            found = self.packages.get(package)
            if found is None:
                raise KitError(
                    "LG404", f"{self.path} has no {package}, which the rehearsal of {script} needs",
                    cause="another environment trains, or it is not complete", fix=self._get(package, floor),
                )  # fmt: skip
            if found and needs.older(found, floor):
                raise KitError(
                    "LG404", f"{self.path} has {package} {found}, {script} needs {floor} or newer{why}",
                    cause="the script is newer than the environment, as where upstream's own pins are older",
                    fix=f"{self._get(package, floor)}; {needs.WORKS}",
                )  # fmt: skip

    def _get(self, package: str, floor: str) -> str:
        """How to get it. The user's environment is the user's."""
        if self.own:
            return "pip install 'leangrpo-kit[verify]', or --python with the interpreter that trains"
        return f"--python with an environment that has {package}{f' {floor}' if floor else ''} or newer"


def examine(python: str | Path | None = None) -> Interpreter:
    """Finds out what an interpreter is, the kit's own by default. Raises LG405 for one that cannot rehearse.

    Args:
        python: a path, or a name on PATH.
    """
    path = sys.executable if python is None else _located(str(python))
    asked = [f"{package}={needs.module(package)}" for package in needs.FLOORS]
    try:
        done = subprocess.run(
            [path, "-B", "-c", PROBE, MARK, *asked], stdin=subprocess.DEVNULL, capture_output=True, timeout=PATIENCE_S,
            env=environment(python is None), cwd=os.sep, encoding="utf-8", errors="replace",
        )  # fmt: skip
    except OSError as error:
        raise _unusable(path, error.strerror or str(error), "there is no such file, or it is not a program") from error
    except subprocess.TimeoutExpired as error:
        raise _unusable(path, f"it says nothing within {PATIENCE_S:g} s", "it is not Python, or it hangs") from error
    answer = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    if not answer:
        said = (done.stderr.strip() or done.stdout.strip() or f"exit status {done.returncode}").splitlines()[-1]
        raise _unusable(path, f"it does not run as Python: {said}", "it is not Python, or its environment is broken")
    version, packages = json.loads(answer[-1][len(MARK) :])
    if tuple(version) < OLDEST:
        raise _unusable(path, f"it is Python {'.'.join(map(str, version))}, 3.10 or newer is needed",
                        "the runtime in patched trees needs it, too")  # fmt: skip
    return Interpreter(path, python is None, tuple(version), packages)


def environment(own: bool) -> dict[str, str]:
    """Environment variables for the interpreter. Another one than the kit's gets none of the kit's paths."""
    env = {name: value for name, value in os.environ.items() if own or name not in OWN}
    if "PYTHONPATH" in env:  # it starts in another folder
        env["PYTHONPATH"] = os.pathsep.join(os.path.abspath(path) for path in env["PYTHONPATH"].split(os.pathsep))
    return env | {"PYTHONDONTWRITEBYTECODE": "1"}


def lent(folder: Path) -> Path:
    """A copy of the package that runs in the interpreter, alone in a folder for its path."""
    ignored = shutil.ignore_patterns("__pycache__")
    package = data.rehearsal_path()
    shutil.copytree(package, folder / package.name, ignore=ignored, dirs_exist_ok=True)
    return folder


def _located(python: str) -> str:
    if os.sep not in python and (found := shutil.which(python)):
        return found
    path = os.path.abspath(os.path.expanduser(python))  # a link stays one: that is how an environment is known
    if os.path.isdir(path):
        raise _unusable(path, "it is a folder", "an environment, where its interpreter is asked for")
    return path


def _unusable(path: str, what: str, cause: str) -> KitError:
    inside = os.path.join(path, "bin", "python")
    better = inside if os.path.isfile(inside) else "/path/to/env/bin/python, the interpreter that trains"
    return KitError("LG405", f"--python {path}: {what}", cause=cause, fix=f"--python {better}")
