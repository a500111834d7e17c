"""Ranges of a profile."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

from torch.profiler import record_function

__all__ = ["instrument_w_nvtx"]

P = ParamSpec("P")
R = TypeVar("R")


def instrument_w_nvtx(func: Callable[P, R]) -> Callable[P, R]:
    """Return `func` with a range of its name in traces."""
    @wraps(func)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        with record_function(func.__qualname__):
            return func(*args, **kwargs)

    return wrapped
