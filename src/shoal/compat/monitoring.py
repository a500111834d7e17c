"""The common part of published monitors: they write events."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any

__all__ = ["Event", "Monitor"]

Event = tuple[str, Any, int]
"""A tag such as Train/Samples/lr, its value, and the step."""


class Monitor(ABC):
    """Writes events somewhere."""

    @abstractmethod
    def __init__(self, monitor_config: Any):
        self.monitor_config = monitor_config

    @abstractmethod
    def write_events(self, event_list: Iterable[Event]) -> None:
        """Write events of one step or several."""
