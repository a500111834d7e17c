"""Stores allocate spans for state at rest: in device memory, in host memory, or in a swap file on disk.

    Memory       device or host memory: spans are always resident
    Disk         a swap file: spans are read into host memory for use
    open_store   from settings to a store: `none` is the compute device, `cpu` its host, `nvme` a swap file
    StoragePlan  the stores of each unit's weights and optimizer state
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol
from weakref import WeakValueDictionary

import torch

from shoal.device import HOST, can_pin
from shoal.errors import TierError
from shoal.log import warn_once
from shoal.tier.disk_span import CHUNK, DiskSpan
from shoal.tier.folder_check import check_folder, slow_reason
from shoal.tier.pages import pinned_zeros, zeros
from shoal.tier.settings import AioSettings, OffloadOptimizer, OffloadParam
from shoal.tier.span import Names, PlacedSpan, ResidentSpan, no_names
from shoal.tier.streams import StagingBuffers
from shoal.tier.swap import Swap
from shoal.tier.trace import Lanes, Trace

__all__ = ["PAGE_POOL", "WRITE_AHEAD", "Disk", "Memory", "StoragePlan", "Store", "Tiers", "open_store"]

WRITE_AHEAD = 64 << 20
"""Bytes that may wait to be written to a disk. Large enough to keep the disk busy."""

PAGE_POOL = 64 << 20
"""Bytes of memory kept for the next fetch: no more than training has just used, and will use again."""

ALIGNED = 64
"""Disk granules are multiples of this many elements: whole SIMD vectors, as the slices stepped in memory are."""

class Store(Protocol):
    """A place for state at rest."""

    @property
    def device(self) -> torch.device:
        """The device of a span's tensor while it is used."""
        ...

    @property
    def granule(self) -> int | None:
        """Elements that are fetched at once; None if spans are always resident."""
        ...

    def place(self, size: int, dtype: torch.dtype, name: str, *, part: range | None = None,
              names: Names = no_names) -> PlacedSpan:
        """Allocate a span of `size` zeros, of which `part` (default: all) is stored; errors contain `name` and `names`."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """The memory of a device; host memory is page-locked for copies to the device `pinned`, if there is one."""

    device: torch.device
    pinned: torch.device | None = None
    rank: int | None = None
    """The rank that errors name, where there is one."""
    granule: None = None

    def place(self, size: int, dtype: torch.dtype, name: str, *, part: range | None = None,
              names: Names = no_names) -> PlacedSpan:
        if self.device != HOST:
            return ResidentSpan(zeros(size, dtype, self.device))
        try:
            return ResidentSpan(zeros(size, dtype, HOST) if self.pinned is None else pinned_zeros(size, dtype, self.pinned))
        except (MemoryError, OSError, RuntimeError) as error:  # of Python, of mmap, and of torch
            kind = "host memory" if self.pinned is None else "page-locked host memory"
            raise TierError(f"{'' if self.rank is None else f'rank {self.rank}: '}{name}: needed "
                            f"{size * dtype.itemsize:,} bytes of {kind}: {error or type(error).__name__}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Disk:
    """A swap file."""

    swap: Swap
    granule: int = CHUNK

    @property
    def device(self) -> torch.device:
        return HOST

    def place(self, size: int, dtype: torch.dtype, name: str, *, part: range | None = None,
              names: Names = no_names) -> PlacedSpan:
        return DiskSpan(self.swap, size, dtype, name, part=part, chunk=self.granule, names=names)


_open: WeakValueDictionary[tuple[Path, int, int, int], Swap] = WeakValueDictionary()
"""Swap files by folder, rank, bytes of a request, and concurrent requests; stores with the same four share one."""


def open_store(offload: OffloadParam | OffloadOptimizer, aio: AioSettings, device: torch.device, *, rank: int,
               at_once: int = CHUNK) -> Store:
    """Return the store that `offload` selects, for a model that computes on `device`.

    Disks fetch `at_once` elements at once, at most `CHUNK`, rounded down to a multiple of `ALIGNED`. Raises `TierError` for
    a folder that does not exist or is not writable; warns of one that is not on a fast local disk.
    """
    match offload.device:
        case "none":
            return Memory(device=device)
        case "cpu":
            return Memory(device=HOST, pinned=device if offload.pin_memory and can_pin(device) else None, rank=rank)
        case "nvme":
            assert offload.nvme_path is not None
            granule = max(min(at_once, CHUNK) // ALIGNED, 1) * ALIGNED
            return Disk(swap=_swap(Path(offload.nvme_path), aio, rank), granule=granule)


def _swap(folder: Path, aio: AioSettings, rank: int) -> Swap:
    check_folder(folder)
    requests = 2 * aio.queue_depth * aio.intra_op_parallelism  # for reads and for writes
    key = (folder.resolve(), rank, aio.block_size, requests)
    if (existing := _open.get(key)) is not None and not existing.closed:
        return existing
    if (reason := slow_reason(folder)) is not None:
        warn_once(f"nvme_path: {folder} {reason}; training waits for it. Give a folder of a fast local disk")
    swap = _open[key] = Swap(folder, rank=rank, block_bytes=aio.block_size, write_ahead=WRITE_AHEAD, page_pool=PAGE_POOL,
                             requests=requests)
    return swap


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiers:
    """The stores of one unit: of its weights, and of its masters, moments and reduced gradient."""

    weight: Store
    state: Store
    staging: StagingBuffers
    """Of all units of the engine, whose steps take turns."""


@dataclass(slots=True, kw_only=True)
class StoragePlan:
    """The stores of weights and of optimizer state, assigned to the units in order."""

    device: torch.device
    """The compute device."""
    weight: Store
    state: Store
    ratio: float = 1.0
    """The fraction of the elements whose optimizer state rests in `state`; the rest stays on the compute device."""
    host_elements: int = 0
    """Elements of weights that stay in host memory although `weight` is a disk."""
    lanes: Lanes = field(default_factory=Lanes)
    _staging: StagingBuffers = field(init=False)
    _assigned: int = field(default=0, init=False)
    _offloaded: int = field(default=0, init=False)
    _on_host: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self._staging = StagingBuffers(self.device)

    def tiers(self, weights: int, states: int) -> Tiers:
        """Return the stores of the next unit, which has `weights` elements of weights and `states` of optimizer state."""
        weight, state = self.weight, self.state
        if weight.granule is not None and self._on_host + weights <= self.host_elements:
            self._on_host += weights
            weight = Memory(device=HOST, pinned=self.device if can_pin(self.device) else None)
        self._assigned += states
        if self._offloaded + states <= self.ratio * self._assigned:
            self._offloaded += states
        else:
            state = Memory(device=self.device)
        return Tiers(weight=weight, state=state, staging=self._staging)

    @property
    def swaps(self) -> list[Swap]:
        """The swap files of both stores."""
        return list({id(store.swap): store.swap for store in (self.weight, self.state) if isinstance(store, Disk)}.values())

    @contextmanager
    def trace(self) -> Generator[Trace]:
        """Record compute, waits and disk requests within the context."""
        trace = Trace()
        recorders = [self.lanes, *self.swaps]
        for recorder in recorders:
            recorder.record_to(trace)
        try:
            yield trace
        finally:
            for recorder in recorders:
                recorder.record_to(None)

    def close(self) -> None:
        """Remove the swap files that hold no span any more."""
        for swap in self.swaps:
            if swap.disk_bytes == 0:
                swap.close()
