"""Pages are zeros that are dropped and moved; the pool reuses released pages up to its limit."""

from __future__ import annotations

import mmap
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from shoal.errors import UsageError
from shoal.tier.disk_span import DiskSpan
from shoal.tier.pages import HUGE, PAGE, PagePool, Pages, pinned_zeros
from shoal.tier.swap import Swap

from .test_disk_span import CHUNK, filled, numbers, resident

LIMIT = 8 * PAGE


@pytest.fixture
def swap(tmp_path: Path) -> Iterator[Swap]:
    """A swap file whose pool keeps up to 8 pages."""
    created = Swap(tmp_path, block_bytes=8192, requests=4, page_pool=LIMIT)
    yield created
    created.close()


class Runtime:
    """What CUDA's runtime would be told of host memory."""

    def __init__(self, code: int = 0):
        self.code = code
        self.locked: dict[int, int] = {}

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        if not self.code:
            self.locked[address] = size
        return self.code

    def cudaHostUnregister(self, address: int) -> None:
        with open("/proc/self/maps") as maps:  # a page that is locked must still be mapped when it is unlocked
            bounds = [tuple(int(bound, 16) for bound in line.split()[0].split("-")) for line in maps]
        assert any(start <= address < stop for start, stop in bounds)
        del self.locked[address]


def runtime(monkeypatch: pytest.MonkeyPatch, code: int = 0) -> Runtime:
    fake = Runtime(code)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: fake)
    monkeypatch.setattr("shoal.tier.pages.registers_pages", lambda device: True)
    return fake


def test_pinned_memory_is_locked_byte_for_byte_while_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = runtime(monkeypatch)
    size = (5 << 20) + 3
    memory = pinned_zeros(size, torch.uint8, torch.device("cuda"))
    assert fake.locked == {memory.data_ptr(): size + -size % PAGE}
    part = memory[PAGE:]
    del memory
    assert fake.locked and not part.any()
    del part
    assert not fake.locked


def test_locked_memory_is_left_out_of_forked_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime(monkeypatch)
    memory = pinned_zeros(4 * HUGE, torch.uint8, torch.device("cuda"))
    flags = ""
    with open("/proc/self/smaps") as maps:
        for line in maps:
            if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
                start, stop = (int(bound, 16) for bound in line.split()[0].split("-"))
            elif line.startswith("VmFlags:") and start <= memory.data_ptr() < stop:
                flags = line
    assert " dc " in flags, flags


def test_memory_that_cannot_be_locked_is_an_error_with_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime(monkeypatch, code=2)
    with pytest.raises(UsageError, match=r"pin_memory: the system refuses to page-lock 4,194,304 .*error 2.*ulimit -l"):
        pinned_zeros(1 << 20, torch.float32, torch.device("cuda"))


def ones(pages: Pages) -> Pages:
    """Return `pages`, filled with ones."""
    pages.tensor.fill_(1)
    return pages


def released(swap: Swap, count: int) -> list[DiskSpan]:
    """Return spans of 4 pages that were in memory together, and released in order."""
    spans = [DiskSpan(swap, 4 * CHUNK, torch.float32, "w", chunk=CHUNK) for _ in range(count)]
    for span in spans:
        span.fetch(fresh=True).wait()
        span.tensor.copy_(numbers(span))
    for span in spans:
        span.commit().wait()
    return spans


def test_released_pages_move_to_the_next_fetch(swap: Swap) -> None:
    one, two = released(swap, 2)
    assert all(resident(one)) and all(resident(two)) and swap.page_pool.bytes == LIMIT
    three = DiskSpan(swap, 4 * CHUNK, torch.float32, "w", chunk=CHUNK)
    three.fetch(fresh=True).wait()
    assert all(resident(three)) and not any(resident(one)), "the oldest pages moved before any write"
    assert swap.page_pool.bytes == 4 * PAGE
    three.commit(changed=False)
    one.fetch().wait()
    assert torch.equal(one.tensor, numbers(one))
    one.commit(changed=False)


def test_pooled_pages_of_a_span_are_reused_in_place(swap: Swap) -> None:
    one, two = released(swap, 2)
    two.fetch().wait()
    assert all(resident(one)), "its own pages were in the pool"
    two.commit(changed=False)


