"""`install()` makes `import deepspeed` give Shoal's tree of published names, and its metadata, in this process.

A finder on `sys.meta_path` answers for `deepspeed` and what lies below it. `deepspeed.x.y` is the same module object as
`shoal.compat.deepspeed.x.y`, so that there is one of each class. Clients ask `importlib.util.find_spec` and
`importlib.metadata` whether DeepSpeed is there; the finder answers both. Processes that this one starts know nothing of it:
for those, and for `accelerate launch`, there is the wheel (`make deepspeed-wheel`).
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import importlib.util
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import CodeType, ModuleType

from shoal.compat import distribution
from shoal.errors import UsageError
from shoal.log import logger

__all__ = ["install", "uninstall"]

HOME = f"{__package__}.{distribution.NAME}"
"""The package that holds the tree."""
CLIENTS = ("accelerate", "lightning", "lightning_fabric", "pytorch_lightning", "transformers", "trl")
"""Libraries that look for DeepSpeed when they are imported, and remember what they found."""


def install() -> None:
    """Let `import deepspeed` give Shoal's tree from now on; a second call does nothing.

    Call it before a client is imported. Raises `UsageError` if the original is imported already; warns if it is installed,
    or if a client that may have looked for it in vain is imported.
    """
    if any(isinstance(finder, Finder) for finder in sys.meta_path):
        return
    _check_imported()
    original = _installed_original()
    if original is not None:
        logger.warning("DeepSpeed %s is installed in this environment; in this process `import deepspeed` gives Shoal "
                       "instead. Uninstall one of the two to be sure which one a script uses", original)
    early = [name for name in CLIENTS if name in sys.modules]
    if early and distribution.NAME not in sys.modules:
        logger.warning("shoal.compat.install: %s was imported before and may have found that DeepSpeed is missing; call "
                       "install() first, or start the script with `shoal run --as-deepspeed`", ", ".join(early))
    sys.meta_path.insert(0, Finder())


def uninstall() -> None:
    """Undo `install`: remove the finder, and the names under which the tree was imported."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, Finder)]
    for name in [name for name in sys.modules if name == distribution.NAME or name.startswith(f"{distribution.NAME}.")]:
        if sys.modules[name].__name__.startswith(HOME):
            del sys.modules[name]


def _check_imported() -> None:
    there = sys.modules.get(distribution.NAME)
    if there is not None and not there.__name__.startswith(HOME) and not _is_wheel(there):
        version = vars(there).get("__version__", "of unknown version")
        raise UsageError(f"shoal.compat.install: DeepSpeed {version} is imported already, from {there.__file__}; call "
                         "install() before anything imports it, or uninstall it")


def _is_wheel(module: ModuleType) -> bool:
    """Return whether `module` is the wheel's, which calls `install` while it is imported."""
    return distribution.is_stand_in(str(vars(module).get("__version__", "")))


def _installed_original() -> str | None:
    """Return the version of the original, if it is installed."""
    return next((version for version in _installed_versions() if not distribution.is_stand_in(version)), None)


def _installed_versions() -> list[str]:
    """Return the versions of the distributions named deepspeed among the installed packages."""
    context = importlib.metadata.DistributionFinder.Context(name=distribution.NAME)
    return [each.version for each in importlib.metadata.MetadataPathFinder.find_distributions(context)]


class Finder(importlib.metadata.DistributionFinder):
    """Finds `deepspeed` and its submodules in Shoal's tree, and a distribution of that name."""

    def find_spec(self, fullname: str, path: Sequence[str] | None = None,
                  target: ModuleType | None = None) -> importlib.machinery.ModuleSpec | None:
        """Return the spec of a published module, or None for other names and for what the tree does not have."""
        if fullname != distribution.NAME and not fullname.startswith(f"{distribution.NAME}."):
            return None
        home = importlib.util.find_spec(HOME + fullname.removeprefix(distribution.NAME))
        if home is None:
            return None
        spec = importlib.machinery.ModuleSpec(fullname, Alias(home), origin=home.origin,
                                              is_package=home.submodule_search_locations is not None)
        if home.submodule_search_locations is not None:
            spec.submodule_search_locations = list(home.submodule_search_locations)
        return spec

    def find_distributions(self, context: importlib.metadata.DistributionFinder.Context | None = None,
                           ) -> Iterable[importlib.metadata.Distribution]:
        """Yield the stand-in's distribution, if `context` asks for it or for all, unless its wheel is installed."""
        name = None if context is None else context.name
        asked = name is None or re.sub(r"[-_.]+", "-", name).lower() == distribution.NAME
        if asked and not any(distribution.is_stand_in(version) for version in _installed_versions()):
            yield StandIn()


class Alias(importlib.abc.InspectLoader):
    """Gives the module of another name, which is imported under that name first."""

    def __init__(self, home: importlib.machinery.ModuleSpec) -> None:
        self._home = home

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        """Return the module of the tree."""
        return importlib.import_module(self._home.name)

    def exec_module(self, module: ModuleType) -> None:
        """Leave the module as it is: it has been executed. Its own spec takes the place of the alias's."""
        module.__spec__ = self._home

    def is_package(self, fullname: str) -> bool:
        """Return whether the module has submodules."""
        return self._home.submodule_search_locations is not None

    def get_code(self, fullname: str) -> CodeType | None:
        """Return the code, for `python -m`."""
        loader = self._home.loader
        assert isinstance(loader, importlib.abc.InspectLoader)
        return loader.get_code(self._home.name)

    def get_source(self, fullname: str) -> str | None:
        """Return the source text."""
        loader = self._home.loader
        assert isinstance(loader, importlib.abc.InspectLoader)
        return loader.get_source(self._home.name)


class StandIn(importlib.metadata.Distribution):
    """The metadata of a distribution that is not installed."""

    def read_text(self, filename: str) -> str | None:
        """Return one of its files, None for those that it does not have."""
        return {"METADATA": distribution.metadata(), "top_level.txt": f"{distribution.NAME}\n"}.get(filename)

    def locate_file(self, path: object) -> Path:
        """Return where a file of it would be."""
        return Path(__file__).parent / str(path)
