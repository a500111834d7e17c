"""The base of published backends."""

from __future__ import annotations

from typing import Any

__all__ = ["Backend"]


class Backend:
    """The backend that joins the ranks of a job, by name."""

    def __init__(self, name: str = "backend", rank: int = 0, size: int = 1):
        self.name = name
        self.world_group: Any = None
        self.world_size = size
        self.world_rank = rank
        self.process_groups: list[Any] = []
        self.initialized = False

    def is_initialized(self) -> bool:
        """Whether the ranks have joined."""
        return self.initialized

    def new_group(self, *args: Any, **kwargs: Any) -> Any:
        """Return None; subclasses create a group."""

    def init_process_group(self, *args: Any, **kwargs: Any) -> None:
        """Mark the ranks as joined; subclasses join them."""
        self.initialized = True
