"""Sums of the ranks' addends: in rank order and in fp32 or wider, so that the bits do not depend on the transport."""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.recording.call import Handle


class _NoTransfer:
    def wait(self) -> None:
        pass


DONE: Handle = _NoTransfer()
"""The finished collective of a group of one rank."""


class Reduction:
    """A transfer of addends; `wait` sums them in rank order, in fp32 or wider."""

    def __init__(self, transfer: Handle, addends: list[Tensor], target: Tensor, scale: float, accumulate: bool,
                 chunk_bytes: int):
        self._transfer: Handle | None = transfer
        self._addends = addends
        self._target = target
        self._scale = scale
        self._accumulate = accumulate
        self._chunk_bytes = chunk_bytes

    @torch.no_grad()
    def wait(self) -> None:
        if self._transfer is None:
            return
        self._transfer.wait()  # if it fails, every later wait fails too
        self._transfer = None
        # On the host a chunk, its addends and its sum stay in the cache between operations; a device runs one kernel each.
        size = self._chunk_bytes // 4 if self._target.is_cpu else self._addends[0].nbytes
        columns = zip(*(chunks(addend, size) for addend in self._addends), strict=True)
        for addends, target in zip(columns, chunks(self._target, size, like=self._addends[0]), strict=True):
            sum_addends(addends, target, self._scale, self._accumulate)
        self._addends = []


def promoted_dtype(one: torch.dtype, other: torch.dtype) -> torch.dtype:
    """Return the dtype that holds the values of both, as `torch.promote_types`, which knows no float8."""
    if one == other or 1 not in (one.itemsize, other.itemsize):
        return torch.promote_types(one, other)
    return torch.float32 if one.itemsize == other.itemsize else max(one, other, key=lambda dtype: dtype.itemsize)


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return fp32, or `dtype` where that is wider."""
    return promoted_dtype(dtype, torch.float32)


def sum_addends(addends: tuple[Tensor, ...], target: Tensor, scale: float, accumulate: bool) -> None:
    """Compute target = scale * sum(addends) [+ target], in order, in fp32 or wider."""
    wide = wide_dtype(addends[0].dtype)
    if wide.itemsize > addends[0].itemsize == 1:  # torch adds no float8 to another dtype
        addends = tuple(addend.to(wide) for addend in addends)
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


def chunks(tensor: Tensor, size: int, *, like: Tensor | None = None) -> tuple[Tensor, ...]:
    """Split a 1-D tensor into chunks of at most `size` bytes (counted in the dtype of `like`, if given)."""
    return tensor.split(max(1, size // (tensor if like is None else like).element_size()))
