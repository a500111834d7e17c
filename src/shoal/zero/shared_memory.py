"""Refuses parameters that share memory with another tensor of the model without being one object.

Plain PyTorch steps such a parameter under both names, each with its own optimizer state. A unit copies its parameters into
one buffer, after which the names would no longer share memory. Views of disjoint parts of one storage, as in recurrent
layers, are fine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor, nn

from shoal.errors import UsageError
from shoal.zero.ownership import owner_of

__all__ = ["refuse_shared_memory"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Extent:
    """The bytes [start, stop) of a storage between the first and the last element of a tensor."""

    name: str
    tensor: Tensor
    start: int
    stop: int

    @property
    def is_dense(self) -> bool:
        return self.stop - self.start == self.tensor.numel() * self.tensor.element_size()


def refuse_shared_memory(model: nn.Module, is_trained: Callable[[Tensor], bool]) -> None:
    """Raise `UsageError` where a trained parameter of `model` shares elements with another parameter or a buffer."""
    of_storage: dict[tuple[torch.device, int], list[_Extent]] = {}
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        if owner_of(tensor) is not None or tensor.layout is not torch.strided or tensor.is_meta or not tensor.numel():
            continue  # of zero.Init: a part of its unit's buffer
        if tensor.untyped_storage().nbytes():
            of_storage.setdefault((tensor.device, tensor.untyped_storage().data_ptr()), []).append(_extent(name, tensor))
    for extents in of_storage.values():
        for first, second in _overlapping(extents):
            if is_trained(first.tensor) or is_trained(second.tensor):
                raise UsageError(f"initialize: '{first.name}' {tuple(first.tensor.shape)} and '{second.name}' "
                                 f"{tuple(second.tensor.shape)} share memory and are two tensors, which a step would change "
                                 f"apart. Tie them as one object (b.weight = a.weight), or compute one from the other in "
                                 f"the forward (functional.linear(x, a.weight.t())), or clone one of them")


def _extent(name: str, tensor: Tensor) -> _Extent:
    start = int(tensor.storage_offset())
    last = start + sum((int(size) - 1) * int(stride) for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    width = tensor.element_size()
    return _Extent(name=name, tensor=tensor, start=start * width, stop=(last + 1) * width)


def _overlapping(extents: list[_Extent]) -> Iterator[tuple[_Extent, _Extent]]:
    """Yield pairs that have an element in common."""
    ordered = sorted(extents, key=lambda extent: extent.start)
    for index, first in enumerate(ordered):
        for second in ordered[index + 1:]:
            if second.start >= first.stop:
                break
            if (first.is_dense and second.is_dense) or _share_elements(first, second):
                yield first, second


def _share_elements(first: _Extent, second: _Extent) -> bool:
    """Whether two tensors of gaps, such as columns of one matrix, have a byte in common."""
    start = min(first.start, second.start)
    marks = torch.zeros(max(first.stop, second.stop) - start, dtype=torch.uint8, device="cpu")
    _bytes_of(first, marks, start).fill_(1)
    return bool(_bytes_of(second, marks, start).any())


def _bytes_of(extent: _Extent, marks: Tensor, start: int) -> Tensor:
    """Return the view of `marks` whose elements are the bytes of a tensor; expanded dims, of stride 0, count once."""
    width = extent.tensor.element_size()
    dims = [dim for dim in zip(extent.tensor.shape, extent.tensor.stride(), strict=True) if dim[1]]
    return marks.as_strided([*(size for size, _ in dims), width], [*(width * stride for _, stride in dims), 1],
                            extent.start - start)
