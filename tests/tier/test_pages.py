"""Memory that nobody uses serves the next use, holds nothing that a span relies on, and stays below its limit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from shoal.tier.disk_span import DiskSpan
from shoal.tier.pages import HUGE, PAGE, PagePool, Pages
from shoal.tier.swap import Swap

from .test_disk_span import CHUNK, filled, numbers, resident

LIMIT = 8 * PAGE


@pytest.fixture
def swap(tmp_path: Path) -> Iterator[Swap]:
    """A swap file that keeps up to 8 pages."""
    made = Swap(tmp_path, block_bytes=8192, requests=4, page_pool=LIMIT)
    yield made
    made.close()


def ones(pages: Pages) -> Pages:
    """Return `pages`, filled."""
    pages.tensor.fill_(1)
    return pages


def left(swap: Swap, count: int) -> list[DiskSpan]:
    """Return spans of 4 pages that were in memory together, and left it one after the other."""
    spans = [DiskSpan(swap, 4 * CHUNK, torch.float32, "w", chunk=CHUNK) for _ in range(count)]
    for span in spans:
        span.fetch(fresh=True).wait()
        span.tensor.copy_(numbers(span))
    for span in spans:
        span.commit().wait()
    return spans


def test_memory_of_what_left_serves_what_comes(swap: Swap) -> None:
    one, two = left(swap, 2)
    assert all(resident(one)) and all(resident(two)) and swap.page_pool.bytes == LIMIT
    three = DiskSpan(swap, 4 * CHUNK, torch.float32, "w", chunk=CHUNK)
    three.fetch(fresh=True).wait()
    assert all(resident(three)) and not any(resident(one)), "the oldest pages moved, and nothing was written yet"
    assert swap.page_pool.bytes == 4 * PAGE
    three.commit(changed=False)
    one.fetch().wait()
    assert torch.equal(one.tensor, numbers(one))
    one.commit(changed=False)


def test_pages_that_stayed_are_used_again_where_they_are(swap: Swap) -> None:
    one, two = left(swap, 2)
    two.fetch().wait()
    assert all(resident(one)), "its own were there"
    two.commit(changed=False)


def test_no_more_is_kept_than_may_be(swap: Swap) -> None:
    spans = left(swap, 5)
    assert swap.page_pool.bytes == LIMIT
    assert [any(resident(span)) for span in spans] == [False, False, False, True, True], "the oldest went"


def test_memory_larger_than_all_that_may_be_kept_goes_back() -> None:
    pool, pages = PagePool(PAGE), ones(Pages(2 * PAGE, torch.uint8))
    pool.give(pages, 0, 2 * PAGE)
    assert pool.bytes == 0 and not pages.tensor.any()


def test_a_new_use_of_kept_memory_begins_with_zeros(swap: Swap) -> None:
    span = filled(swap)
    span.discard()
    span.fetch().wait()
    assert not span.tensor.any()
    span.commit(changed=False)


def test_a_closed_span_keeps_nothing(swap: Swap) -> None:
    filled(swap).close()
    assert swap.page_pool.bytes == 0


def test_pages_move_with_what_is_in_them_and_leave_zeros() -> None:
    source, target = ones(Pages(2 * HUGE, torch.uint8)), Pages(4 * HUGE, torch.uint8)
    assert source.move(HUGE, HUGE, target, 2 * HUGE)
    assert source.tensor[:HUGE].all() and not source.tensor[HUGE:].any()
    assert target.tensor[2 * HUGE:3 * HUGE].all() and target.tensor.sum() == HUGE


def test_a_process_does_not_fall_into_ever_more_parts() -> None:
    pages = Pages(64 * HUGE, torch.uint8)
    pages.tensor[:HUGE].fill_(1)
    before = parts()
    for place in range(63):
        assert pages.move(place * HUGE, HUGE, pages, (place + 1) * HUGE)
    assert pages.tensor[63 * HUGE:].all() and parts() - before < 8


def test_a_system_that_cannot_move_pages_gives_new_ones(swap: Swap, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(pages: Pages, start: int, size: int, other: Pages, at: int) -> bool:
        return False

    monkeypatch.setattr(Pages, "move", refuse)
    for span in [*left(swap, 2), filled(swap)]:
        span.fetch().wait()
        assert torch.equal(span.tensor, numbers(span))
        span.commit(changed=False)


def parts() -> int:
    """Return how many parts the memory of this process has."""
    return len(Path("/proc/self/maps").read_text().splitlines())
