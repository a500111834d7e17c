"""Make `import deepspeed` give Shoal's published names in the environment of the Python that runs this script.

It writes a module and a `.pth` file that puts a finder in front of the import path, and the metadata of a distribution named
`deepspeed`, which clients ask for before they import.
"""

from __future__ import annotations

import sysconfig
from importlib.util import find_spec
from pathlib import Path

FINDER = '''"""A finder that gives `shoal.compat.deepspeed` under the name `deepspeed`, the same module objects."""
import importlib, importlib.util, sys
from importlib.machinery import ModuleSpec

class Published:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] != "deepspeed":
            return None
        try:
            real = importlib.util.find_spec("shoal.compat." + name)
        except ModuleNotFoundError:
            return None
        if real is None:
            return None
        return ModuleSpec(name, self, origin=real.origin, is_package=real.submodule_search_locations is not None)

    def create_module(self, spec):
        return importlib.import_module("shoal.compat." + spec.name)

    def exec_module(self, module):
        pass

sys.meta_path.insert(0, Published())
'''


def main() -> None:
    site = Path(sysconfig.get_paths()["purelib"])
    if (found := find_spec("deepspeed")) is not None and "shoal" not in (found.origin or ""):
        raise SystemExit(f"deepspeed is installed already, at {found.origin}; uninstall it first: pip uninstall deepspeed")
    (site / "shoal_published.py").write_text(FINDER)
    (site / "shoal_published.pth").write_text("import shoal_published\n")
    metadata = site / "deepspeed-0.19.8+shoal.dist-info"
    metadata.mkdir(exist_ok=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: deepspeed\nVersion: 0.19.8+shoal\n")


main()
