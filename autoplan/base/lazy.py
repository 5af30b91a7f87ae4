"""Packages whose modules are imported on first access."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType


def module_loader(package: str) -> Callable[[str], ModuleType]:
    """Return a `__getattr__` for a package that imports the module with the requested name."""

    def load(name: str) -> ModuleType:
        if name.startswith("_") or find_spec(f"{package}.{name}") is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return import_module(f"{package}.{name}")

    return load
