"""Shoal imports on each torch that it supports: private names, which torch may drop, are listed here.

`make test-oldest` runs this, and suites, on the oldest torch that pyproject.toml allows.
"""

from __future__ import annotations

import ast
import pkgutil
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import shoal

SOURCES = Path(shoal.__file__).parent
OPTIONAL = ("shoal.compat.lightning", "shoal.compat.accelerate")
"""Modules that import a client of Shoal's, which need not be installed."""

PRIVATE = {
    "torch._C._functorch.TransformType",
    "torch._C._functorch.is_legacy_batchedtensor",
    "torch._dynamo.eval_frame.OptimizedModule",
    "torch._dynamo.eval_frame.skip_code",
    "torch.nn.modules.batchnorm._NormBase",
    "torch.utils._python_dispatch.TorchDispatchMode",
    "torch.utils._python_dispatch._disable_current_modes",
    "torch.utils._python_dispatch._get_current_dispatch_mode_stack",
    "torch.utils._pytree.tree_leaves",
    "torch.utils._pytree.tree_map",
    "torch.utils._pytree.tree_map_only",
    "torch.utils.checkpoint._checkpoint_without_reentrant_generator",
}
"""Private names of torch that Shoal imports. Add one that the oldest torch has too: run `make test-oldest`."""


def private_names() -> Iterator[str]:
    """Yield the names that the sources import from torch with an underscore in front, or from such a module."""
    for file in SOURCES.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.partition(".")[0] == "torch":
                for alias in node.names:
                    if any(part.startswith("_") for part in (*node.module.split("."), alias.name)):
                        yield f"{node.module}.{alias.name}"


def test_private_names_of_torch_are_those_that_its_oldest_release_has() -> None:
    assert {*private_names()} == PRIVATE
    for name in PRIVATE:
        module, _, attribute = name.rpartition(".")
        assert hasattr(import_module(module), attribute), name


def test_every_module_imports() -> None:
    names = [module.name for module in pkgutil.walk_packages([str(SOURCES)], "shoal.")
             if module.name not in OPTIONAL and not module.name.endswith("__main__")]
    program = f"import importlib; [importlib.import_module(name) for name in {names!r}]"
    subprocess.run([sys.executable, "-c", program], check=True)  # in a process of its own: some change torch
