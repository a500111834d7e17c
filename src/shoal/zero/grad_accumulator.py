"""One rank's addend of one unit's gradient, collected slot by slot from autograd.

Collected gradients are copied into the *open* buffer, one addend of the whole unit, until a reduction closes it. Where the
gradient rests PARTIAL the open buffer is the resting one; otherwise it is borrowed from the pool and given back.

    GradAccumulator        dense gradients
    RowsAccumulator        sparse gradients of an embedding stay apart, as rows
    ResidualAccumulator    after a compressed reduction the resting buffer keeps the compression error
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from shoal.device import follow, stream_of_thread
from shoal.sparse.row_exchange import RowExchange, to_dense
from shoal.tier import FetchOnce, zeros
from shoal.transport.reduction import wide_dtype
from shoal.zero.layout import Layout

__all__ = ["GradAccumulator", "Pool", "ResidualAccumulator", "RowsAccumulator"]


class Pool:
    """Lends flat tensors of any dtype and keeps returned ones, so its memory is that of the most tensors lent at once.

    On an accelerator a tensor is returned while its last work is still queued. A borrower in another stream waits for that.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self._free: list[Tensor] = []
        self._streams: dict[int, torch.Stream | None] = {}  # by address of the block: the stream of its last user
        self._borrowed: dict[int, Tensor] = {}

    def borrow(self, elements: int, dtype: torch.dtype, *, small: bool = False) -> Tensor:
        """Return an undefined 1-D tensor of `elements` of `dtype`; a `small` one takes no block of twice its size or more,
        which a larger tensor would miss."""
        size = max(1, elements * dtype.itemsize)
        fitting = [block for block in self._free if size <= block.numel() and (not small or block.numel() < 2 * size)]
        # Where none fits, the largest is replaced, instead of keeping one that never will
        largest = None if small else max(self._free, key=Tensor.numel, default=None)
        block = min(fitting, key=Tensor.numel) if fitting else largest
        self._free = [other for other in self._free if other is not block]
        former = None if block is None else self._streams.pop(block.data_ptr())
        if block is None or not fitting:
            block = zeros(size, torch.uint8, self.device)
        elif former != stream_of_thread(self.device):
            follow(former, block)
        tensor = block[:elements * dtype.itemsize].view(dtype)
        self._borrowed[id(tensor)] = block
        return tensor

    def give_back(self, tensor: Tensor) -> None:
        """Take back a tensor that this pool lent."""
        block = self._borrowed.pop(id(tensor))
        self._streams[block.data_ptr()] = stream_of_thread(self.device)
        self._free.append(block)

    @property
    def bytes(self) -> int:
        """Bytes that the pool holds, lent or not."""
        return sum(block.numel() for block in [*self._free, *self._borrowed.values()])


