"""A channel is a FIFO queue of values from one rank to another, with a `Sender` and a `Receiver` at its ends.

    Sender.send ===== wire =====> [at most `AHEAD`] -> Receiver.receive

Neither end blocks its caller on the network longer than needed. `send` posts a message (format: `shoal.pipeline.message`)
and returns; a thread releases the tensors when they are sent. The receiver accepts as many messages as `expect` announced,
at most `AHEAD` of them before the caller asks:

    form of the next message    accepted by
    predicted                   the caller of `receive`, from receives posted early
    not predicted               a thread, which reads the header, allocates, and waits for the tensors

The receiver's thread costs one more round trip and a wake-up, but overlaps with the caller's work. Forms are predicted on
gloo alone. At any time either the thread has jobs or the caller has early posts, never both, so they share no lock.

An abort is delivered in order: `receive` first returns all messages sent before it. The caller must not write to a sent
tensor until `flush` returns. Each channel has its own number within its group; on NCCL, which has no tags, each channel has
its own group.

A thread that waits in the transport wakes up only through the peer, or when the group ends. It must end before the
interpreter does, because a thread that wakes up during finalization aborts the process.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cache, partial
from queue import Empty, SimpleQueue
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.device import set_current
from shoal.errors import CollectiveFailed, CollectiveTimeout, ShoalError, StageFailed
from shoal.pipeline.message import (
    ABORT,
    AHEAD,
    FILLER,
    HEADER_TAG,
    KNOWN_FORMS,
    NEW_FORM,
    TEXT_TAG,
    FormPredictor,
    is_small,
    tensor_tag,
)
from shoal.pipeline.value_tree import TensorMeta, TreeSpec, flatten_tree
from shoal.pipeline.wire import NO_TIMEOUT, Wire, WireTransfer
from shoal.tier.streams import CopyEvent, side_stream
from shoal.transport.collectives import traffic

__all__ = ["ChannelEndpoint", "Receiver", "Sender"]

WATCHED_BYTES, WATCHED_MESSAGES = 1 << 16, 64
"""Posted bytes, or messages, that are worth waking the thread for; fewer are held until `flush`."""


class ChannelEndpoint(ABC):
    """This rank's end of channel `number` with rank `peer` of `group`: its wire, its thread, and the thread's orderly end.

    `name` names the channel in errors, as in "activations of stage 1 from stage 0".
    """

    close_timeout: float
    """Seconds that `close` waits for messages in flight."""

    def __init__(self, group: dist.ProcessGroup, peer: int, number: int, *, device: torch.device, timeout: float, name: str):
        self._wire = Wire(group, peer, number, device)
        self._timeout = timeout
        self._name = name
        self._label = f"rank {dist.get_rank()}: {name}"
        self._device = device
        self._stream = side_stream(device)
        self._thread = threading.Thread(target=self._run, name=f"shoal-pipeline {name}", daemon=True)
        _close_all_at_exit()
        _open_endpoints.add(self)
        self._thread.start()

    def close(self) -> None:
        """End the thread. A thread that waits for its peer, for a message or for room for one, keeps waiting."""
        self.stop()
        self._thread.join(self.close_timeout)

    @abstractmethod
    def stop(self) -> None:
        """Tell the thread to end after its current work."""

    def force_close(self) -> None:
        """End a thread that still waits for its peer, and the group with it."""
        self._thread.join(self.close_timeout)
        if self._thread.is_alive():
            self._wire.break_waits()
            self._thread.join(1)

    def _run(self) -> None:
        set_current(self._device)  # of a new thread the first device is current
        with self._stream.use():
            while self._run_next():
                pass

    @abstractmethod
    def _run_next(self) -> bool:
        """Run the thread's next job; return whether the thread goes on."""

    def _broken(self, error: object) -> CollectiveFailed:
        return CollectiveFailed(f"{self._label} broke: {error}. If rank {self._wire.peer} died or closed its connection, "
                                f"the error in the output of that rank is the cause")


_open_endpoints: WeakSet[ChannelEndpoint] = WeakSet()


@cache
def _close_all_at_exit() -> None:
    """Close open endpoints at exit. Registered after the groups were made, it runs before they are destroyed."""
    atexit.register(_close_all)
    os.register_at_fork(after_in_child=partial(atexit.unregister, _close_all))  # the connections are this process's


def _close_all() -> None:
    for endpoint in list(_open_endpoints):
        endpoint.stop()
    for endpoint in list(_open_endpoints):
        endpoint.force_close()


