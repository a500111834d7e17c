"""Flat memory: storage that can be given up and taken back in place, and a pool of what collectives borrow.

Parameters are views of their unit's buffer. Giving up its storage and taking it back leaves every view, and every tensor
that autograd saved, as it is: they only have no memory meanwhile.
"""

from __future__ import annotations

import torch
from torch import Tensor


def free(tensor: Tensor) -> None:
    """Give up the memory of `tensor` and of all its views; they keep their shapes."""
    tensor.untyped_storage().resize_(0)


def allocate(tensor: Tensor) -> None:
    """Take memory again for `tensor` and all its views; the contents are undefined."""
    tensor.untyped_storage().resize_(tensor.numel() * tensor.element_size())


class Pool:
    """Lends flat tensors of any dtype, and keeps what comes back: the memory is that of the most lent at once."""

    def __init__(self, device: torch.device):
        self.device = device
        self._free: list[Tensor] = []
        self._lent: dict[int, Tensor] = {}

    def borrow(self, elements: int, dtype: torch.dtype) -> Tensor:
        """Return an undefined 1-D tensor of `elements` of `dtype`."""
        size = max(1, elements * dtype.itemsize)
        fitting = [block for block in self._free if block.numel() >= size]
        if fitting:
            block = min(fitting, key=lambda block: block.numel())
            self._free = [other for other in self._free if other is not block]
        else:
            if self._free:  # replace the largest block instead of keeping one that never fits
                largest = max(self._free, key=lambda block: block.numel())
                self._free = [other for other in self._free if other is not largest]
            block = torch.empty(size, dtype=torch.uint8, device=self.device)
        tensor = block[:elements * dtype.itemsize].view(dtype)
        self._lent[id(tensor)] = block
        return tensor

    def give_back(self, tensor: Tensor) -> None:
        """Take back a tensor that this pool lent."""
        self._free.append(self._lent.pop(id(tensor)))

    @property
    def bytes(self) -> int:
        """Bytes that the pool holds, lent or not."""
        return sum(block.numel() for block in [*self._free, *self._lent.values()])
