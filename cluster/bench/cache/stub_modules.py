"""Empty modules in place of packages that a peer imports and this machine lacks (GPU kernels, grammar engines).

Imported by the drivers, which run under the peer's Python: standard library only. The peers' cache managers use none
of what is replaced.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.metadata
import sys
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

__all__ = ["install_stubs"]

_VERSION = "0.0.0"


class _EmptyClass(type):
    """Metaclass of a class that has every attribute."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock(name=f"{cls.__name__}.{name}")


class _EmptyModule(ModuleType):
    """Has every name that is asked of it: an empty class where the name looks like one, else a mock."""

    __version__ = _VERSION

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__ = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = _EmptyClass(name, (), {}) if name[0].isupper() else MagicMock(name=f"{self.__name__}.{name}")
        setattr(self, name, made)
        return made


class _Stubs(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Last resort of the import system: an empty module for what is not installed."""

    def __init__(self, packages: frozenset[str]) -> None:
        self._packages = packages

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name.split(".")[0] in self._packages:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> ModuleType:
        return _EmptyModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def install_stubs(packages: frozenset[str]) -> None:
    """From now on each of `packages` that is not installed can be imported, and has version 0.0.0."""
    sys.meta_path.append(_Stubs(packages))
    known_version = importlib.metadata.version

    def version(distribution_name: str) -> str:
        try:
            return known_version(distribution_name)
        except importlib.metadata.PackageNotFoundError:
            if distribution_name.replace("-", "_") in packages:
                return _VERSION
            raise

    importlib.metadata.version = version
