"""A pool of the flat memory that collectives borrow."""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.tier import zeros


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
        # Where none fits, the largest is replaced, instead of keeping one that never will
        block = min(fitting, key=Tensor.numel) if fitting else max(self._free, key=Tensor.numel, default=None)
        self._free = [other for other in self._free if other is not block]
        if block is None or not fitting:
            block = zeros(size, torch.uint8, self.device)
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
