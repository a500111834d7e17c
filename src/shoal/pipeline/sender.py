"""The near end of a channel: it posts messages, and a thread lets go of them as soon as they are sent."""

from __future__ import annotations

from collections.abc import Sequence
from queue import Empty, SimpleQueue

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.errors import CollectiveTimeout
from shoal.pipeline.channel_endpoint import ChannelEndpoint
from shoal.pipeline.message import ABORT, FILLER, HEADERS, KNOWN, NEW, TEXTS, FormPredictor, is_small, tag_of
from shoal.pipeline.value_tree import flatten_tree
from shoal.pipeline.wire import WireTransfer
from shoal.transport.collectives import traffic

__all__ = ["Sender"]

WATCHED_BYTES, WATCHED = 1 << 16, 64
"""So many bytes, or messages, are worth waking the thread that lets go of them; fewer stay until `flush`."""


class Sender(ChannelEndpoint):
    """The near end of channel `number` to rank `peer` of `group`.

    `what` names it in errors, as in "activations of stage 1 from stage 0".
    """

    patience = 2.0

    def __init__(self, group: dist.ProcessGroup, peer: int, number: int, *, device: torch.device, timeout: float, what: str):
        self._posted: list[WireTransfer] = []
        self._posted_bytes = self._announced = self._handed = self._gone = 0
        self._sent: SimpleQueue[list[WireTransfer] | SimpleQueue[None] | None] = SimpleQueue()
        self._known: dict[bytes, int] = {}
        self._headers: dict[int, Tensor] = {}
        self._small: dict[int, tuple[int, ...] | None] = {}
        self._forms = self._count = 0
        self._foresight = FormPredictor()
        self._failure: str | None = None
        super().__init__(group, peer, number, device=device, timeout=timeout, what=what)

    def expect(self, count: int) -> None:
        """Announce that `count` more messages will be sent: after the last of them, nothing is kept back until `flush`."""
        self._announced = self._count + count

    def send(self, value: object) -> None:
        """Start sending `value`: tensors, containers of them, and objects that pickle.

        Raises `UsageError` naming what cannot travel, `CollectiveFailed` where the other end is gone.
        """
        skeleton, tensors = flatten_tree(value, self._what)
        ready = [tensor.detach().contiguous().resolve_conj().resolve_neg() for tensor in tensors]
        carried = [tensor.to(self._wire.way(on_host=tensor.device.type == "cpu")) for tensor in ready]
        number, header = self._header(skeleton, carried)
        tag = tag_of(number)
        self._post([*self._opening(number, header), *[(tag, tensor) for tensor in carried]])
        self._foresight.came(number)
        self._count += 1
        if self._posted_bytes >= WATCHED_BYTES or len(self._posted) >= WATCHED or self._count == self._announced:
            self._watch()

    def flush(self) -> None:
        """Return when all is sent.

        Raises `CollectiveTimeout` after `timeout` seconds, `CollectiveFailed` where the other end is gone.
        """
        self._watch()
        if self._gone < self._handed:
            reached: SimpleQueue[None] = SimpleQueue()
            self._sent.put(reached)
            try:
                reached.get(timeout=self._timeout)
            except Empty:
                raise CollectiveTimeout(f"{self._where}: rank {self._wire.peer} did not take them within "
                                        f"{self._timeout:g} s: it took a different path, stopped, or is that slow; raise "
                                        f"\"timeout\"") from None
        if self._failure is not None:
            raise self._broke(self._failure)

    def abort(self, message: str) -> None:
        """Have the other end's `receive` raise `StageFailed` with `message`. Nothing can be sent any more."""
        text = self._wire.text(message.encode())
        self._post(self._opening(ABORT, [(HEADERS, self._wire.words(ABORT, text.nbytes)), (TEXTS, text)]))
        self._watch()

    def stop(self) -> None:
        self._watch()
        self._sent.put(None)

    def _header(self, skeleton: bytes, tensors: list[Tensor]) -> tuple[int, list[tuple[int, Tensor]]]:
        """Return the number of a form, and what announces it, with tags."""
        number = self._known.pop(skeleton, self._forms)
        self._known[skeleton] = number
        if number < self._forms:
            return number, [(HEADERS, self._headers[number])]
        self._forms += 1
        self._headers[number] = self._wire.words(number, 0)
        if number < KNOWN:
            sizes = tuple(tensor.nbytes for tensor in tensors)
            self._small[number] = sizes if is_small(sizes) else None
        if len(self._known) > KNOWN:
            del self._headers[self._known.pop(next(iter(self._known)))]
        return number, [(HEADERS, self._wire.words(NEW, len(skeleton))), (TEXTS, self._wire.text(skeleton))]

    def _opening(self, number: int, header: list[tuple[int, Tensor]]) -> list[tuple[int, Tensor]]:
        """Return what goes before the tensors of the next message: its header, unless both ends foresee a small form."""
        foreseen = self._foresight.of(self._count) if self._wire.waits_idly else -1
        sizes = self._small[foreseen] if foreseen >= 0 else None
        if sizes is None:
            return header
        if foreseen == number:
            return []
        tag = tag_of(foreseen)
        return [*((tag, _filler(size)) for size in sizes), *header]

    def _post(self, message: Sequence[tuple[int, Tensor]]) -> None:
        if self._failure is not None:
            raise self._broke(self._failure)
        size = sum(tensor.nbytes for _, tensor in message)
        traffic.count("pipeline", size)
        try:
            self._posted.append(self._wire.send(message))
        except RuntimeError as error:
            raise self._broke(error) from error
        self._posted_bytes += size

    def _watch(self) -> None:
        """Have the thread wait for what was posted, and let go of it."""
        posted, self._posted, self._posted_bytes = self._posted, [], 0
        if posted:
            self._handed += len(posted)
            self._sent.put(posted)

    def _next(self) -> bool:
        match self._sent.get():
            case None:
                return False
            case list() as posted:
                while posted:
                    self._let_go(posted.pop(0))
                    self._gone += 1
            case reached:
                reached.put(None)
        return True

    def _let_go(self, transfer: WireTransfer) -> None:
        """Hold a message until it is sent."""
        try:
            transfer.wait()
            self._stream.record_event().synchronize()
        except RuntimeError as error:
            self._failure = str(error)  # not the error itself, which would hold what was sent


def _filler(size: int) -> Tensor:
    return torch.frombuffer(bytearray(FILLER + bytes(size))[:size], dtype=torch.uint8) if size else torch.empty(0)
