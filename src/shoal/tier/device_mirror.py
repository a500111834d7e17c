"""A span of a compute device above one of its host: the device's memory is there while it is used, and its bytes travel.

On their way down they are not waited for: whoever reads them on the host waits.
"""

from __future__ import annotations

import threading

import torch
from torch import Tensor

from shoal.tier.span import DONE, Names, PlacedSpan, ResidentSpan, Span, Transfer, unnamed
from shoal.tier.store import Store
from shoal.tier.streams import CopyStream, Mark, down, up

__all__ = ["Arrival", "DeviceMirror", "above"]


class Arrival:
    """The bytes of a span on their way into `target` on a compute device, in `stream`.

    They follow what the device was given so far if `after_compute`, as they must where that reads or writes `target`.
    """

    def __init__(self, rest: Span, target: Tensor, stream: CopyStream, *, after_compute: bool):
        self._rest = rest
        self._target = target
        self._stream = stream
        self._after_compute = after_compute
        self._arriving = rest.fetch()
        self._mark: Mark | None = None
        self._over = False
        if self._arriving is DONE:
            self._start()

    @property
    def done(self) -> bool:
        return self._over

    def wait(self) -> None:
        if self._mark is None:
            self._arriving.wait()
            self._start()
        assert self._mark is not None
        self._mark.join()  # every time: another stream may be the current one
        if self._over:
            return
        if not isinstance(self._rest, ResidentSpan):  # its memory goes now
            self._mark.wait()
        self._rest.commit(changed=False)
        self._over = True

    def _start(self) -> None:
        with self._stream.open(after_compute=self._after_compute):
            self._target.copy_(self._rest.tensor, non_blocking=True)
        self._mark = self._stream.mark()


class DeviceMirror:
    """Memory of `device` above the span `below`, which comes and goes as a whole. It is there at first."""

    def __init__(self, below: PlacedSpan, device: torch.device):
        self.tensor: Tensor = torch.empty_like(below.tensor, device=device)
        self._below = below
        self._device = device
        self._bytes = self.tensor.numel() * self.tensor.element_size()
        self._landing: Mark | None = None
        self._one = threading.Lock()

    def fetch(self, start: int = 0, stop: int | None = None, *, fresh: bool = False) -> Transfer:
        self.land()
        stream, storage = up(self._device), self.tensor.untyped_storage()
        there = storage.nbytes() > 0  # at first: memory that the device's computing was given
        if not there:
            with stream.open():
                storage.resize_(self._bytes)
        return DONE if fresh else Arrival(self._below, self.tensor, stream, after_compute=there)

    def commit(self, start: int = 0, stop: int | None = None, *, changed: bool = True) -> Transfer:
        stream = down(self._device)
        if changed:
            self._below.fetch(fresh=True).wait()
            with stream.open(after_compute=True):
                self._below.tensor.copy_(self.tensor, non_blocking=True)
            self._landing = stream.mark()
            stream.land(self.land)
        stream.free(self.tensor, computed=not changed)
        return DONE

    def land(self) -> None:
        """Wait for bytes on their way down, and let them rest; a step in a thread of its own may ask for them too."""
        with self._one:
            landing, self._landing = self._landing, None
            if landing is not None:
                landing.wait()
                self._below.commit()

    def discard(self) -> None:
        self.land()
        self._below.discard()

    def close(self) -> None:
        self.land()
        self._below.close()


class _AtRest:
    """The host's side of a copied span."""

    def __init__(self, above: DeviceMirror, below: Span):
        self.tensor = below.tensor
        self._above = above
        self._below = below

    def fetch(self, start: int = 0, stop: int | None = None, *, fresh: bool = False) -> Transfer:
        self._above.land()
        return self._below.fetch(start, stop, fresh=fresh)

    def commit(self, start: int = 0, stop: int | None = None, *, changed: bool = True) -> Transfer:
        return self._below.commit(start, stop, changed=changed)

    def close(self) -> None:
        self._above.close()


def above(device: torch.device, store: Store, size: int, dtype: torch.dtype, name: str,
          names: Names = unnamed) -> tuple[PlacedSpan, Span]:
    """Return a span of `store` as it is used on `device`, and as it rests. They are one where the device is the store's."""
    rest = store.place(size, dtype, name, names=names)
    if device == store.device:
        return rest, rest
    copied = DeviceMirror(rest, device)
    return copied, _AtRest(copied, rest)
