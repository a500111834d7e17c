"""The state that the step of one unit reads and writes.

    master     the fp32 copy of the weights, or the resting weights themselves
    moments    by the name that the optimizer gives them, made as zeros when they are first asked for
    gradient   reduced; read by the step
    rounded    the resting weights in the compute dtype; written by the step, where the master is a copy and they do not
               follow it by signs (compressed.py)

All are spans over the elements whose master rests on this rank, so that a piece of the step is one range of all of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.tier import JoinedTransfers, ResidentSpan, Span, Store, Transfer
from shoal.tier.disk_span import CHUNK
from shoal.tier.span import Names
from shoal.zero.gradient import Gradient


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """The access of a pass over the state, which always reads the master and the moments."""

    gradient: bool = True
    """Reads the gradient."""
    moments: bool = True
    """Writes the moments."""
    weights: bool = True
    """Writes the master and the rounded weights."""


WHOLE_STEP = Use()


class OptimizerState:
    """The optimizer's state of one unit."""

    def __init__(self, unit: str, size: int, store: Store, master: Span, rounded: Span | None, gradient: Gradient,
                 names: Names):
        self.unit = unit
        self.store = store
        self.moments: dict[str, Span] = {}
        self._size, self._names = size, names
        self.master = master
        self.weights = rounded
        """The resting weights where they are not the master; None where they are."""
        self._gradient = gradient
        self._held: list[range] = []
        self._expected: dict[range, list[Span]] = {}

    @property
    def rounded(self) -> Span | None:
        """The resting weights in the compute dtype, which the step writes; None where it writes none."""
        return None if self.follows_publication else self.weights

    @property
    def follows_publication(self) -> bool:
        """Whether the weights follow the master by compressed publications alone: the step leaves them as they are."""
        return self.weights is not None and self._gradient.transport.compresses_weights

    @property
    def granule(self) -> int | None:
        """Elements that are brought at once; None where everything is always there."""
        spans = [self.master, self._gradient.rest, *([] if self.rounded is None else [self.rounded])]
        if self.store.granule is None and all(isinstance(span, ResidentSpan) for span in spans):
            return None
        return self.store.granule or CHUNK

    def moment(self, kind: str, dtype: torch.dtype) -> Tensor:
        """Return the moments called `kind` of the whole unit, made as zeros if there are none."""
        if kind not in self.moments:
            span = self.store.place(self._size, dtype, f"'{kind}' of unit '{self.unit}'", names=self._names)
            for part in self._held:
                span.fetch(part.start, part.stop).wait()
            self.moments[kind] = span
        return self.moments[kind].tensor

    def expect(self, part: range) -> None:
        """Prefetch the moments of `part`: its step is near."""
        self._expected[part] = list(self.moments.values())
        for span in self._expected[part]:
            span.fetch(part.start, part.stop)

    def expect_no_more(self, part: range) -> None:
        """End the prefetch of `part`: the step has fetched it, or does not come."""
        for span in self._expected.pop(part):
            span.commit(part.start, part.stop, changed=False)

    def fetch(self, part: range, use: Use = WHOLE_STEP) -> Transfer:
        """Fetch the state for the step of `part`, or for one pass of it."""
        self._held.append(part)
        arriving = [span.fetch(part.start, part.stop) for span in (self.master, *self.moments.values())]
        if self.rounded is not None and use.weights:
            arriving.append(self.rounded.fetch(part.start, part.stop, fresh=True))
        return JoinedTransfers([*arriving, *([self._gradient.fetch(part)] if use.gradient else [])])

    def commit(self, part: range, use: Use = WHOLE_STEP) -> Transfer:
        """Commit the state of `part`; `use` is the access that it was fetched for."""
        self._held.remove(part)
        leaving = [self.master.commit(part.start, part.stop, changed=use.weights)]
        leaving += [span.commit(part.start, part.stop, changed=use.moments) for span in self.moments.values()]
        if self.rounded is not None and use.weights:
            leaving.append(self.rounded.commit(part.start, part.stop))
        return JoinedTransfers([*leaving, *([self._gradient.commit(part)] if use.gradient else [])])