class GradAccumulator:
    """One rank's addend of one unit's gradient, times `factor`, in `dtype`.

    Where the gradient rests PARTIAL, `resting` (size,) is the buffer that passes add to, and `place` fetches it from its
    tier before it is written. Elsewhere `resting` is None: each pass borrows a buffer. With `resident` the buffer never
    leaves memory, so that its gaps between slots stay zero.
    """

    def __init__(self, layout: Layout, dtype: torch.dtype, pool: Pool, *, factor: float, resting: Tensor | None,
                 place: FetchOnce, resident: bool):
        self.resting = resting
        self.complete = False
        """Whether every slot received its gradient in the present backward pass."""
        self.slots_with_grad = 0
        self._taken = 0  # slots whose gradient a script has set to None
        """Bit i: slot i received a gradient on this rank since the last step."""
        self._layout, self._dtype, self._pool = layout, dtype, pool
        self._factor = factor
        self._place = place
        self._resident = resident
        self._slots = len(layout.slots)
        self._resting_views = [] if resting is None else layout.views(resting)
        self._open: Tensor | None = None
        self._views: list[Tensor] = []
        self._filled = 0  # bit i: the view of slot i in the open buffer holds a value
        self._seen = 0  # bit i: slot i received a gradient in this backward pass, since the last completion
        self._measured = False
        self._norms: Tensor | None = None

    @property
    def missing(self) -> list[int]:
        """The slots that the present backward pass may still give a gradient: none once it has completed the unit."""
        return [] if self.complete else [slot for slot in range(self._slots) if not self._seen >> slot & 1]

    @property
    def reopened(self) -> bool:
        """Whether gradients arrived since the last reduction closed the buffer."""
        return self._open is not None

    @property
    def has_dense(self) -> bool:
        """Whether the open buffer holds a value."""
        return bool(self._filled)

    @property
    def residual(self) -> Tensor | None:
        """The compression error of the whole unit, an addend of the mean; None where there is none."""
        return None

    @property
    def open_addend(self) -> Tensor | None:
        """The open buffer (size,), None if it holds nothing; slots without a gradient are undefined there."""
        return self._open if self._filled else None

    @property
    def norms(self) -> Tensor | None:
        """The sum of the norms of the addends that reductions have closed since the last step, by which two runs of one
        step are compared; None where there was none, or `track_addend_norms` was not called.
        """
        return self._norms

    def track_addend_norms(self) -> None:
        """Compute `norms` from now on."""
        self._measured = True

    def has_slot(self, slot: int) -> bool:
        """Whether this rank has a gradient of `slot`."""
        return bool(self.slots_with_grad >> slot & 1)

    def set_slot(self, slot: int, *, present: bool) -> None:
        """Note that a script has written the gradient of `slot`, or, if not `present`, taken it away."""
        bit = 1 << slot
        self.slots_with_grad = self.slots_with_grad | bit if present else self.slots_with_grad & ~bit
        self._taken = self._taken & ~bit if present else self._taken | bit
        if self._filled:
            self._filled |= bit

    def count_zeros(self, slots: Iterable[int]) -> None:
        """Count `slots` as ones with a gradient; those that have got none hold zeros once the unit is reduced.

        A gradient that a script has taken away is still in the buffer, and is not counted.
        """
        for slot in slots:
            self.slots_with_grad |= 1 << slot & ~self._taken

    def begin(self) -> None:
        """Start a backward pass."""
        self._seen, self.complete = 0, False

    def collect(self, slot: int, gradient: Tensor) -> bool:
        """Add the gradient of one slot (its shape, any dtype); return whether every slot of the unit now has one.

        A pass may complete a unit more than once: re-entrant recompute runs a backward of its own for each call.
        """
        self._add(slot, gradient)
        bit = 1 << slot
        self.slots_with_grad |= bit
        self._seen |= bit
        if self._seen.bit_count() < self._slots:
            return False
        self.conclude()
        return True

    def _add(self, slot: int, gradient: Tensor) -> None:
        gradient = to_dense(gradient, self._layout.slots[slot].name, compressed=False) if gradient.is_sparse else gradient
        bit, view = 1 << slot, self._opened()[slot]
        if self._filled & bit:
            view.add_(gradient, alpha=self._factor)
        elif self._factor == 1:
            view.copy_(gradient)
        elif gradient.dtype == view.dtype:
            torch.mul(gradient, self._factor, out=view)
        else:
            view.copy_(gradient).mul_(self._factor)
        self._filled |= bit

    def conclude(self) -> None:
        """Count the slots without a gradient as done: the present backward pass gives them none."""
        self._seen, self.complete = 0, True

    def close(self) -> Tensor:
        """Return the open buffer, with zeros where no gradient was collected."""
        source = self._open
        if source is None:
            source = self._pool.borrow(self._layout.size, self._dtype)
            source.zero_()
        elif self._filled.bit_count() < self._slots:
            for slot, view in enumerate(self._views):
                if not self._filled >> slot & 1:
                    view.zero_()
        if source is not self.resting or not self._resident:
            self._layout.clear_gaps(source)
        if self._measured:
            norm = torch.linalg.vector_norm(source, dtype=wide_dtype(source.dtype))
            self._norms = norm if self._norms is None else self._norms + norm
        self._open, self._views, self._filled = None, [], 0
        return source

    def give_back(self, source: Tensor) -> None:
        """Give back the buffer that `close` returned, unless it rests."""
        if source is not self.resting:
            self._pool.give_back(source)

    def mark_reduced(self) -> None:
        """Note that a reduction has taken all of it."""
        self._open, self._views = None, []

    def carry_over(self) -> None:
        """Keep what was collected for a later step; only a `ResidualAccumulator` can."""
        raise AssertionError("this gradient has no residual buffer")

    def rescale_residual(self, factor: float) -> None:
        """Multiply the residual by `factor`: the loss scale has changed."""

    def load_residual(self, residual: Tensor | None) -> None:
        """Replace the residual (size,). A residual that this transport cannot keep is dropped."""

    def reset(self, *, summed: bool) -> bool:
        """Forget what was collected, after a sum was made or not; return whether a residual stays."""
        if self._open is not None:
            self.give_back(self._open)
        self._open, self._views = self.resting, self._resting_views
        self.slots_with_grad = self._filled = self._taken = 0
        self._norms = None
        self.begin()
        return False

    def _opened(self) -> list[Tensor]:
        if self._open is not None and self._open is self.resting:
            self._place.fetch(fresh=not self._filled)
        if self._open is None:
            self._open = self._pool.borrow(self._layout.size, self._dtype)
            self._views = self._layout.views(self._open)
        return self._views


