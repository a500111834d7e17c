"""The sending end of a channel: it posts messages, and a thread releases their tensors as soon as they are sent."""

from __future__ import annotations

from collections.abc import Sequence
from queue import Empty, SimpleQueue

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.errors import CollectiveTimeout
from shoal.pipeline.channel import ChannelEndpoint
from shoal.pipeline.message import (
    ABORT,
    FILLER,
    HEADER_TAG,
    KNOWN_FORMS,
    NEW_FORM,
    TEXT_TAG,
    FormPredictor,
    is_small,
    tensor_tag,
)
from shoal.pipeline.value_tree import flatten_tree
from shoal.pipeline.wire import WireTransfer
from shoal.transport.collectives import traffic

__all__ = ["Sender"]

WATCHED_BYTES, WATCHED_MESSAGES = 1 << 16, 64
"""Posted bytes, or messages, that are worth waking the thread for; fewer are held until `flush`."""


class Sender(ChannelEndpoint):
    """The sending end of channel `number` to rank `peer` of `group`.

    `name` names the channel in errors, as in "activations of stage 1 from stage 0".
    """

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
        """Return what precedes the tensors of the next message: its header, unless both ends predicted a small form."""
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
    return torch.frombuffer(bytearray(FILLER + bytes(size))[:size], dtype=torch.uint8) if size else torch.empty(0)
