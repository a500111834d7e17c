"""A loader without end: when an epoch is over the next one begins."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sized
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

from shoal.errors import UsageError

__all__ = ["RepeatingLoader"]

T = TypeVar("T")


@runtime_checkable
class _Resumable(Protocol):
    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any], /) -> None: ...


class RepeatingLoader(Generic[T]):
    """Iterate `loader` again and again; `next` works on this object itself. Raises `UsageError` if it gives nothing."""

    def __init__(self, loader: Iterable[T]) -> None:
        self.loader = loader
        self._batches: Iterator[T] | None = None

    def __len__(self) -> int:
        """Return the batches of one epoch; TypeError when the loader does not know."""
        if not isinstance(self.loader, Sized):
            raise TypeError(f"{type(self.loader).__name__} has no length")
        return len(self.loader)

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        if self._batches is not None:
            for batch in self._batches:
                return batch
        self._batches = iter(self.loader)
        for batch in self._batches:
            return batch
        raise UsageError(f"RepeatingLoader: {type(self.loader).__name__} gives no batches; an iterator ends for good, so "
                         f"give the loader that it came from")

    def state_dict(self) -> dict[str, Any]:
        """Return the loader's own state. Raises `UsageError` if it has none."""
        return self._resumable().state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Move the loader to `state` and go on from there. Raises `UsageError` if it cannot."""
        self._resumable().load_state_dict(state)
        self._batches = None

    def _resumable(self) -> _Resumable:
        if not isinstance(self.loader, _Resumable):
            raise UsageError(f"RepeatingLoader: {type(self.loader).__name__} has no state_dict and load_state_dict, so its "
                             f"position cannot be stored; use shoal's loader (training_data), or another resumable one")
        return self.loader
