"""Submodules by their dotted names."""

from __future__ import annotations

from functools import reduce
from typing import Any

__all__ = ["recursive_getattr", "recursive_setattr"]


def recursive_getattr(model: Any, module_name: str) -> Any:
    """Return the attribute at a dotted path."""
    return reduce(getattr, module_name.split("."), model)


def recursive_setattr(model: Any, module_name: str, module: Any) -> None:
    """Set the attribute at a dotted path."""
    path, _, last = module_name.rpartition(".")
    setattr(recursive_getattr(model, path) if path else model, last, module)
