"""The receiving end of a channel: it accepts a few messages before the caller asks for them.

    form of the next message    accepted by
    predicted                   the caller of `receive`, from receives posted early
    not predicted               a thread, which reads the header, allocates, and waits for the tensors

The thread costs one more round trip and a wake-up, but overlaps with the caller's work. Forms are predicted on gloo alone.
At any time either the thread has jobs or the caller has early posts, never both, so they share no lock.
"""

from __future__ import annotations

import ctypes
from collections import deque
from dataclasses import dataclass
from datetime import timedelta
from queue import Empty, SimpleQueue
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.errors import CollectiveFailed, CollectiveTimeout, ShoalError, StageFailed
from shoal.pipeline.channel import ChannelEndpoint
from shoal.pipeline.message import (
    ABORT,
    AHEAD,
    FILLER,
    HEADER_TAG,
    KNOWN_FORMS,
    NEW_FORM,
    TEXT_TAG,
    FormPredictor,
    tensor_tag,
)
from shoal.pipeline.value_tree import TensorMeta, TreeSpec
from shoal.pipeline.wire import NO_TIMEOUT, WireTransfer
from shoal.tier.streams import CopyEvent

__all__ = ["Receiver"]


@dataclass(slots=True)
class _Post:
    """The receives posted for one message: its predicted form, or -1, and a header unless the prediction implies it."""

    predicted: int
    integers: Tensor | None
    header: WireTransfer | None


@dataclass(slots=True)
class _ArrivingMessage:
    form: int
    spec: TreeSpec
    tensors: list[Tensor]
    event: CopyEvent
    """The point of the stream at which the tensors are written."""