def test_the_pool_drops_the_oldest_pages_beyond_its_limit(swap: Swap) -> None:
    spans = released(swap, 5)
    assert swap.page_pool.bytes == LIMIT
    assert [any(resident(span)) for span in spans] == [False, False, False, True, True], "the oldest were dropped"


def test_a_range_larger_than_the_limit_is_dropped() -> None:
    pool, pages = PagePool(PAGE), ones(Pages(2 * PAGE, torch.uint8))
    pool.give(pages, 0, 2 * PAGE)
    assert pool.bytes == 0 and not pages.tensor.any()


def test_a_discarded_span_reads_zeros_from_pooled_pages(swap: Swap) -> None:
    span = filled(swap)
    span.discard()
    span.fetch().wait()
    assert not span.tensor.any()
    span.commit(changed=False)


def test_a_closed_span_leaves_no_pages_in_the_pool(swap: Swap) -> None:
    filled(swap).close()
    assert swap.page_pool.bytes == 0


def test_pages_move_with_their_contents_and_leave_zeros() -> None:
    source, target = ones(Pages(2 * HUGE, torch.uint8)), Pages(4 * HUGE, torch.uint8)
    assert source.move(HUGE, HUGE, target, 2 * HUGE)
    assert source.tensor[:HUGE].all() and not source.tensor[HUGE:].any()
    assert target.tensor[2 * HUGE:3 * HUGE].all() and target.tensor.sum() == HUGE


def test_moves_do_not_increase_the_number_of_mappings() -> None:
    pages = Pages(64 * HUGE, torch.uint8)
    pages.tensor[:HUGE].fill_(1)
    before = mappings()
    for index in range(63):
        assert pages.move(index * HUGE, HUGE, pages, (index + 1) * HUGE)
    assert pages.tensor[63 * HUGE:].all() and mappings() - before < 8


def test_a_system_that_cannot_move_pages_provides_new_ones(swap: Swap, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(pages: Pages, start: int, size: int, other: Pages, at: int) -> bool:
        return False

    monkeypatch.setattr(Pages, "move", refuse)
    for span in [*released(swap, 2), filled(swap)]:
        span.fetch().wait()
        assert torch.equal(span.tensor, numbers(span))
        span.commit(changed=False)


def mappings() -> int:
    """Return the number of memory mappings of this process."""
    return len(Path("/proc/self/maps").read_text().splitlines())


@pytest.mark.parametrize("size", [0, 1, PAGE, HUGE - PAGE, HUGE, 3 * HUGE + 5])
def test_dropped_pages_read_as_zeros(size: int) -> None:
    pages = Pages(size, torch.uint8)
    assert pages.tensor.shape == (size,) and pages.address % PAGE == 0
    pages.tensor.fill_(1)
    pages.drop(0, pages.bytes)
    assert int(pages.tensor.sum()) == 0


def test_only_whole_pages_within_are_dropped() -> None:
    pages = Pages(4 * PAGE, torch.uint8)
    pages.tensor.fill_(1)
    pages.drop(1, 3 * PAGE - 1)
    assert pages.tensor.view(4, PAGE).sum(1).tolist() == [PAGE, 0, PAGE, PAGE]
    pages.drop(3 * PAGE + 1, 4 * PAGE)
    assert int(pages.tensor[-1]) == 1


def test_a_huge_page_begins_at_the_aligned_byte() -> None:
    pages = Pages(3 * HUGE, torch.uint8, aligned=5 * PAGE)
    assert (pages.address + 5 * PAGE) % HUGE == 0 and pages.tensor.data_ptr() == pages.address


def test_no_huge_page_extends_beyond_the_end() -> None:
    pages = Pages(HUGE + PAGE, torch.uint8)
    before = _resident_bytes()
    pages.tensor.fill_(1)
    assert _resident_bytes() - before < HUGE + 64 * PAGE
    pages.drop(0, pages.bytes)


def test_a_view_shares_the_memory() -> None:
    pages = Pages(HUGE, torch.uint8, aligned=PAGE)
    pages.view(10, 13)[:] = b"abc"
    assert bytes(pages.tensor[9:14].tolist()) == b"\0abc\0"


def test_unwritten_pages_take_no_memory() -> None:
    size = 64 * HUGE
    before = _resident_bytes()
    pages = Pages(size, torch.uint8)
    assert pages.bytes == size and _resident_bytes() - before < HUGE


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE
