"""A span of a compute device above one of its host: the device's memory is there while it is used, and its bytes travel."""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.tier.span import Span, Transfer
from shoal.tier.store import Store

__all__ = ["Copied", "above"]


class Copied:
    """Memory of `device` above the span `below`, which comes and goes as a whole. It is there at first."""

    def __init__(self, below: Span, device: torch.device):
        self.below = below
        self.tensor: Tensor = torch.empty_like(below.tensor, device=device)
        self._bytes = self.tensor.numel() * self.tensor.element_size()

    def fetch(self, start: int = 0, stop: int | None = None, *, fresh: bool = False) -> Transfer:
        self.tensor.untyped_storage().resize_(self._bytes)
        return _Arrival(self, None if fresh else self.below.fetch())

    def commit(self, start: int = 0, stop: int | None = None, *, changed: bool = True) -> Transfer:
        if changed:
            self.below.fetch(fresh=True).wait()
            self.below.tensor.copy_(self.tensor)
        self.tensor.untyped_storage().resize_(0)
        return self.below.commit(changed=changed) if changed else _Arrival(self, None)

    def discard(self) -> None:
        self.below.discard()

    def close(self) -> None:
        self.below.close()

    @property
    def disk_bytes(self) -> int:
        return self.below.disk_bytes


class _Arrival:
    """Bytes on their way up; None: none are."""

    def __init__(self, span: Copied, arriving: Transfer | None):
        self._span = span
        self._arriving = arriving

    @property
    def done(self) -> bool:
        return self._arriving is None

    def wait(self) -> None:
        if self._arriving is not None:
            self._arriving.wait()
            self._arriving = None
            self._span.tensor.copy_(self._span.below.tensor, non_blocking=True)
            self._span.below.commit(changed=False)


def above(device: torch.device, store: Store, size: int, dtype: torch.dtype, name: str) -> tuple[Span, Span]:
    """Return a span of `store` as it is used on `device`, and as it rests. They are one where the device is the store's."""
    rest = store.place(size, dtype, name)
    return (rest, rest) if device == store.device else (Copied(rest, device), rest)
