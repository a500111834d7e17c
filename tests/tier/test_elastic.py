"""A buffer that somebody still has stays in memory as it is, until it shrinks again."""

from __future__ import annotations

import pytest
import torch

from shoal.tier import Disk, Memory, ResidentSpan, Store, elastic
from shoal.tier.pages import PAGE, PAGED_FROM
from shoal.tier.swap import Swap

from .test_disk_span import resident

CPU = torch.device("cpu")
SIZES = {"resized": PAGE, "paged": PAGED_FROM, "beneath": PAGED_FROM}
"""Elements, of four bytes."""


@pytest.mark.parametrize("kind", SIZES)
def test_what_is_lent_stays_and_is_given_back_later(kind: str, swap: Swap) -> None:
    size = SIZES[kind]
    store: Store = Disk(swap=swap) if kind == "beneath" else Memory(device=CPU)
    part = range(size // 2, size)
    buffer = elastic(size, torch.float32, part, CPU, store, "a buffer")

    def there() -> int:
        """Return how many bytes of the buffer are in memory."""
        kept = buffer.full.untyped_storage().nbytes()  # where it is emptied, its pages are the heap's
        return kept if kind == "resized" else sum(resident(ResidentSpan(buffer.full))) * PAGE

    buffer.full.fill_(1)
    buffer.save_shard()
    for _ in range(2):  # lent twice in a row is lent once
        buffer.shrink(retain=True)
        assert (buffer.full == 1).all()
        buffer.grow().wait()
    buffer.full[part.start:part.stop] = 2
    buffer.save_shard()
    buffer.shrink(retain=True)
    assert (buffer.full[:part.start] == 1).all() and (buffer.full[part.start:] == 2).all()
    assert there() >= size * 4
    buffer.grow().wait()
    buffer.shrink()
    if kind == "beneath":  # and is written first
        buffer.shard.fetch().wait()
        buffer.shard.commit().wait()
    assert there() == (size * 2 if kind == "paged" else 0), "half of it rests there"
