"""A bounded cache of what was used last, which threads may share: layouts are found from several at once in a server."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from threading import RLock
from typing import Generic, TypeVar

__all__ = ["LRUCache"]

T = TypeVar("T")


class LRUCache(Generic[T]):
    """The values of the last `size` keys that were asked for, which threads may share."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._values: OrderedDict[Hashable, T] = OrderedDict()
        self._lock = RLock()  # a signal handler may ask within a look-up of its own thread

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return the value of `key`, by `make` where there is none."""
        with self._lock:
            if key in self._values:
                self._values.move_to_end(key)
                return self._values[key]
        made = make()
        with self._lock:
            value = self._values.setdefault(key, made)  # another thread may have been first
            while len(self._values) > self._size:
                self._values.popitem(last=False)
        return value
