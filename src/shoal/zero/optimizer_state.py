"""The optimizer state of one unit: master and moments, which are stored together, and what else a step accesses.

    master             the fp32 copy of the weights, or the resting weights themselves
    moments            by the optimizer's names, allocated as zeros on first use
    gradient           reduced; read by the step
    separate_weights   the resting weights in the compute dtype, where the master is a copy
    stepped_weights    the same, where the step writes them; compressed publications update them instead (compressed.py)

All are spans over the elements whose master rests on this rank, so a chunk of the step is one range of all of them.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.tier import JoinedTransfers, ResidentSpan, Span, Tiers, Transfer
from shoal.tier.disk_span import CHUNK
from shoal.tier.span import Names
from shoal.tier.streams import CopyEvent
from shoal.zero.gradient import Gradient

HOST_PIECE = 1 << 24
"""Elements of state in host memory that are stepped at once, where a device has the gradients or the weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateAccess:
    """Which tensors a pass over the state reads and writes. Every pass reads the master and the moments."""

    reads_gradient: bool = True
    writes_moments: bool = True
    writes_weights: bool = True
    """The master and the stepped weights."""


WHOLE_STEP = StateAccess()


class OptimizerState:
    """The optimizer's state of one unit."""

    def __init__(self, unit: str, size: int, tiers: Tiers, master: Span, separate_weights: Span | None,
                 gradient: Gradient, names: Names):
        self.unit = unit
        self.store = tiers.state
        self._staging = tiers.staging
        self._sent: CopyEvent | None = None  # the last copy of stepped weights that the compute stream has not waited for
        self.moments: dict[str, Span] = {}
        self._size, self._names = size, names
        self._on_disk = tiers.weight.granule is not None
        self.master = master
        self.separate_weights = separate_weights
        """The resting weights where they are not the master; None where they are."""
        self._gradient = gradient
        self._fetched: list[range] = []
        self._prefetched: dict[range, list[Span]] = {}

    @property
    def stepped_weights(self) -> Span | None:
        """The resting weights that the step casts the master to; None where it writes none."""
        return None if self.follows_publication else self.separate_weights

    @property
    def follows_publication(self) -> bool:
        """Whether the weights follow the master by compressed publications alone: the step leaves them as they are."""
        return self.separate_weights is not None and self._gradient.transport.compresses_weights

    @property
    def rests_on_disk(self) -> bool:
        """Whether the step fetches some of it, or the weights, from a disk."""
        return self.store.granule is not None or self._on_disk

    @property
    def granule(self) -> int | None:
        """Elements that are fetched at once; None if nothing is offloaded."""
        spans = [self.master, self._gradient.rest, *([] if self.stepped_weights is None else [self.stepped_weights])]
        if self.store.granule is None and all(isinstance(span, ResidentSpan) for span in spans):
            return None
        return self.store.granule or (CHUNK if self._on_disk else HOST_PIECE)

    def moment(self, kind: str, dtype: torch.dtype) -> Tensor:
        """Return the moments called `kind` of the whole unit; allocate zeros if there are none."""
        if kind not in self.moments:
            span = self.store.place(self._size, dtype, f"'{kind}' of unit '{self.unit}'", names=self._names)
            for part in self._fetched:
                span.fetch(part.start, part.stop).wait()
            self.moments[kind] = span
        return self.moments[kind].tensor

    @contextmanager
    def weights_to_send(self, target: Tensor) -> Generator[Tensor]:
        """Yield host memory for the stepped weights `target` of the device, to which they go when the context ends.

        The copy waits for no work of the compute stream, and no work for the copy until `receive_weights`.
        """
        written = self._staging.borrow(target.numel(), target.dtype)
        yield written
        self._sent = self._staging.send(written, target)

    def receive_weights(self) -> None:
        """Have later work of the compute stream wait for the stepped weights that were sent to the device."""
        sent, self._sent = self._sent, None
        if sent is not None:
            sent.stream_wait()

    def __del__(self) -> None:
        if self._sent is not None and self.separate_weights is not None:  # dropped, with its engine, before a wait
            self._staging.keep(self.separate_weights.tensor)

    def prefetch(self, part: range) -> None:
        """Start fetching the moments of `part`, whose step comes soon. (Backward still uses its weights and gradient.)"""
        self._prefetched[part] = list(self.moments.values())
        for span in self._prefetched[part]:
            span.fetch(part.start, part.stop)

    def end_prefetch(self, part: range) -> None:
        """End a `prefetch`: the step has fetched the part, or is not expected any more."""
        for span in self._prefetched.pop(part):
            span.commit(part.start, part.stop, changed=False)

    def fetch(self, part: range, access: StateAccess = WHOLE_STEP) -> Transfer:
        """Start fetching the state that a pass over `part` accesses."""
        self._fetched.append(part)
        transfers = [span.fetch(part.start, part.stop) for span in (self.master, *self.moments.values())]
        if self.stepped_weights is not None and access.writes_weights:
            transfers.append(self.stepped_weights.fetch(part.start, part.stop, fresh=True))
        return JoinedTransfers([*transfers, *([self._gradient.fetch(part)] if access.reads_gradient else [])])

    def commit(self, part: range, access: StateAccess = WHOLE_STEP) -> Transfer:
        """Start committing the state of `part` after a pass; `access` is that of its `fetch`."""
        self._fetched.remove(part)
        transfers = [self.master.commit(part.start, part.stop, changed=access.writes_weights)]
        transfers += [span.commit(part.start, part.stop, changed=access.writes_moments) for span in self.moments.values()]
        if self.stepped_weights is not None and access.writes_weights:
            transfers.append(self.stepped_weights.commit(part.start, part.stop))
        return JoinedTransfers([*transfers, *([self._gradient.commit(part)] if access.reads_gradient else [])])
