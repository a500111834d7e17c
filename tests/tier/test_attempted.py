"""An attempt writes to a second place, and the first holds what was there until it is accepted or undone."""

from __future__ import annotations

import pytest
import torch

from shoal.errors import TierError
from shoal.tier.disk_span import DiskSpan
from shoal.tier.pages import PAGE
from shoal.tier.swap import Swap

from .conftest import Gate
from .test_disk_span import CHUNK, filled, numbers


def test_an_attempt_is_undone_to_what_only_memory_held(swap: Swap, writes: Gate) -> None:
    span = filled(swap)
    for changed in (True, False):
        span.fetch(0, CHUNK)
        span.fetch(0, CHUNK).wait()
        if changed:
            span.tensor[:CHUNK] = -1
            span.commit(0, CHUNK)  # somebody has it in use yet: it is not written
    writes.open.clear()
    span.double()
    span.attempt()
    arriving = span.fetch(0, CHUNK)
    assert not arriving.done, "to change it now would change what is being written"
    writes.open.set()
    arriving.wait()
    span.tensor[:CHUNK] = -2
    for _ in range(4):
        span.commit(0, CHUNK)
    span.undo()
    span.fetch().wait()
    assert torch.equal(span.tensor, torch.cat([torch.full((CHUNK,), -1.0), numbers(span)[CHUNK:]]))
    span.commit(changed=False)


def test_an_attempt_writes_what_it_changed_to_one_second_place(swap: Swap) -> None:
    span = filled(swap)
    for number in range(1, 4):
        before = swap.written_bytes
        span.double()
        span.attempt()
        span.fetch(0, CHUNK).wait()
        span.tensor[:CHUNK] += 1
        span.commit(0, CHUNK).wait()
        assert (swap.written_bytes - before, swap.disk_bytes) == (PAGE, 8 * PAGE)
        span.accept() if number == 2 else span.undo()
    span.fetch().wait()
    assert torch.equal(span.tensor, torch.cat([numbers(span)[:CHUNK] + 1, numbers(span)[CHUNK:]]))
    span.commit(changed=False)
    span.close()
    assert swap.disk_bytes == 0


def test_second_places_go_to_whoever_has_none(swap: Swap, monkeypatch: pytest.MonkeyPatch) -> None:
    span, other = filled(swap), DiskSpan(swap, 4 * CHUNK, torch.float32, "another", chunk=CHUNK)
    span.double()
    other.double()
    size, held = swap.path.stat().st_size, swap.disk_bytes
    span.attempt()
    span.fetch(0, CHUNK).wait()
    span.tensor[:CHUNK] += 1
    span.commit(0, CHUNK).wait()
    span.accept()

    def full(bytes: int, name: str) -> None:
        raise TierError("the disk is full")

    monkeypatch.setattr(swap, "_reserve", full)
    third = DiskSpan(swap, 3 * CHUNK, torch.float32, "a third", chunk=CHUNK)  # where second places of `span` were
    assert (swap.path.stat().st_size, swap.disk_bytes) == (size, held - PAGE)
    with pytest.raises(TierError, match="the disk is full"):
        DiskSpan(swap, 4 * CHUNK, torch.float32, "a fourth", chunk=CHUNK)  # an attempt of `other` is about to begin
    other.single()
    swap.reclaim()
    assert swap.path.stat().st_size < size
    span.fetch().wait()
    assert torch.equal(span.tensor, torch.cat([numbers(span)[:CHUNK] + 1, numbers(span)[CHUNK:]]))
    span.commit(changed=False)
    for each in (span, other, third):
        each.close()
    assert swap.disk_bytes == 0
