"""Benchmark of a disk with the I/O threads of training, over block sizes and numbers of concurrent requests.

For each setting the benchmark writes a file for its share of the time, then reads it back; direct I/O, checksums and page
faults are included. The file is private to the process, and is removed in any case.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from statistics import median
from time import perf_counter

import torch

from shoal.errors import TierError
from shoal.tier.claim import claim
from shoal.tier.folder_check import check_folder, free_bytes
from shoal.tier.pages import Pages
from shoal.tier.transfer import IoThreads, Job, Lane, MappedExtent, SwapFile, describe

__all__ = ["ROUNDS", "SETTINGS", "SMALLEST", "BenchRow", "Setting", "best", "measure", "merged"]

_CHUNK = 4 << 20
SMALLEST = 16 * _CHUNK
"""The smallest file that gives meaningful rates, in bytes."""

ROUNDS = 3
"""Measurements of each setting, in turns: a slow moment of the disk then affects one of several settings."""

_AS_FAST = 0.95
_MAX_BYTES = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """The block size and the concurrent requests, `queue_depth` times `intra_op_parallelism`, each with a thread."""

    block_bytes: int
    requests: int

    @property
    def bytes(self) -> int:
        """Bytes in flight."""
        return self.block_bytes * self.requests


SETTINGS = tuple(setting for block in (256 << 10, 1 << 20, 4 << 20) for requests in (1, 4, 8, 16, 32)
                 if (setting := Setting(block_bytes=block, requests=requests)).bytes <= _MAX_BYTES)
"""The settings measured; more bytes in flight would take more memory than their speed is worth."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchRow:
    """The rates of a setting, in bytes per second."""

    setting: Setting
    read: float
    write: float

    @property
    def both(self) -> float:
        """Bytes per second if every byte is read and written once."""
        return 2 / (1 / self.read + 1 / self.write)


def merged(rows: Iterable[BenchRow]) -> list[BenchRow]:
    """Return one row for each setting: the medians over its rounds."""
    rounds: dict[Setting, list[BenchRow]] = {}
    for row in rows:
        rounds.setdefault(row.setting, []).append(row)
    return [BenchRow(setting=setting, read=median(row.read for row in group), write=median(row.write for row in group))
            for setting, group in rounds.items()]


def best(rows: Sequence[BenchRow]) -> BenchRow:
    """Return, of the rows within 5 % of the fastest, the one with the fewest bytes in flight."""
    fastest = max(row.both for row in rows)
    return min((row for row in rows if row.both >= _AS_FAST * fastest), key=lambda row: (row.setting.bytes, -row.both))


def measure(folder: str | Path, settings: Sequence[Setting], *, bytes: int, seconds: float) -> Generator[BenchRow]:
    """Yield a row for each setting in each round, from a file of `bytes` in `folder`; takes about `seconds` in total.

    Raises `TierError` for an unusable folder.
    """
    assert bytes >= SMALLEST, bytes
    with _file(folder, bytes) as file:
        target = _Benchmark(file, bytes, max_bytes=_MAX_BYTES)
        share = seconds / (ROUNDS * len(settings) + 1) / 2
        target.rate("write", SETTINGS[-1], 2 * share)  # the first write to a file is slower than later ones
        for setting in [*settings] * ROUNDS:
            write = target.rate("write", setting, share)
            yield BenchRow(setting=setting, write=write, read=target.rate("read", setting, share))


@contextmanager
def _file(folder: str | Path, bytes: int) -> Generator[SwapFile]:
    """Create a file of `bytes` within the context."""
    check_folder(folder)
    if (free := free_bytes(folder)) < bytes:
        raise TierError(f"{folder} is too full: needed {bytes:,} bytes, {free:,} are free; make room, or give a smaller "
                        f"--size")
    made = claim(folder, 0)
    try:
        made.remove()  # an unlinked file cannot outlive the process
        try:
            os.posix_fallocate(made.descriptor, 0, bytes)
        except OSError as error:
            raise TierError(f"{folder}: {describe(error, bytes, Path(folder))}") from error
        yield SwapFile(path=made.path, descriptor=made.descriptor, rank=0, direct=made.direct, checksums=True)
    finally:
        os.close(made.descriptor)


class _Benchmark:
    """A file of chunks, and the memory they are written from and read into."""

    def __init__(self, file: SwapFile, bytes: int, *, max_bytes: int):
        self._file = file
        self._chunks = bytes // _CHUNK
        slots = min(self._chunks, _slots(max_bytes))
        self._source, self._sink = (Pages(slots * _CHUNK, torch.uint8) for _ in range(2))
        self._source.tensor.view(torch.int64).random_()  # some disks compress zeros
        self._checksums: list[list[int]] = []
        """The checksums of the chunks written last, from the first on."""

    def rate(self, lane: Lane, setting: Setting, seconds: float) -> float:
        """Return the bytes per second of writing the chunks in turn, or of reading back the chunks written last."""
        slots = min(self._chunks, _slots(setting.bytes))
        if lane == "write":
            self._checksums = []
        start, moved, in_flight = perf_counter(), 0, deque[Job]()
        threads = IoThreads(self._file, setting.requests)
        try:
            for number in count():
                if len(in_flight) == slots:
                    moved += _finished(in_flight.popleft())
                if number and perf_counter() - start >= seconds:
                    break
                in_flight.append(self._job(lane, setting, number, slot=number % slots))
                threads.submit(in_flight[-1])
            moved += sum(map(_finished, in_flight))
            return moved / (perf_counter() - start)
        finally:
            threads.stop()

    def _job(self, lane: Lane, setting: Setting, number: int, *, slot: int) -> Job:
        if lane == "write" and number < self._chunks:
            self._checksums.append([0] * -(-_CHUNK // setting.block_bytes))
        chunk = number % len(self._checksums)
        extent = MappedExtent(pages=self._source if lane == "write" else self._sink, start=slot * _CHUNK,
                              stop=(slot + 1) * _CHUNK, offset=chunk * _CHUNK)
        return Job(lane, "the benchmark", extent, self._checksums[chunk], self._release, block_bytes=setting.block_bytes)

    def _release(self, job: Job) -> None:
        if job.lane == "read":
            self._sink.drop(job.extent.start, job.extent.stop)


def _slots(bytes: int) -> int:
    """Return the number of chunks that keeps `bytes` in flight."""
    return bytes // _CHUNK + 2


def _finished(job: Job) -> int:
    """Wait for a job; return its bytes, or raise its error."""
    job.wait()
    if job.error is not None:
        raise job.error
    return job.bytes
