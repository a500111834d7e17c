"""torch.compile under the published names."""

from __future__ import annotations

from typing import Any

import torch

from shoal.compat.deepspeed.runtime.utils import noop_decorator

__all__ = ["disable", "enable", "is_compile_supported", "is_compiling"]


def is_compile_supported() -> bool:
    """Return True: every torch that Shoal needs has torch.compile."""
    return True


def is_compiling() -> bool:
    """Whether torch.compile traces the caller at present."""
    return torch.compiler.is_compiling()


def disable(func: Any) -> Any:
    """Return `func` as one that torch.compile does not trace."""
    return torch.compiler.disable(func)


def enable(min_version: Any = None) -> Any:
    """Return a decorator that changes nothing: torch.compile traces functions unless they are disabled."""
    return noop_decorator
