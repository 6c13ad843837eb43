"""Stand-ins for modules a script imports but a rehearsal does not need."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Iterable, Sequence
from typing import Any


class _AnyType(type):
    """Metaclass of placeholders: every attribute is another placeholder, so class bodies and decorators survive."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return placeholder(name)


def placeholder(name: str) -> Any:
    """A class that can be subclassed, called with anything and asked for any attribute."""

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        pass

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        # Used as a decorator, it leaves the function alone.
        return args[0] if len(args) == 1 and callable(args[0]) else None

    def get(self: Any, attribute: str) -> Any:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        return placeholder(attribute)()

    return _AnyType(name, (), {"__init__": init, "__call__": call, "__getattr__": get})


class _StubModule(types.ModuleType):
    __version__ = "0.0.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return placeholder(name)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, names: Iterable[str]) -> None:
        self.names = frozenset(names)

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: Any = None) -> Any:
        if fullname.partition(".")[0] not in self.names:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: Any) -> types.ModuleType:
        return _StubModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        if module.__name__ in ("bitsandbytes", "bitsandbytes.optim"):
            from leangrpo_rehearsal import eightbit  # it imports torch, which the commands do without

            eightbit.fill(module)


def install(names: Iterable[str], always: Iterable[str] = ()) -> list[str]:
    """Stubs those of `names` that are not installed, and all of `always`. Returns what was stubbed.

    Call it after the libraries that probe for optional modules have been imported, or they would find the stubs.
    """
    chosen = [name for name in names if name not in sys.modules and importlib.util.find_spec(name) is None]
    chosen += [name for name in always if name not in chosen]
    for name in always:
        for loaded in [key for key in sys.modules if key.partition(".")[0] == name]:
            del sys.modules[loaded]
    sys.meta_path.insert(0, _Finder(chosen))
    return chosen


def fake(name: str, **attributes: Any) -> types.ModuleType:
    """Puts a module with these attributes into `sys.modules`; parents must be stubs or fakes already."""
    module = types.ModuleType(name)
    module.__dict__.update(attributes)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None)
    sys.modules[name] = module
    return module