class Receiver(ChannelEndpoint):
    """The receiving end of channel `number` from rank `peer` of `group`; buffers at most `AHEAD` messages."""

    close_timeout = 0.1

    def __init__(self, group: dist.ProcessGroup, peer: int, number: int, *, device: torch.device, timeout: float, name: str):
        self._expected = self._asked = self._started = self._received = 0
        self._jobs: SimpleQueue[bool] = SimpleQueue()
        self._arrived: SimpleQueue[_ArrivingMessage | ShoalError] = SimpleQueue()
        self._posts: deque[_Post] = deque()
        self._failure: ShoalError | None = None
        self._specs: dict[int, TreeSpec] = {}
        self._form_count = 0
        self._predictor = FormPredictor()
        self._posted_tensors: dict[int, deque[WireTransfer]] = {}
        super().__init__(group, peer, number, device=device, timeout=timeout, name=name)

    def expect(self, count: int) -> None:
        """Announce that the caller will receive `count` more messages."""
        self._expected += count
        self._start()

    def receive(self) -> Any:
        """Return the next value; its floating tensors are leaves that require gradients if they did at the sender.

        Raises `StageFailed` with the text of an abort, `CollectiveFailed` if the peer is gone, and `CollectiveTimeout`
        after `timeout` seconds.
        """
        assert self._asked < self._expected, f"{self._name}: receive without expect"
        if self._failure is not None:
            raise self._failure
        self._asked += 1
        self._start()
        arrival = self._finish_post(self._posts.popleft()) if self._posts else self._wait_for_thread()
        if isinstance(arrival, ShoalError):
            self._failure = arrival
            raise arrival
        self._received += 1
        self._predictor.record(arrival.form)
        arrival.event.stream_wait()
        for tensor, meta in zip(arrival.tensors, arrival.spec.metas, strict=True):
            self._stream.keep_for_compute(tensor)
            tensor.requires_grad_(meta.requires_grad)
        return arrival.spec.unflatten(arrival.tensors)

    def stop(self) -> None:
        self._jobs.put(False)

    def _start(self) -> None:
        """Start accepting the expected messages, as far as there is room."""
        while self._started < min(self._expected, self._asked + AHEAD):
            jobs = self._started - self._received - len(self._posts)
            predicted = self._predictor.predict(self._started) if self._wire.early_receives_are_free else -1
            if predicted >= 0 and not jobs:
                self._posts.append(self._post(predicted))
            elif predicted < 0 and not self._posts:
                self._jobs.put(True)
            else:  # the thread or the posts in use must drain before the other takes over
                return
            self._started += 1

    def _post(self, predicted: int) -> _Post:
        """Post receives for the tensors that are predicted, and for a header unless none will come."""
        if predicted < 0:
            return self._with_header(predicted)
        posted = self._posted_tensors.setdefault(predicted, deque())
        if len(posted) == sum(post.predicted == predicted for post in self._posts):  # else a receive is left over
            posted.append(self._post_tensors(predicted))
        return _Post(predicted, None, None) if self._specs[predicted].small else self._with_header(predicted)

    def _with_header(self, predicted: int) -> _Post:
        integers = self._wire.pack_integers(0, 0)
        return _Post(predicted, integers, self._wire.receive([integers], HEADER_TAG))

    def _wait_for_thread(self) -> _ArrivingMessage | ShoalError:
        try:
            return self._arrived.get(timeout=self._timeout)
        except Empty:
            return self._timed_out()

    def _finish_post(self, post: _Post) -> _ArrivingMessage | ShoalError:
        try:
            return self._finish(post, timedelta(seconds=self._timeout))
        except RuntimeError as error:
            return self._timed_out() if "imed out" in str(error) else self._broken(error)

    def _run_next(self) -> bool:
        if not self._jobs.get():
            return False
        try:
            arrival = self._finish(self._post(-1), NO_TIMEOUT)
        except Exception as error:  # raised by `receive`
            arrival = self._broken(error)
        self._arrived.put(arrival)
        return not isinstance(arrival, ShoalError)

    def _finish(self, post: _Post, timeout: timedelta) -> _ArrivingMessage | StageFailed:
        """Receive the rest of one message."""
        if post.header is None:
            transfer = self._posted_tensors[post.predicted].popleft()
            transfer.wait(timeout)
            if not _is_filler(transfer):
                return self._arrival(post.predicted, self._spec_of(post.predicted), transfer)
            post = self._with_header(-1)
        form, text = self._read(post, timeout)
        if form == ABORT:
            return StageFailed(text.decode())
        if form == NEW_FORM:
            form, self._form_count = self._form_count, self._form_count + 1
        spec = self._spec_of(form, text)
        posted = self._posted_tensors.get(form)
        transfer = posted.popleft() if posted else self._post_tensors(form)
        transfer.wait(timeout)
        return self._arrival(form, spec, transfer)

    def _arrival(self, form: int, spec: TreeSpec, transfer: WireTransfer) -> _ArrivingMessage:
        tensors = [tensor.to(self._wire.destination(on_host=meta.on_host))
                   for tensor, meta in zip(transfer.tensors, spec.metas, strict=True)]
        return _ArrivingMessage(form, spec, tensors, self._stream.record_event())

    def _read(self, post: _Post, timeout: timedelta) -> tuple[int, bytes]:
        """Return the form number of a header, or the value in its place, and the text that follows."""
        assert post.integers is not None and post.header is not None
        post.header.wait(timeout)
        form, size = post.integers.tolist()
        if size == 0:
            return form, b""
        text = self._wire.pack_bytes(bytes(size))
        self._wire.receive([text], TEXT_TAG).wait(timeout)
        return form, text.cpu().numpy().tobytes()

    def _spec_of(self, form: int, text: bytes = b"") -> TreeSpec:
        """Return the tree spec of a form, new ones from `text`; the sender numbers and evicts forms in the same way."""
        spec = self._specs.pop(form, None) or TreeSpec(text)
        if len(self._specs) == KNOWN_FORMS:
            del self._specs[next(iter(self._specs))]
        self._specs[form] = spec
        return spec

    def _post_tensors(self, form: int) -> WireTransfer:
        """Allocate the tensors of a known form, and post receives for them."""
        return self._wire.receive([self._allocate(meta) for meta in self._specs[form].metas], tensor_tag(form))

    def _allocate(self, meta: TensorMeta) -> Tensor:
        return torch.empty(meta.shape, dtype=meta.dtype, device=self._wire.carrier(on_host=meta.on_host))

    def _timed_out(self) -> CollectiveFailed:
        return CollectiveTimeout(f"{self._label} did not come from rank {self._wire.peer} within {self._timeout:g} s: it "
                                 f"took a different path, stopped, or is that slow; raise \"timeout\"")


def _is_filler(transfer: WireTransfer) -> bool:
    first = next(tensor for tensor in transfer.tensors if tensor.numel())
    return ctypes.string_at(first.data_ptr(), len(FILLER)) == FILLER
