"""Functions that run right after a module is imported."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType

Hook = Callable[[ModuleType], object]


class _Finder(importlib.abc.MetaPathFinder):
    """Finds modules that have a hook, by the finders that follow it, and calls the hook after the module is loaded."""

    def __init__(self) -> None:
        self.hooks: dict[str, list[Hook]] = {}

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in self.hooks:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(name, path, target)
            if spec is not None and spec.loader is not None:
                spec.loader = _Loader(spec.loader, self.hooks)
                return spec
        return None


class _Loader(importlib.abc.Loader):
    """Loads a module with its own loader, then runs its hooks. Only finding a module (`importlib.util.find_spec`) runs no hook."""

    def __init__(self, loader: importlib.abc.Loader, hooks: dict[str, list[Hook]]) -> None:
        self.loader = loader
        self.hooks = hooks

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = module.__loader__ = self.loader
        self.loader.exec_module(module)
        for hook in self.hooks.pop(module.__name__, ()):
            hook(module)


_finder = _Finder()


def after_import(name: str, hook: Hook) -> None:
    """Call `hook(module)` when the module `name` has been imported; immediately if it is imported already."""
    if name in sys.modules:
        hook(sys.modules[name])
        return
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
    _finder.hooks.setdefault(name, []).append(hook)
