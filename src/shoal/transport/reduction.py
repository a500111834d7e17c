"""The sum of what the ranks sent: in rank order and in fp32 or wider, so that it has the same bits however it came."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from shoal.recording.call import Handle


class _NoTransfer:
    def wait(self) -> None:
        pass


DONE: Handle = _NoTransfer()
"""The collective of a rank that is alone."""


class Reduction:
    """A transfer of addends whose end is their sum, in rank order, in fp32 or wider."""

    def __init__(self, transfer: Handle, addends: list[Tensor], target: Tensor, scale: float, accumulate: bool,
                 piece_bytes: int):
        self._transfer: Handle | None = transfer
        self._addends = addends
        self._target = target
        self._scale = scale
        self._accumulate = accumulate
        self._piece_bytes = piece_bytes

    @torch.no_grad()
    def wait(self) -> None:
        if self._transfer is None:
            return
        self._transfer.wait()  # if it fails, every later wait fails with it
        self._transfer = None
        # On the host a piece, its addends and its sum stay in the cache between the operations; elsewhere each is a kernel.
        size = self._piece_bytes // 4 if self._target.is_cpu else self._addends[0].nbytes
        columns = zip(*(pieces(addend, size) for addend in self._addends), strict=True)
        for addends, target in zip(columns, pieces(self._target, size, like=self._addends[0]), strict=True):
            add_up(addends, target, self._scale, self._accumulate)
        self._addends = []


class Widened:
    """A transfer into a buffer of a narrower dtype, whose end is the copy of all of it."""

    def __init__(self, transfer: Handle, narrow: Tensor, whole: Tensor, give_back: Callable[[Tensor], None]):
        self._transfer: Handle | None = transfer
        self._narrow, self._whole = narrow, whole
        self._give_back = give_back

    @torch.no_grad()
    def wait(self) -> None:
        if self._transfer is not None:
            self._transfer.wait()
            self._transfer = None
            self._whole.copy_(self._narrow)
            self._give_back(self._narrow)


def add_up(addends: tuple[Tensor, ...], target: Tensor, scale: float, accumulate: bool) -> None:
    """target = scale * sum(addends) [+ target], summed in order, in fp32 or wider."""
    wide = torch.promote_types(addends[0].dtype, torch.float32)
    first, *rest = addends
    direct = target.dtype == wide and not accumulate and all(a.data_ptr() != target.data_ptr() for a in addends[2:])
    if not rest:
        if accumulate:
            target.add_(first, alpha=scale)
        elif scale != 1:
            torch.mul(first, scale, out=target)
        elif first.data_ptr() != target.data_ptr():
            target.copy_(first)
        return
    total = target if direct else torch.empty(target.shape, dtype=wide, device=target.device)
    if first.dtype == wide:
        torch.add(first, rest[0], out=total)
    else:
        torch.add(first.to(wide), rest[0], out=total)
    for addend in rest[1:]:
        total.add_(addend)
    if accumulate:
        target.add_(total, alpha=scale)
        return
    if scale != 1:
        total.mul_(scale)
    if not direct:
        target.copy_(total)


def pieces(tensor: Tensor, size: int, *, like: Tensor | None = None) -> tuple[Tensor, ...]:
    """Cut a 1-D tensor into pieces of at most `size` bytes (of the dtype of `like`)."""
    return tensor.split(max(1, size // (tensor if like is None else like).element_size()))
