"""Run a function right after a module was imported, without importing it now."""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

_hooks: list[tuple[str, Callable[[ModuleType], None]]] = []


def after_import(name: str, hook: Callable[[ModuleType], None]) -> None:
    """Calls `hook(module)` once a module named `name`, or whose dotted name ends in `.name`, has been executed."""
    for loaded, module in list(sys.modules.items()):
        if _matches(loaded, name):
            hook(module)
            return
    if not _hooks:
        sys.meta_path.insert(0, _Finder())
    _hooks.append((name, hook))


def _matches(fullname: str, name: str) -> bool:
    return fullname == name or fullname.endswith("." + name)


class _Finder(importlib.abc.MetaPathFinder):
    busy = False

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: Any = None) -> Any:
        wanted = [hook for name, hook in _hooks if _matches(fullname, name)]
        if not wanted or self.busy:
            return None
        self.busy = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self.busy = False
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            for hook in wanted:
                hook(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
