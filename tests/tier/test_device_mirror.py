"""Copies to a compute device: the stream they run in, and the work they follow."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from pathlib import Path

import pytest
import torch

from shoal.errors import TierError
from shoal.tier.device_mirror import DeviceMirror, ResidentCopy, copy_to_device
from shoal.tier.disk_span import DiskSpan
from shoal.tier.elastic import ResizedBuffer
from shoal.tier.span import ResidentSpan
from shoal.tier.streams import CopyEvent, CopyStream, UploadRing
from shoal.tier.swap import Swap

HOST = torch.device("cpu")


class RecordingStream(CopyStream):
    """A stream that records its calls, and copies synchronously."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def follow_compute(self) -> None:
        self.calls.append("follow")

    def following(self) -> AbstractContextManager[object]:
        return nullcontext()

    def record_compute(self) -> CopyEvent:
        self.calls.append("compute")
        return RecordingEvent(self)

    def record_event(self) -> CopyEvent:
        return RecordingEvent(self)


class RecordingEvent:
    def __init__(self, stream: RecordingStream):
        self._stream = stream

    def synchronize(self) -> None:
        self._stream.calls.append("synchronize")

    def stream_wait(self) -> None:
        self._stream.calls.append("stream_wait")


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> RecordingStream:
    recording = RecordingStream()
    for name in ("shoal.tier.device_mirror", "shoal.tier.streams"):
        monkeypatch.setattr(import_module(name), "h2d_stream", lambda _: recording)
    monkeypatch.setattr(import_module("shoal.tier.device_mirror"), "upload_ring", UploadRing)
    return recording


def resized(shard: ResidentSpan) -> ResizedBuffer:
    return ResizedBuffer(8, torch.float32, range(2, 6), HOST, shard)


def test_a_shard_on_the_device_is_copied_in_the_compute_stream(stream: RecordingStream) -> None:
    buffer = resized(ResidentSpan(torch.ones(4)))
    buffer.shrink()
    buffer.grow().wait()
    buffer.load_shard()
    assert buffer.full[2:6].tolist() == [1.0] * 4
    assert stream.calls == []  # no other stream may overtake the step that wrote it


def test_a_shard_on_the_host_is_copied_in_its_stream(stream: RecordingStream) -> None:
    shard = ResidentSpan(torch.empty(4, device="meta"))  # another device than the buffer's
    buffer = resized(shard)
    shard.tensor = torch.ones(4)
    buffer.shrink()
    buffer.grow().wait()
    assert stream.calls == ["follow", "stream_wait"]
    stream.calls.clear()
    buffer.shard.fetch().wait()
    assert stream.calls == ["synchronize"]  # the host may overwrite what the copy reads
    stream.calls.clear()
    shard.tensor = torch.full((4,), 2.0)
    buffer.load_shard()
    assert stream.calls == ["follow", "stream_wait"]
    assert buffer.full[2:6].tolist() == [2.0] * 4


def test_every_wait_makes_the_current_stream_wait(stream: RecordingStream) -> None:
    arriving = ResidentCopy(torch.ones(4), torch.empty(4), stream)
    arriving.wait()
    assert arriving.done
    arriving.wait()
    assert stream.calls == ["follow", "stream_wait", "stream_wait"]


@pytest.mark.parametrize("elements", [0, 3, 5000])
def test_chunks_of_a_disk_go_up_as_they_arrive(elements: int, stream: RecordingStream, tmp_path: Path) -> None:
    """Each follows what was computed before the fetch; the wait is for all of them, of which some are in memory still."""
    span = DiskSpan(Swap(tmp_path), elements, torch.float32, "weights", chunk=1024)
    span.fetch(fresh=True).wait()
    span.tensor.copy_(values := torch.arange(elements, dtype=torch.float32))
    span.commit().wait()
    span.fetch(0, elements // 2).wait()
    target = torch.zeros(elements)
    arriving = copy_to_device(span, target, HOST)
    arriving.wait()
    assert torch.equal(target, values)
    chunks = -(-elements // 1024)
    assert sorted(stream.calls) == ["compute", *["stream_wait"] * 2 * chunks]
    span.commit(0, elements // 2, changed=False)
    span.discard()  # which raises if anything is still fetched


def test_a_chunk_that_a_disk_has_lost_fails_its_copy(stream: RecordingStream, tmp_path: Path) -> None:
    swap = Swap(tmp_path)
    span = DiskSpan(swap, 5000, torch.float32, "weights", chunk=1024)
    span.fetch(fresh=True).wait()
    span.commit().wait()
    os.truncate(swap.path, 8192)
    arriving = copy_to_device(span, torch.zeros(5000), HOST)
    for wait in (arriving.wait, arriving.following, arriving.finish):
        with pytest.raises(TierError, match="weights could not be read"):
            wait()
    span.discard()


def test_a_device_that_refuses_a_copy_is_heard_by_who_waits(stream: RecordingStream, tmp_path: Path) -> None:
    span = DiskSpan(Swap(tmp_path), 16, torch.float32, "weights")
    span.fetch(fresh=True).wait()
    span.commit().wait()
    arriving = copy_to_device(span, torch.zeros(8), HOST)
    with pytest.raises(RuntimeError, match="size"):
        arriving.wait()


def test_allocated_memory_is_reused(stream: RecordingStream) -> None:
    span = DeviceMirror(ResidentSpan(torch.ones(4)), HOST)
    first = span.tensor.data_ptr()
    span.fetch(fresh=True).wait()
    assert (stream.calls, span.tensor.data_ptr()) == ([], first)
    span.fetch().wait()
    assert stream.calls == ["follow", "stream_wait"]  # the compute stream may still use the memory
    stream.calls.clear()
    span.commit()
    assert stream.calls == ["stream_wait"]  # a copy up must not write to memory that is free
    stream.calls.clear()
    span.fetch().wait()
    assert stream.calls == ["follow", "stream_wait"]
    assert span.tensor.tolist() == [1.0] * 4
