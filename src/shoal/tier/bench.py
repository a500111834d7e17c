"""How fast a disk is for state that comes and goes: the engine that training uses, over blocks and requests under way.

A setting is measured by writing a file in turn, then reading it back, each for as long as it has; direct I/O, the checksums
and the faults of pages that come and go are part of it. The file is the process's own and is removed in any case.
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
from shoal.tier.transfer import Job, Lane, Stretch, SwapFile, Threads, refusal

__all__ = ["ROUNDS", "SETTINGS", "SMALLEST", "BenchRow", "Setting", "best", "measure", "merged"]

_CHUNK = 4 << 20
SMALLEST = 16 * _CHUNK
"""Bytes that a file must have to tell anything."""

ROUNDS = 3
"""How often each setting has its turn: a slow moment of the disk then meets one turn of several settings."""

_AS_GOOD = 0.95
_MOST = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """How the file is read and written; `requests` is queue_depth times intra_op_parallelism, of which each has a thread."""

    block_bytes: int
    requests: int

    @property
    def bytes(self) -> int:
        """Bytes under way at once."""
        return self.block_bytes * self.requests


SETTINGS = tuple(setting for block in (256 << 10, 1 << 20, 4 << 20) for requests in (1, 4, 8, 16, 32)
                 if (setting := Setting(block_bytes=block, requests=requests)).bytes <= _MOST)
"""What is tried; more bytes under way at once are more memory than the speed is worth."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchRow:
    """Bytes per second of a setting."""

    setting: Setting
    read: float
    write: float

    @property
    def both(self) -> float:
        """Bytes per second when everything is read and written once."""
        return 2 / (1 / self.read + 1 / self.write)


def merged(rows: Iterable[BenchRow]) -> list[BenchRow]:
    """Return a row for each setting: the medians over its rounds."""
    rounds: dict[Setting, list[BenchRow]] = {}
    for row in rows:
        rounds.setdefault(row.setting, []).append(row)
    return [BenchRow(setting=setting, read=median(row.read for row in found), write=median(row.write for row in found))
            for setting, found in rounds.items()]


def best(rows: Sequence[BenchRow]) -> BenchRow:
    """Return of the rows that are as good as the fastest (within 5 %) the one with the fewest bytes under way."""
    fastest = max(row.both for row in rows)
    return min((row for row in rows if row.both >= _AS_GOOD * fastest), key=lambda row: (row.setting.bytes, -row.both))


def measure(folder: str | Path, settings: Sequence[Setting], *, bytes: int, seconds: float) -> Generator[BenchRow]:
    """Yield a row for each setting in each round, from a file of `bytes` in `folder`; takes about `seconds` in all.

    Raises `TierError` for a folder that cannot be used.
    """
    assert bytes >= SMALLEST, bytes
    with _file(folder, bytes) as file:
        ground = _Ground(file, bytes, most=_MOST)
        share = seconds / (ROUNDS * len(settings) + 1) / 2
        ground.rate("write", SETTINGS[-1], 2 * share)  # the first writing of a file is slower than any later one
        for setting in [*settings] * ROUNDS:
            write = ground.rate("write", setting, share)
            yield BenchRow(setting=setting, write=write, read=ground.rate("read", setting, share))


@contextmanager
def _file(folder: str | Path, bytes: int) -> Generator[SwapFile]:
    """Make a file of `bytes` for a while."""
    check_folder(folder)
    if (free := free_bytes(folder)) < bytes:
        raise TierError(f"{folder} is too full: needed {bytes:,} bytes, {free:,} are free; make room, or give a smaller "
                        f"--size")
    made = claim(folder, 0)
    try:
        made.remove()  # a file without a name goes when this process does, however that is
        try:
            os.posix_fallocate(made.descriptor, 0, bytes)
        except OSError as error:
            raise TierError(f"{folder}: {refusal(error, bytes, Path(folder))}") from error
        yield SwapFile(path=made.path, descriptor=made.descriptor, rank=0, direct=made.direct, checksums=True)
    finally:
        os.close(made.descriptor)


class _Ground:
    """A file of chunks, and the memory that they come from and go to."""

    def __init__(self, file: SwapFile, bytes: int, *, most: int):
        self._file = file
        self._chunks = bytes // _CHUNK
        slots = min(self._chunks, _slots(most))
        self._source, self._sink = (Pages(slots * _CHUNK, torch.uint8) for _ in range(2))
        self._source.tensor.view(torch.int64).random_()  # some disks make little of zeros
        self._sums: list[list[int]] = []
        """The checksums of the chunks that were written last, from the first on."""

    def rate(self, lane: Lane, setting: Setting, seconds: float) -> float:
        """Return the bytes per second of writing the chunks in turn, or of reading back those that were written last."""
        slots = min(self._chunks, _slots(setting.bytes))
        if lane == "write":
            self._sums = []
        start, moved, under_way = perf_counter(), 0, deque[Job]()
        threads = Threads(self._file, setting.requests)
        try:
            for number in count():
                if len(under_way) == slots:
                    moved += _ended(under_way.popleft())
                if number and perf_counter() - start >= seconds:
                    break
                under_way.append(self._job(lane, setting, number, slot=number % slots))
                threads.submit(under_way[-1])
            moved += sum(map(_ended, under_way))
            return moved / (perf_counter() - start)
        finally:
            threads.stop()

    def _job(self, lane: Lane, setting: Setting, number: int, *, slot: int) -> Job:
        if lane == "write" and number < self._chunks:
            self._sums.append([0] * -(-_CHUNK // setting.block_bytes))
        chunk = number % len(self._sums)
        stretch = Stretch(pages=self._source if lane == "write" else self._sink, start=slot * _CHUNK,
                          stop=(slot + 1) * _CHUNK, offset=chunk * _CHUNK)
        return Job(lane, "the benchmark", stretch, self._sums[chunk], self._settle, block_bytes=setting.block_bytes)

    def _settle(self, job: Job) -> None:
        if job.lane == "read":
            self._sink.drop(job.stretch.start, job.stretch.stop)


def _slots(bytes: int) -> int:
    """Return how many chunks keep `bytes` under way."""
    return bytes // _CHUNK + 2


def _ended(job: Job) -> int:
    """Wait for a job and return its bytes."""
    job.wait()
    if job.error is not None:
        raise job.error
    return job.bytes
