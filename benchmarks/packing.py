"""The time of packing and unpacking within a step: each rank times every call into `shoal.onebit` itself.

A call takes milliseconds, and reading the clock twice a tenth of a microsecond, so that steps may be timed at the same time.
"""

from __future__ import annotations

import functools
import inspect
import sys
import time
from collections.abc import Callable
from typing import Any


class Packing:
    """Adds up the `seconds` that this process has spent in the functions of `shoal.onebit`."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def watch(self) -> None:
        """Time every function that the package promises from now on; without the package, there is nothing to time."""
        package = sys.modules.get("shoal.onebit")
        for name in vars(package)["__all__"] if package else ():
            if inspect.isfunction(function := vars(package)[name]):
                setattr(package, name, self._timed(function))

    def _timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def timed(*arguments: Any, **keywords: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*arguments, **keywords)
            finally:
                self.seconds += time.perf_counter() - start

        return timed