class RowsAccumulator(GradAccumulator):
    """The accumulator of an embedding: COO gradients are collected as rows, dense ones as usual."""

    def __init__(self, layout: Layout, dtype: torch.dtype, pool: Pool, *, factor: float, resting: Tensor | None,
                 place: FetchOnce, resident: bool, rows: RowExchange):
        super().__init__(layout, dtype, pool, factor=factor, resting=resting, place=place, resident=resident)
        self._rows = rows

    @property
    def reopened(self) -> bool:
        return super().reopened or self._rows.collected

    def _add(self, slot: int, gradient: Tensor) -> None:
        if gradient.is_sparse:
            self._rows.collect(gradient, self._factor)
        else:
            super()._add(slot, gradient)

    def close(self) -> Tensor:
        if self._rows.collected:
            self._rows.move_to(self._opened()[0], accumulate=self.has_dense)
            self._filled = 1
        return super().close()

    def reset(self, *, summed: bool) -> bool:
        self._rows.clear()
        return super().reset(summed=summed)


class ResidualAccumulator(GradAccumulator):
    """The accumulator of a compressed gradient: the compression error is the first addend of the next sum."""

    def __init__(self, layout: Layout, dtype: torch.dtype, pool: Pool, *, factor: float, resting: Tensor | None,
                 place: FetchOnce, resident: bool):
        super().__init__(layout, dtype, pool, factor=factor, resting=resting, place=place, resident=resident)
        self._has_residual = False
        self._residual_slots = 0
        self._collected = False  # a gradient was collected since the last step

    @property
    def residual(self) -> Tensor | None:
        return self.resting if self._has_residual and not self._collected else None

    def _add(self, slot: int, gradient: Tensor) -> None:
        self._collected = True
        gradient = to_dense(gradient, self._layout.slots[slot].name, compressed=True) if gradient.is_sparse else gradient
        super()._add(slot, gradient)

    def mark_reduced(self) -> None:
        super().mark_reduced()
        self._has_residual = False

    def to_compress(self, source: Tensor) -> Tensor:
        """Return the resting buffer with the closed `source` added; after the reduction it holds the compression error."""
        assert self.resting is not None
        if source is not self.resting:
            self.resting.add_(source)
            self._pool.give_back(source)
        self._residual_slots |= self.slots_with_grad
        self._has_residual = True
        return self.resting

    def carry_over(self) -> None:
        """Keep everything that was collected as the residual: a later step sends it."""
        self.close()
        self._has_residual, self._collected, self._residual_slots = True, False, self.slots_with_grad

    def rescale_residual(self, factor: float) -> None:
        if self._has_residual and factor != 1:
            assert self.resting is not None
            self.resting.mul_(factor)

    def load_residual(self, residual: Tensor | None) -> None:
        self._has_residual = residual is not None and self.resting is not None
        if residual is not None and self.resting is not None:
            self.resting.copy_(residual)
            self._residual_slots = sum(int(bool(view.any())) << slot for slot, view in enumerate(self._resting_views))

    def reset(self, *, summed: bool) -> bool:
        stays = self._has_residual and (summed or not self._collected)  # a gradient that is dropped takes its residual along
        super().reset(summed=summed)
        self._has_residual = stays
        if not stays:
            self._residual_slots = 0
        self.slots_with_grad = self._residual_slots
        self._filled = (1 << self._slots) - 1 if stays else 0
        self._collected = False
        return stays
