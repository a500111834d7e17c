"""Copies to a compute device: in which stream they are made, and what they come after."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from importlib import import_module

import pytest
import torch

from shoal.tier.device_mirror import CopyTransfer, DeviceMirror
from shoal.tier.elastic import ResizedBuffer
from shoal.tier.span import ResidentSpan
from shoal.tier.streams import CopyEvent, CopyStream

HOST = torch.device("cpu")


class Noted(CopyStream):
    """A stream that notes what is asked of it, and copies at once."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def use(self, *, after_compute: bool = False) -> AbstractContextManager[object]:
        self.said.append("after compute" if after_compute else "at once")
        return nullcontext()

    def record_event(self) -> CopyEvent:
        return NotedMark(self)


class NotedMark:
    def __init__(self, stream: Noted):
        self._stream = stream

    def synchronize(self) -> None:
        self._stream.said.append("wait")

    def stream_wait(self) -> None:
        self._stream.said.append("join")


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> Noted:
    stream = Noted()
    for name in ("shoal.tier.device_mirror", "shoal.tier.elastic"):
        monkeypatch.setattr(import_module(name), "h2d_stream", lambda _: stream)
    return stream


def resized(rest: ResidentSpan) -> ResizedBuffer:
    return ResizedBuffer(8, torch.float32, range(2, 6), HOST, rest)


def test_what_rests_on_the_device_is_copied_within_its_computing(noted: Noted) -> None:
    buffer = resized(ResidentSpan(torch.ones(4)))
    buffer.shrink()
    buffer.grow().wait()
    buffer.load_shard()
    assert buffer.full[2:6].tolist() == [1.0] * 4
    assert noted.said == []  # no other stream may run ahead of the step that wrote it


def test_what_rests_on_the_host_comes_beside_computing_into_new_memory_and_after_it_into_old(noted: Noted) -> None:
    rest = ResidentSpan(torch.empty(4, device="meta"))  # of another device than the buffer's
    buffer = resized(rest)
    rest.tensor = torch.ones(4)
    buffer.shrink()
    buffer.grow().wait()
    assert noted.said == ["at once", "at once", "join"]
    noted.said.clear()
    rest.tensor = torch.full((4,), 2.0)
    buffer.load_shard()
    assert noted.said == ["after compute", "join"]
    assert buffer.full[2:6].tolist() == [2.0] * 4


def test_what_has_arrived_is_joined_by_every_stream_that_waits_for_it(noted: Noted) -> None:
    arriving = CopyTransfer(ResidentSpan(torch.ones(4)), torch.empty(4), noted, after_compute=False)
    arriving.wait()
    assert arriving.done
    arriving.wait()
    assert noted.said == ["at once", "join", "join"]


def test_memory_that_is_there_is_not_made_again(noted: Noted) -> None:
    span = DeviceMirror(ResidentSpan(torch.ones(4)), HOST)
    first = span.tensor.data_ptr()
    span.fetch(fresh=True).wait()
    assert (noted.said, span.tensor.data_ptr()) == ([], first)
    span.fetch().wait()
    assert noted.said == ["after compute", "join"]  # the device's computing may still be at it
    noted.said.clear()
    span.commit()
    span.fetch().wait()
    assert noted.said == ["at once", "at once", "join"]
    assert span.tensor.tolist() == [1.0] * 4
