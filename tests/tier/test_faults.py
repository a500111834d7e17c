"""`wait` raises disk failures with rank, span, parameters, file, offset, reason and fix."""

from __future__ import annotations

import errno
import os
import re
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

from shoal.errors import TierError
from shoal.tier import fetched
from shoal.tier.disk_span import DiskSpan
from shoal.tier.pages import PAGE
from shoal.tier.swap import Swap

from .conftest import Gate
from .test_disk_span import CHUNK, filled, numbers, resident


@pytest.fixture(scope="module")
def small_disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A file system of 64 KiB."""
    folder = tmp_path_factory.mktemp("small")
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "shoal-test", folder], capture_output=True,
                             check=False)
    if mounted.returncode:
        pytest.skip("only root may mount a small disk")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_a_truncated_file_is_reported(swap: Swap) -> None:
    span = filled(swap)
    os.truncate(swap.path, 2 * PAGE + 1000)
    with pytest.raises(TierError, match=re.escape(
            f"rank 0: w could not be read from {swap.path} at byte 8,192: unexpected end of file: it was truncated.")):
        span.fetch().wait()


def test_a_changed_byte_is_reported(swap: Swap) -> None:
    span = filled(swap)
    with swap.path.open("r+b") as file:
        file.seek(3 * PAGE + 17)
        file.write(b"!")
    arriving = span.fetch(3 * CHUNK)
    for _ in range(2):
        with pytest.raises(TierError, match=r"w could not be read from .* at byte 12,288: checksum mismatch in 4,096 "
                                            r"bytes: the file was changed on disk\..*; check the disk"):
            arriving.wait()
    assert arriving.done
    span.fetch(0, 3 * CHUNK).wait()
    assert torch.equal(span.tensor[:3 * CHUNK], numbers(span)[:3 * CHUNK]), "the other blocks are intact"


def test_errors_name_the_parameters_of_the_block(swap: Swap) -> None:
    part = range(CHUNK // 2, 4 * CHUNK)
    span = DiskSpan(swap, 4 * CHUNK, torch.float32, "w", part=part, chunk=CHUNK,
                   names=lambda elements: [f"{number}" for number in range(elements.start // 300, -(-elements.stop // 300))])
    span.fetch(fresh=True).wait()
    span.commit().wait()
    with swap.path.open("r+b") as file:
        file.write(b"!" * PAGE)
        file.seek(3 * PAGE)
        file.write(b"!")
    for chunk, named in ((0, r"'1', '2', '3'"), (3, r"'10', '11', '12' and 1 more")):
        with pytest.raises(TierError, match=rf"rank 0: w \(of {named}\) could not be read from .*: checksum mismatch"):
            span.fetch(chunk * CHUNK, (chunk + 1) * CHUNK).wait()


def test_without_checksums_a_changed_byte_is_not_detected(tmp_path: Path) -> None:
    swap = Swap(tmp_path, checksums=False)
    span = filled(swap)
    with swap.path.open("r+b") as file:
        file.write(b"!")
    span.fetch().wait()
    assert not torch.equal(span.tensor, numbers(span))
    swap.close()


def test_a_deleted_file_is_reported(swap: Swap) -> None:
    span = filled(swap)
    swap.path.unlink()
    arriving = span.fetch()
    with pytest.raises(TierError, match=r"rank 0: w could not be read from .*: the file was deleted\. No other"):
        arriving.wait()


def test_a_closed_file_is_reported(swap: Swap) -> None:
    span = filled(swap)
    swap.close()
    swap.close()
    assert swap.closed
    with pytest.raises(TierError, match=r"w could not be read from .*: the file is closed"):
        span.fetch().wait()
    span.close()


def test_closing_the_file_fails_queued_requests(swap: Swap, writes: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.tier.transfer._CLOSE_TIMEOUT", 0.01)
    span = DiskSpan(swap, 30 * CHUNK, torch.float32, "w", chunk=CHUNK)
    span.fetch(fresh=True)
    writes.open.clear()
    leaving = span.commit()
    swap.close()
    writes.open.set()
    with pytest.raises(TierError, match=r"w could not be written to .*: the file was closed before the transfer"):
        leaving.wait()


def test_a_full_disk_reports_needed_and_free_bytes(small_disk: Path) -> None:
    swap = Swap(small_disk, rank=3)
    DiskSpan(swap, 8 * CHUNK, torch.float32, "layers.0.weight", chunk=CHUNK)
    with pytest.raises(TierError, match=r"rank 3: layers\.1\.weight could not be written to .*rank3\.swap at byte 32,768: "
                                        r"No space left on device: needed 65,536 bytes, 32,768 are free; make room, or give "
                                        r"another folder in nvme_path"):
        DiskSpan(swap, 16 * CHUNK, torch.float32, "layers.1.weight", chunk=CHUNK)
    assert swap.path.stat().st_size == swap.disk_bytes == 32_768
    DiskSpan(swap, 8 * CHUNK, torch.float32, "layers.2.weight", chunk=CHUNK)
    swap.close()


def test_a_disk_that_fills_up_during_a_write_is_reported(swap: Swap, writes: Gate) -> None:
    span = filled(swap)
    span.fetch().wait()
    writes.error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with pytest.raises(TierError, match=r"w could not be written to .*: No space left on device: needed 4,096 bytes, "
                                        r"[\d,]+ are free"):
        span.commit().wait()
    writes.error = None
    span.fetch()
    span.commit().wait()


def test_a_failed_fetch_leaves_no_pin(swap: Swap, reads: Gate) -> None:
    span = filled(swap)
    reads.error = OSError(errno.EIO, os.strerror(errno.EIO))
    with pytest.raises(TierError, match="could not be read"), fetched(span, changed=True):
        raise AssertionError("the body must not run")
    span.discard()  # asserts that no fetch is open


def test_a_closed_file_allocates_no_extent(swap: Swap) -> None:
    swap.close()
    with pytest.raises(TierError, match=r"w could not be written to .* at byte 0: the file is closed"):
        DiskSpan(swap, CHUNK, torch.float32, "w", chunk=CHUNK)


def test_the_next_fetch_retries_a_failed_read(swap: Swap, reads: Gate) -> None:
    span = filled(swap)
    reads.error = OSError(errno.EIO, os.strerror(errno.EIO))
    arriving = span.fetch()
    with pytest.raises(TierError, match=r"w could not be read from .*: Input/output error; look at the disk \(dmesg\)"):
        arriving.wait()
    reads.error = None
    span.fetch().wait()
    assert torch.equal(span.tensor, numbers(span))
    with pytest.raises(TierError):
        arriving.wait()
    span.commit(changed=False)
    span.commit(changed=False)


def test_a_chunk_that_could_not_be_read_is_never_written(swap: Swap, reads: Gate) -> None:
    span = filled(swap)
    reads.error = OSError(errno.EIO, os.strerror(errno.EIO))
    span.fetch()
    before = swap.written_bytes
    with pytest.raises(TierError, match="Input/output error"):
        span.commit().wait()
    reads.error = None
    assert swap.written_bytes == before
    span.fetch().wait()
    assert torch.equal(span.tensor, numbers(span))


def test_a_chunk_stays_in_memory_until_its_write_succeeds(swap: Swap, writes: Gate) -> None:
    span = filled(swap)
    span.fetch().wait()
    span.tensor.mul_(2)
    writes.error = OSError(errno.EIO, os.strerror(errno.EIO))
    for move in (span.commit, span.fetch, partial(span.commit, changed=False)):
        with pytest.raises(TierError, match=r"w could not be written to .*: Input/output error; look at the disk \(dmesg\)"):
            move().wait()
    assert all(resident(span))
    writes.error = None
    with pytest.raises(TierError):
        span.fetch().wait()
    assert torch.equal(span.tensor, 2 * numbers(span))
    span.commit(changed=False).wait()
    assert not any(resident(span))
    span.fetch().wait()
    assert torch.equal(span.tensor, 2 * numbers(span))


def test_a_write_of_zero_bytes_is_reported(swap: Swap, monkeypatch: pytest.MonkeyPatch) -> None:
    span = filled(swap)
    span.fetch().wait()
    monkeypatch.setattr(os, "pwritev", _nothing)
    with pytest.raises(TierError, match="the write ended early; make room on the disk"):
        span.commit().wait()


def _nothing(descriptor: int, views: list[memoryview], offset: int) -> int:
    return 0


@pytest.mark.parametrize(("limit", "calls"), [(8192, 13), (5000, 25)], ids=["whole blocks", "parts of blocks"])
def test_short_reads_and_writes_are_continued(limit: int, calls: int, tmp_path: Path,
                                              monkeypatch: pytest.MonkeyPatch) -> None:
    functions = [ShortCalls(monkeypatch, name, limit) for name in ("preadv", "pwritev")]
    swap = Swap(tmp_path)
    span = DiskSpan(swap, 25 * CHUNK, torch.float32, "w")
    span.fetch(fresh=True)
    span.tensor.copy_(numbers(span))
    span.commit().wait()
    span.fetch().wait()
    assert torch.equal(span.tensor, numbers(span))
    assert [function.calls for function in functions] == [calls, calls], "the rest of a block is requested again"
    swap.close()


class ShortCalls:
    """Limits a function of `os` to `limit` bytes a call; smaller calls are unchanged."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str, limit: int):
        self.calls = 0
        self._call: Callable[[int, list[memoryview], int], int] = getattr(os, name)
        self._limit = limit
        monkeypatch.setattr(os, name, self._move)

    def _move(self, descriptor: int, views: list[memoryview], offset: int) -> int:
        self.calls += 1
        if len(views[0]) <= self._limit:
            return self._call(descriptor, views, offset)
        self._call(descriptor, [views[0][:-(-self._limit // PAGE) * PAGE]], offset)  # direct I/O transfers whole blocks
        return self._limit


def test_any_other_exception_ends_the_transfer(swap: Swap, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object) -> int:
        raise ValueError("odd")

    span = filled(swap)
    monkeypatch.setattr(os, "preadv", broken)
    with pytest.raises(TierError, match=r"w could not be read from .* at byte 0: ValueError: odd"):
        span.fetch().wait()
