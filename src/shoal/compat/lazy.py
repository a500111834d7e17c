"""Packages whose names and submodules are imported at their first use, so that `import deepspeed` imports no torch."""

from __future__ import annotations

import pkgutil
import sys
from collections.abc import Callable, Mapping
from importlib import import_module

__all__ = ["lazy_names"]


def lazy_names(package: str, homes: Mapping[str, str]) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Return the `__getattr__` and the `__dir__` of `package`.

    `homes` gives the module of each name: `("initialize", "deepspeed.entry")`, or `"deepspeed.comm:"` where the name is
    that module itself. The package's submodules are names of it as well.
    """
    module = sys.modules[package]
    submodules = {info.name for info in pkgutil.iter_modules(module.__path__)}
    shadowed = {name: home for name, home in homes.items() if name in submodules}

    def get(name: str) -> object:
        home = homes.get(name)
        if home is not None:
            found = import_module(home[:-1]) if home.endswith(":") else getattr(import_module(home), name)
        elif name in submodules:
            found = import_module(f"{package}.{name}")
        else:
            raise AttributeError(f"module '{package}' has no attribute '{name}'")
        vars(module)[name] = found
        for shadow, its_home in shadowed.items():  # importing a submodule binds its name, which is another object's here
            if its_home in sys.modules:
                vars(module)[shadow] = getattr(sys.modules[its_home], shadow)
        return found

    def names() -> list[str]:
        return sorted({*vars(module), *homes, *submodules})

    return get, names
