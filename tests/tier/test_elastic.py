"""A retained buffer stays in memory until it shrinks without `retain`."""

from __future__ import annotations

import pytest
import torch

from shoal.tier import Disk, Memory, ResidentSpan, Store, elastic
from shoal.tier.pages import PAGE, PAGED_FROM
from shoal.tier.swap import Swap

from .test_disk_span import resident

CPU = torch.device("cpu")
SIZES = {"resized": PAGE, "paged": PAGED_FROM, "disk": PAGED_FROM}
"""Elements of four bytes."""


@pytest.mark.parametrize("kind", SIZES)
def test_a_retained_buffer_is_released_by_a_later_shrink(kind: str, swap: Swap) -> None:
    size = SIZES[kind]
    store: Store = Disk(swap=swap) if kind == "disk" else Memory(device=CPU)
    part = range(size // 2, size)
    buffer = elastic(size, torch.float32, part, CPU, store, "a buffer")

    def resident_bytes() -> int:
        """Return the bytes of the buffer that are in memory."""
        allocated = buffer.full.untyped_storage().nbytes()  # its pages belong to the heap
        return allocated if kind == "resized" else sum(resident(ResidentSpan(buffer.full))) * PAGE

    buffer.full.fill_(1)
    buffer.save_shard()
    for _ in range(2):  # retaining twice in a row is retaining once
        buffer.shrink(retain=True)
        assert (buffer.full == 1).all()
        buffer.grow().wait()
    buffer.full[part.start:part.stop] = 2
    buffer.save_shard()
    buffer.shrink(retain=True)
    assert (buffer.full[:part.start] == 1).all() and (buffer.full[part.start:] == 2).all()
    assert resident_bytes() >= size * 4
    buffer.grow().wait()
    buffer.shrink()
    if kind == "disk":  # the write must end first
        buffer.shard.fetch().wait()
        buffer.shard.commit().wait()
    assert resident_bytes() == (size * 2 if kind == "paged" else 0), "the shard is half of the buffer"