class Sender(ChannelEndpoint):
    """The sending end: it posts messages, and a thread releases their tensors as soon as they are sent."""

    close_timeout = 2.0

    def __init__(self, group: dist.ProcessGroup, peer: int, number: int, *, device: torch.device, timeout: float, name: str):
        self._posted: list[WireTransfer] = []
        self._posted_bytes = self._announced = self._watched = self._released = 0
        self._watch_queue: SimpleQueue[list[WireTransfer] | SimpleQueue[None] | None] = SimpleQueue()
        self._forms: dict[bytes, int] = {}
        self._headers: dict[int, Tensor] = {}
        self._small_sizes: dict[int, tuple[int, ...] | None] = {}
        self._form_count = self._message_count = 0
        self._predictor = FormPredictor()
        self._failure: str | None = None
        super().__init__(group, peer, number, device=device, timeout=timeout, name=name)

    def expect(self, count: int) -> None:
        """Announce that `count` more messages will be sent; at the last of them the thread gets all that are posted."""
        self._announced = self._message_count + count

    def send(self, value: object) -> None:
        """Start sending `value`: tensors, containers of them, and objects that pickle.

        Raises `UsageError` that names a part that cannot be sent, and `CollectiveFailed` if the peer is gone.
        """
        spec, tensors = flatten_tree(value, self._name)
        ready = [tensor.detach().contiguous().resolve_conj().resolve_neg() for tensor in tensors]
        carried = [tensor.to(self._wire.carrier(on_host=tensor.device.type == "cpu")) for tensor in ready]
        form, header = self._header(spec, carried)
        tag = tensor_tag(form)
        self._post([*self._preamble(form, header), *[(tag, tensor) for tensor in carried]])
        self._predictor.record(form)
        self._message_count += 1
        if (self._posted_bytes >= WATCHED_BYTES or len(self._posted) >= WATCHED_MESSAGES
                or self._message_count == self._announced):
            self._watch()

    def flush(self) -> None:
        """Return when all messages are sent.

        Raises `CollectiveTimeout` after `timeout` seconds, `CollectiveFailed` if the peer is gone.
        """
        self._watch()
        if self._released < self._watched:
            reached: SimpleQueue[None] = SimpleQueue()
            self._watch_queue.put(reached)
            try:
                reached.get(timeout=self._timeout)
            except Empty:
                raise CollectiveTimeout(f"{self._label}: rank {self._wire.peer} did not receive them within "
                                        f"{self._timeout:g} s: it took a different path, stopped, or is that slow; raise "
                                        f"\"timeout\"") from None
        if self._failure is not None:
            raise self._broken(self._failure)

    def abort(self, message: str) -> None:
        """Make the peer's `receive` raise `StageFailed` with `message`. No further message can be sent."""
        text = self._wire.pack_bytes(message.encode())
        self._post(self._preamble(ABORT, [(HEADER_TAG, self._wire.pack_integers(ABORT, text.nbytes)), (TEXT_TAG, text)]))
        self._watch()

    def stop(self) -> None:
        self._watch()
        self._watch_queue.put(None)

    def _header(self, spec: bytes, tensors: list[Tensor]) -> tuple[int, list[tuple[int, Tensor]]]:
        """Return the number of a form, and its header and text with their tags."""
        form = self._forms.pop(spec, self._form_count)
        self._forms[spec] = form
        if form < self._form_count:
            return form, [(HEADER_TAG, self._headers[form])]
        self._form_count += 1
        self._headers[form] = self._wire.pack_integers(form, 0)
        if form < KNOWN_FORMS:
            sizes = tuple(tensor.nbytes for tensor in tensors)
            self._small_sizes[form] = sizes if is_small(sizes) else None
        if len(self._forms) > KNOWN_FORMS:
            del self._headers[self._forms.pop(next(iter(self._forms)))]
        return form, [(HEADER_TAG, self._wire.pack_integers(NEW_FORM, len(spec))), (TEXT_TAG, self._wire.pack_bytes(spec))]

    def _preamble(self, form: int, header: list[tuple[int, Tensor]]) -> list[tuple[int, Tensor]]:
        """Return the prefix of the tensors of the next message: its header, unless both ends predicted a small form."""
        predicted = self._predictor.predict(self._message_count) if self._wire.early_receives_are_free else -1
        sizes = self._small_sizes[predicted] if predicted >= 0 else None
        if sizes is None:
            return header
        if predicted == form:
            return []
        tag = tensor_tag(predicted)
        return [*((tag, _filler(size)) for size in sizes), *header]

    def _post(self, message: Sequence[tuple[int, Tensor]]) -> None:
        if self._failure is not None:
            raise self._broken(self._failure)
        size = sum(tensor.nbytes for _, tensor in message)
        traffic.count("pipeline", size)
        try:
            self._posted.append(self._wire.send(message))
        except RuntimeError as error:
            raise self._broken(error) from error
        self._posted_bytes += size

    def _watch(self) -> None:
        """Pass the posted transfers to the thread, which waits for them and releases them."""
        posted, self._posted, self._posted_bytes = self._posted, [], 0
        if posted:
            self._watched += len(posted)
            self._watch_queue.put(posted)

    def _run_next(self) -> bool:
        match self._watch_queue.get():
            case None:
                return False
            case list() as posted:
                while posted:
                    self._release(posted.pop(0))
                    self._released += 1
            case reached:
                reached.put(None)
        return True

    def _release(self, transfer: WireTransfer) -> None:
        """Hold a message until it is sent."""
        try:
            transfer.wait()
            self._stream.record_event().synchronize()
        except RuntimeError as error:
            self._failure = str(error)  # the error itself would keep the sent tensors alive


def _filler(size: int) -> Tensor:
    if not size:
        return torch.empty(0, dtype=torch.float32, device="cpu")
    return torch.frombuffer(bytearray(FILLER + bytes(size))[:size], dtype=torch.uint8)


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
    """The receiving end; it accepts at most `AHEAD` messages before the caller asks for them."""

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
