"""Copies to a compute device: the stream they run in, and the work they follow."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from importlib import import_module

import pytest
import torch

from shoal.tier.device_mirror import CopyTransfer, DeviceMirror
from shoal.tier.elastic import ResizedBuffer
from shoal.tier.span import ResidentSpan, Transfer
from shoal.tier.streams import CopyEvent, CopyStream

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
    for name in ("shoal.tier.device_mirror", "shoal.tier.elastic"):
        monkeypatch.setattr(import_module(name), "h2d_stream", lambda _: recording)
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
    arriving = CopyTransfer(ResidentSpan(torch.ones(4)), torch.empty(4), stream)
    arriving.wait()
    assert arriving.done
    arriving.wait()
    assert stream.calls == ["follow", "stream_wait", "stream_wait"]


class ReadSpan(ResidentSpan):
    """A span that is read from elsewhere, and records the end of the read in the calls of `stream`."""

    def __init__(self, tensor: torch.Tensor, stream: RecordingStream):
        super().__init__(tensor)
        self._stream = stream

    def fetch(self, start: int = 0, stop: int | None = None, *, fresh: bool = False) -> Transfer:
        return Read(self._stream)


class Read:
    done = False

    def __init__(self, stream: RecordingStream):
        self._stream = stream

    def wait(self) -> None:
        self._stream.calls.append("read")

    def following(self) -> AbstractContextManager[object]:
        self.wait()
        return nullcontext()


def test_a_copy_does_not_follow_what_is_computed_while_its_source_is_read(stream: RecordingStream) -> None:
    arriving = CopyTransfer(ReadSpan(torch.ones(4), stream), torch.empty(4), stream)
    assert stream.calls == ["follow"]
    arriving.wait()
    assert stream.calls == ["follow", "read", "stream_wait"]


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
