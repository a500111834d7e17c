"""A disk span holds the values committed last, transfers no unnecessary byte, and keeps no unused page."""

from __future__ import annotations

import ctypes
import mmap
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shoal.tier.disk_span import DiskSpan
from shoal.tier.pages import PAGE
from shoal.tier.span import DONE, PlacedSpan, ResidentSpan, Span
from shoal.tier.swap import Swap
from shoal.tier.transfer import Job

from .conftest import Gate

CHUNK = PAGE // 4  # elements of fp32: a chunk is one page


def filled(swap: Swap, chunks: int = 4) -> DiskSpan:
    """Return a span of `chunks` pages that holds 1, 2, 3, ... and is committed to disk."""
    span = DiskSpan(swap, chunks * CHUNK, torch.float32, "w", chunk=CHUNK)
    span.fetch(fresh=True).wait()
    span.tensor.copy_(numbers(span))
    span.commit().wait()
    return span


def numbers(span: Span) -> Tensor:
    return torch.arange(1.0, span.tensor.numel() + 1)


def resident(span: Span) -> list[bool]:
    """Return for each page whether it is in memory (mincore)."""
    size = -(-span.tensor.nbytes // PAGE) * PAGE
    pages = (ctypes.c_ubyte * (size // PAGE))()
    library = ctypes.CDLL(None, use_errno=True)
    assert library.mincore(ctypes.c_void_p(span.tensor.data_ptr()), ctypes.c_size_t(size), pages) == 0
    return [bool(page & 1) for page in pages]


# Contents


@dataclass(frozen=True, slots=True)
class Hold:
    """Fetched elements [start, stop), and whether they were changed since."""

    start: int
    stop: int
    changed: bool


@given(st.data())
@settings(max_examples=60)
def test_any_sequence_of_calls_gives_the_contents_of_a_plain_tensor(data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 6 * CHUNK), "size")
    ends = st.integers(0, size)
    part = range(*sorted((data.draw(ends), data.draw(ends))))
    with tempfile.TemporaryDirectory() as folder:
        pool = data.draw(st.sampled_from((0, 2 * PAGE, 100 * PAGE)), "page pool")
        swap = Swap(folder, block_bytes=data.draw(st.sampled_from((4096, 8192))), requests=3, write_ahead=2 * PAGE,
                    page_pool=pool)
        span, plain, held = DiskSpan(swap, size, torch.float32, "w", part=part, chunk=CHUNK), torch.zeros(size), list[Hold]()
        for step in range(1, data.draw(st.integers(1, 16), "steps")):
            match data.draw(st.sampled_from(("fetch", "fetch", "change", "commit", "discard"))):
                case "fetch":
                    held.append(fetched(data, span, plain, held, value=step))
                case "change" if held:
                    hold = held.pop()
                    plain[hold.start:hold.stop] += step
                    span.tensor[hold.start:hold.stop] += step
                    held.append(replace(hold, changed=True))
                case "commit" if held:
                    hold = held.pop(data.draw(st.integers(0, len(held) - 1)))
                    span.commit(hold.start, hold.stop, changed=hold.changed)
                case "discard" if not held:
                    span.discard()
                    plain.zero_()
                case _:
                    pass
        for hold in held:
            span.commit(hold.start, hold.stop, changed=hold.changed)
        span.fetch().wait()
        assert torch.equal(span.tensor[part.start:part.stop], plain[part.start:part.stop])
        span.commit(changed=False).wait()  # pages are released when their write has ended
        assert pool or not any(resident(span)[part.start // CHUNK + 1:part.stop // CHUNK - 1])
        span.close()
        assert swap.disk_bytes == 0
        swap.close()
        assert list(Path(folder).iterdir()) == []


def fetched(data: st.DataObject, span: DiskSpan, plain: Tensor, held: list[Hold], *, value: float) -> Hold:
    """Fetch some elements, fresh or not; unless fresh, their values must be those of `plain`."""
    inside = st.integers(span.part.start, span.part.stop)
    start, stop = sorted((data.draw(inside), data.draw(inside)))
    fresh = data.draw(st.booleans()) and not any(hold.start < stop and start < hold.stop for hold in held)
    span.fetch(start, stop, fresh=fresh).wait()
    if fresh:
        plain[start:stop] = span.tensor[start:stop] = value
    assert torch.equal(span.tensor[start:stop], plain[start:stop])
    return Hold(start, stop, fresh)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.uint8])
@pytest.mark.parametrize("size", [0, 1, CHUNK - 1, CHUNK + 1, 100_003])
def test_any_size_and_dtype_is_restored(swap: Swap, size: int, dtype: torch.dtype) -> None:
    span = DiskSpan(swap, size, dtype, "w", chunk=1000)
    span.fetch(fresh=True).wait()
    span.tensor.copy_(torch.arange(size) % 251)
    span.commit().wait()
    assert not any(resident(span))
    span.fetch().wait()
    assert torch.equal(span.tensor, (torch.arange(size) % 251).to(dtype))
    span.commit(changed=False)


def test_a_new_span_is_zeros_without_a_read(swap: Swap) -> None:
    span = DiskSpan(swap, 10 * CHUNK, torch.float32, "w", chunk=CHUNK)
    assert span.fetch() is DONE
    assert torch.equal(span.tensor, torch.zeros(10 * CHUNK))
    assert span.commit(changed=False) is DONE
    assert swap.read_bytes == swap.written_bytes == 0


def test_the_tensor_keeps_its_address(swap: Swap) -> None:
    span = DiskSpan(swap, 3 * CHUNK, torch.float32, "w", chunk=CHUNK)
    before = span.tensor.data_ptr()
    span.fetch().wait()
    span.commit().wait()
    assert span.tensor.data_ptr() == before and before % mmap.PAGESIZE == 0


# Transfers


def test_only_the_chunks_of_the_range_are_transferred(swap: Swap) -> None:
    span = filled(swap)
    before = swap.written_bytes
    span.fetch(CHUNK + 5, CHUNK + 6).wait()
    span.tensor[CHUNK + 5] = -1
    span.commit(CHUNK + 5, CHUNK + 6).wait()
    assert (swap.read_bytes, swap.written_bytes - before) == (PAGE, PAGE)


def test_an_unchanged_span_is_not_written(swap: Swap) -> None:
    span = filled(swap)
    before = swap.written_bytes
    span.fetch().wait()
    assert span.commit(changed=False) is DONE
    assert swap.written_bytes == before
    assert not any(resident(span))


def test_a_fresh_fetch_reads_only_partly_overwritten_chunks(swap: Swap) -> None:
    span = filled(swap)
    span.fetch(CHUNK // 2, 3 * CHUNK, fresh=True).wait()
    assert swap.read_bytes == PAGE, "the first chunk keeps its first half"
    assert torch.equal(span.tensor[:CHUNK], numbers(span)[:CHUNK])
    span.commit(CHUNK // 2, 3 * CHUNK, changed=False)


def test_a_fresh_fetch_of_a_part_within_a_page_reads_nothing(swap: Swap) -> None:
    part = range(7, 2 * CHUNK + 9)
    span = DiskSpan(swap, 3 * CHUNK, torch.float32, "w", part=part, chunk=CHUNK)
    for _ in range(2):
        span.fetch(fresh=True).wait()
        span.commit().wait()
    assert swap.read_bytes == 0


def test_nested_fetches_read_once_and_stay_until_the_last_commit(swap: Swap) -> None:
    span = filled(swap)
    transfers = [span.fetch(), span.fetch(), span.fetch(0, 1)]
    for transfer in transfers:
        transfer.wait()
    assert swap.read_bytes == 4 * PAGE
    assert span.commit() is span.commit(0, 1) is DONE
    assert all(resident(span))
    before = swap.written_bytes
    span.commit(changed=False).wait()
    assert swap.written_bytes - before == 4 * PAGE, "an earlier commit was changed"
    assert not any(resident(span))


def test_a_fetch_during_a_write_keeps_the_pages_without_a_read(swap: Swap, writes: Gate) -> None:
    span = DiskSpan(swap, CHUNK, torch.float32, "w", chunk=CHUNK)
    span.fetch(fresh=True).wait()
    span.tensor.fill_(3)
    writes.open.clear()
    leaving = span.commit()
    assert not leaving.done
    assert span.fetch() is DONE
    assert torch.equal(span.tensor, torch.full((CHUNK,), 3.0))
    writes.open.set()
    leaving.wait()
    assert leaving.done and all(resident(span)) and swap.read_bytes == 0
    span.commit(changed=False)
    assert not any(resident(span))


def test_an_unchanged_commit_during_a_write_waits_for_that_write(swap: Swap, writes: Gate) -> None:
    span = DiskSpan(swap, CHUNK, torch.float32, "w", chunk=CHUNK)
    span.fetch(fresh=True).wait()
    writes.open.clear()
    span.commit()
    span.fetch().wait()
    leaving = span.commit(changed=False)
    assert not leaving.done
    writes.open.set()
    leaving.wait()
    assert swap.written_bytes == PAGE and not any(resident(span))


def test_a_commit_before_the_read_ended_releases_afterwards(swap: Swap, reads: Gate) -> None:
    span = filled(swap)
    reads.open.clear()
    arriving = span.fetch()
    assert span.commit(changed=False) is DONE
    reads.open.set()
    arriving.wait()
    assert not any(resident(span))
    span.fetch().wait()
    assert torch.equal(span.tensor, numbers(span))
    span.commit(changed=False)


def test_the_write_ahead_limit_blocks_further_commits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    swap = Swap(tmp_path, write_ahead=2 * PAGE)
    gate = Gate(monkeypatch, "pwritev")
    span = DiskSpan(swap, 5 * CHUNK, torch.float32, "w", chunk=CHUNK)
    span.fetch(fresh=True).wait()
    queued: list[int] = []
    prepare = swap.prepare

    def prepared(job: Job) -> tuple[Callable[[], object], Callable[[], object]]:
        queued.append(swap.writing_bytes + job.bytes)
        return prepare(job)

    monkeypatch.setattr(swap, "prepare", prepared)
    span.commit().wait()
    assert gate.calls == 5 and max(queued) <= 2 * PAGE
    swap.close()


def test_a_chunk_larger_than_the_limit_is_written_alone(tmp_path: Path) -> None:
    swap = Swap(tmp_path, write_ahead=1)
    filled(swap).close()
    swap.close()


# Discard, parts, close


def test_discarded_contents_are_zeros_without_transfers(swap: Swap, writes: Gate) -> None:
    span = filled(swap)
    span.fetch().wait()
    span.commit()
    span.discard()
    assert not any(resident(span))
    assert span.fetch() is DONE
    assert torch.equal(span.tensor, torch.zeros_like(span.tensor))
    assert swap.read_bytes == 4 * PAGE, "by the fetch before"
    span.commit(changed=False)


def test_pages_outside_the_part_are_never_transferred(swap: Swap) -> None:
    part = range(CHUNK + 1, 3 * CHUNK - 1)
    span = DiskSpan(swap, 4 * CHUNK, torch.float32, "w", part=part, chunk=CHUNK)
    assert swap.disk_bytes == 2 * PAGE
    span.fetch().wait()
    span.tensor.fill_(2)
    span.drop_outside()
    assert resident(span) == [False, True, True, False]
    span.commit().wait()
    assert swap.written_bytes == 2 * PAGE and not any(resident(span))
    assert torch.equal(span.tensor[:CHUNK], torch.zeros(CHUNK))


def test_a_closed_span_frees_its_extent_for_the_next(swap: Swap) -> None:
    first = filled(swap)
    second = filled(swap, chunks=2)
    assert swap.disk_bytes == 6 * PAGE
    first.close()
    first.close()
    assert swap.disk_bytes == 2 * PAGE
    third = filled(swap)
    assert swap.disk_bytes == 6 * PAGE == swap.path.stat().st_size
    for span in (second, third):
        span.fetch().wait()
        assert torch.equal(span.tensor, numbers(span))
        span.commit(changed=False)


def test_a_commit_without_a_fetch_is_an_assertion_error(swap: Swap) -> None:
    span = filled(swap)
    with pytest.raises(AssertionError, match="w: committed without having been fetched"):
        span.commit()


def test_discarding_a_fetched_span_is_an_assertion_error(swap: Swap) -> None:
    span = filled(swap)
    span.fetch().wait()
    with pytest.raises(AssertionError, match="w: discarded while it is fetched"):
        span.discard()


def test_a_resident_span_is_always_in_memory() -> None:
    span: PlacedSpan = ResidentSpan(torch.ones(3))
    assert span.fetch() is span.commit() is DONE
    DONE.wait()
    span.discard()
    span.close()
    assert DONE.done and torch.equal(span.tensor, torch.ones(3))
