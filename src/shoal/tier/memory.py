"""Flat zeros: on the host in memory of their own pages, so that they cost nothing before they are written."""

from __future__ import annotations

import ctypes
import mmap

import torch
from torch import Tensor

from shoal.tier.pages import Pages

__all__ = ["PAGED_FROM", "pageable", "trim", "users", "zeros"]

PAGED_FROM = 1 << 20
"""Bytes from which host memory has pages of its own: below, the heap serves better."""


def zeros(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a 1-D tensor of zeros; on the host, in large pages where the system has them."""
    if pageable(size, dtype, device):
        return Pages(size, dtype).tensor
    return torch.zeros(size, dtype=dtype, device=device)


def pageable(size: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether so much memory of `device` has pages of its own."""
    return device.type == "cpu" and size * dtype.itemsize >= PAGED_FROM and hasattr(mmap, "MADV_HUGEPAGE")  # Linux


def users(tensor: Tensor) -> int:
    """Return how many tensors share the memory of `tensor`, arrays of numpy included; whichever number that begins at."""
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)  # pyright: ignore[reportPrivateUsage]


def trim() -> None:
    """Give what was freed back to the system: glibc keeps freed tensors of up to 32 MiB in its heap, with holes between."""
    if (malloc_trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:  # other C libraries have none
        malloc_trim(0)
