"""From settings to stores: `none` is the compute device, `cpu` its host, `nvme` a swap file for all users of a folder.

Users that read and write in other requests have files of their own.
"""

from __future__ import annotations

from pathlib import Path
from weakref import WeakValueDictionary

import torch

from shoal.log import warn_once
from shoal.tier.disk_span import CHUNK
from shoal.tier.folder_check import check_folder, slow_reason
from shoal.tier.settings import AioSettings, OffloadOptimizer, OffloadParam
from shoal.tier.store import Disk, Memory, Store
from shoal.tier.swap import Swap

__all__ = ["SPARE", "WRITE_AHEAD", "open_store"]

WRITE_AHEAD = 64 << 20
"""Bytes that may be on their way to the disk at once: many times what keeps it busy."""

SPARE = 64 << 20
"""Bytes of memory that may wait for their next use: no more than what training has just had in use, and will again."""

ALIGNED = 64
"""Elements of which a piece is a multiple: whole vectors, as what is stepped in memory is."""

HOST = torch.device("cpu")

_open: WeakValueDictionary[tuple[Path, int, int, int], Swap] = WeakValueDictionary()
"""Files by folder, rank, bytes of a request, and requests under way: who asks for the same shares one."""


def open_store(asked: OffloadParam | OffloadOptimizer, aio: AioSettings, device: torch.device, *, rank: int,
               at_once: int = CHUNK) -> Store:
    """Return the store that `asked` names, for a model that computes on `device`; disks bring `at_once` elements at a time,
    rounded down to a multiple of `ALIGNED`.

    Raises `TierError` for a folder that is not there or cannot be written; warns of one that is no fast local disk.
    """
    match asked.device:
        case "none":
            return Memory(device=device)
        case "cpu":
            return Memory(device=HOST, pinned=asked.pin_memory and device.type != "cpu")
        case "nvme":
            assert asked.nvme_path is not None
            granule = max(min(at_once, CHUNK) // ALIGNED, 1) * ALIGNED
            return Disk(swap=_swap(Path(asked.nvme_path), aio, rank), granule=granule)


def _swap(folder: Path, aio: AioSettings, rank: int) -> Swap:
    check_folder(folder)
    requests = 2 * aio.queue_depth * aio.intra_op_parallelism  # reading and writing each
    key = (folder.resolve(), rank, aio.block_size, requests)
    if (found := _open.get(key)) is not None and not found.closed:
        return found
    if (reason := slow_reason(folder)) is not None:
        warn_once(f"nvme_path: {folder} {reason}; training waits for it. Give a folder of a fast local disk")
    swap = _open[key] = Swap(folder, rank=rank, block_bytes=aio.block_size, write_ahead=WRITE_AHEAD, spare=SPARE,
                             requests=requests)
    return swap
