"""What this rank has collected of one unit's gradient: an addend of the sum over the ranks, slot by slot.

Collected gradients are copied into the *open* buffer, one addend of the whole unit, until a reduction closes it. Where the
gradient rests PARTIAL the open buffer is the resting one, else it is borrowed and given back.

Where gradients may travel as signs (compressed.py), what was not sent stays in the resting buffer as this rank's first
addend of the next step.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.sparse.row_exchange import RowExchange, to_dense
from shoal.tier import FetchOnce
from shoal.zero.buffer import Pool
from shoal.zero.layout import Layout


class GradAccumulator:
    """One rank's addend of one unit's gradient, times `factor`, in `dtype`.

    It rests in `resting` (size,), which is in use at its `place`, or nowhere. The memory of a
    gradient that is `kept` always belongs to it: what nobody writes stays zero there.
    """

    complete = False
    """Every slot received its gradient in the present backward pass."""
    _owed = False  # the resting buffer holds what signs did not say, of the slots
    _carried = 0
    _collected = False  # a gradient has come since the last step

    def __init__(self, layout: Layout, dtype: torch.dtype, pool: Pool, *, factor: float, rows: RowExchange | None,
                 signed: bool, resting: Tensor | None, place: FetchOnce, kept: bool):
        self.resting = resting
        self.touched = 0
        """Bit i: slot i received a gradient on this rank since the last step."""
        self._layout, self._dtype, self._pool = layout, dtype, pool
        self._factor = factor
        self._rows = rows
        self._signed = signed
        self._place = place
        self._kept = kept
        self._slots = len(layout.slots)
        self._resting_views = [] if resting is None else layout.views(resting)
        self._open: Tensor | None = None
        self._views: list[Tensor] = []
        self._filled = 0  # the slots whose view of the open buffer holds a value
        self._seen = 0  # those of the present backward pass, since it last was complete

    @property
    def missing(self) -> list[int]:
        """The slots that the present backward pass has given nothing, since it last completed the gradient."""
        return [slot for slot in range(self._slots) if not self._seen >> slot & 1]

    @property
    def is_open(self) -> bool:
        """Whether a buffer is open: after a reduction, whether anything came since."""
        return self._open is not None

    @property
    def dense(self) -> bool:
        """Whether the open buffer holds anything."""
        return bool(self._filled)

    def begin(self) -> None:
        """Start a backward pass."""
        self._seen, self.complete = 0, False

    def collect(self, slot: int, gradient: Tensor) -> bool:
        """Add the gradient of one slot (its shape, any dtype) to the open buffer; return whether it was the last one.

        A pass may complete a gradient more than once: re-entrant recompute runs a backward of its own for each call.
        """
        bit = 1 << slot
        self._collected = True
        if gradient.is_sparse and self._rows:
            self._rows.collect(gradient, self._factor)
        else:
            gradient = to_dense(gradient, self._layout.slots[slot].name, compressed=self._signed)
            view = self._opened()[slot]
            if self._filled & bit:
                view.add_(gradient, alpha=self._factor)
            elif self._factor == 1:
                view.copy_(gradient)
            elif gradient.dtype == view.dtype:
                torch.mul(gradient, self._factor, out=view)
            else:
                view.copy_(gradient).mul_(self._factor)
            self._filled |= bit
        self.touched |= bit
        self._seen |= bit
        if self._seen.bit_count() < self._slots:
            return False
        self.conclude()
        return True

    def conclude(self) -> None:
        """Take the slots that the present backward pass gave nothing so far to receive nothing from it."""
        self._seen, self.complete = 0, True

    def spill(self) -> None:
        """Add the rows that were collected alone to the open buffer."""
        if self._rows and self._rows.collected:
            self._rows.move_to(self._opened()[0], accumulate=self.dense)
            self._filled = 1

    def close(self) -> Tensor:
        """Return the open buffer, with zeros where nothing was collected."""
        source = self._open
        if source is None:
            source = self._pool.borrow(self._layout.size, self._dtype)
            source.zero_()
        elif self._filled.bit_count() < self._slots:
            for slot, view in enumerate(self._views):
                if not self._filled >> slot & 1:
                    view.zero_()
        if source is not self.resting or not self._kept:
            self._layout.clear_gaps(source)
        self._open, self._views, self._filled = None, [], 0
        return source

    def give_back(self, source: Tensor) -> None:
        """Give back the buffer that `close` returned, unless it rests."""
        if source is not self.resting:
            self._pool.give_back(source)

    def sent(self) -> None:
        """Take note that the sum holds all of it, and nothing is open any more."""
        self._open, self._views, self._owed = None, [], False

    def send_signs(self, source: Tensor) -> Tensor:
        """Return the resting buffer with `source` added, unless it is that; it keeps what signs do not say of it."""
        assert self.resting is not None
        if source is not self.resting:
            self.resting.add_(source)
            self._pool.give_back(source)
        self._carried |= self.touched
        self._owed = True
        return self.resting

    def keep(self) -> None:
        """Let all that was collected be what was not sent: a later step sends it."""
        self.close()
        self._owed, self._collected, self._carried = True, False, self.touched

    def rescale(self, factor: float) -> None:
        """Multiply what was not sent by `factor`: the loss scale has changed."""
        if self._owed and factor != 1:
            assert self.resting is not None
            self.resting.mul_(factor)

    @property
    def residual(self) -> Tensor | None:
        """What this rank has not sent yet of the whole unit, an addend of the mean; None if everything was, or if it cannot
        be told from gradients that came since.
        """
        return self.resting if self._owed and not self._collected else None

    def owe(self, residual: Tensor | None) -> None:
        """Take over `residual` (size,) as what is still to be sent, in place of what was."""
        self._owed = residual is not None and self.resting is not None
        if residual is not None and self.resting is not None:
            self.resting.copy_(residual)
            self._carried = sum(int(bool(view.any())) << slot for slot, view in enumerate(self._resting_views))

    def reset(self, *, summed: bool) -> bool:
        """Forget what was collected, but for what was not sent of it, if a sum was made; return whether there is any."""
        if self._open is not None:
            self.give_back(self._open)
        self._open, self._views = self.resting, self._resting_views
        if self._rows:
            self._rows.clear()
        self._owed = self._owed and (summed or not self._collected)  # of a gradient that is dropped, all goes
        if not self._owed:
            self._carried = 0
        self.touched = self._carried
        self._filled = (1 << self._slots) - 1 if self._owed else 0
        self._collected = False
        self.begin()
        return self._owed

    def _opened(self) -> list[Tensor]:
        if self._open is not None and self._open is self.resting:
            self._place.fetch(fresh=not self._filled)
        if self._open is None:
            self._open = self._pool.borrow(self._layout.size, self._dtype)
            self._views = self._layout.views(self._open)
        return self._views
