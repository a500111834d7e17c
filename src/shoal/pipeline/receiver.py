"""The far end of a channel: it takes messages in before they are asked for, some of them.

    the form of the next message    who takes it in
    is foreseen                     the caller of `receive`, for whom the tensors were asked for early
    is not                          a thread, which reads the header, makes room, and waits for the tensors

The second takes a round trip more, and a thread to wake, but overlaps with whatever the caller does. Forms are foreseen on
gloo alone. At any time either the thread has turns or the caller has posts, never both, so that they share no lock.
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
from shoal.pipeline.channel_endpoint import ChannelEndpoint
from shoal.pipeline.message import ABORT, AHEAD, FILLER, HEADERS, KNOWN, NEW, TEXTS, FormPredictor, tag_of
from shoal.pipeline.value_tree import Form, Skeleton
from shoal.pipeline.wire import EVER, WireTransfer
from shoal.tier.streams import CopyEvent

__all__ = ["Receiver"]


@dataclass(slots=True)
class _Post:
    """A message that was asked for: a form that is foreseen, or -1, and a header, unless that is foreseen too."""

    foreseen: int
    words: Tensor | None
    header: WireTransfer | None


@dataclass(slots=True)
class _ArrivingMessage:
    number: int
    skeleton: Skeleton
    tensors: list[Tensor]
    event: CopyEvent
    """Where the tensors are written."""


class Receiver(ChannelEndpoint):
    """The far end of channel `number` from rank `peer` of `group`; holds at most `AHEAD` messages that nobody asked for."""

    patience = 0.1

    def __init__(self, group: dist.ProcessGroup, peer: int, number: int, *, device: torch.device, timeout: float, what: str):
        self._expected = self._asked = self._begun = self._taken = 0
        self._turns: SimpleQueue[bool] = SimpleQueue()
        self._arrived: SimpleQueue[_ArrivingMessage | ShoalError] = SimpleQueue()
        self._posts: deque[_Post] = deque()
        self._over: ShoalError | None = None
        self._known: dict[int, Skeleton] = {}
        self._forms = 0
        self._foresight = FormPredictor()
        self._offered: dict[int, deque[WireTransfer]] = {}
        super().__init__(group, peer, number, device=device, timeout=timeout, what=what)

    def expect(self, count: int) -> None:
        """Announce that `count` more messages will be received."""
        self._expected += count
        self._begin()

    def receive(self) -> Any:
        """Return the next value; its floating tensors are leaves that require gradients if they did at the other end.

        Raises `StageFailed` with the words of an abort, `CollectiveFailed` where the other end is gone, and
        `CollectiveTimeout` after `timeout` seconds.
        """
        assert self._asked < self._expected, f"{self._what}: receive without expect"
        if self._over is not None:
            raise self._over
        self._asked += 1
        self._begin()
        arrival = self._finish_here(self._posts.popleft()) if self._posts else self._wait()
        if isinstance(arrival, ShoalError):
            self._over = arrival
            raise arrival
        self._taken += 1
        self._foresight.came(arrival.number)
        arrival.event.stream_wait()
        for tensor, form in zip(arrival.tensors, arrival.skeleton.forms, strict=True):
            self._stream.keep_for_compute(tensor)
            tensor.requires_grad_(form.requires_grad)
        return arrival.skeleton.build(arrival.tensors)

    def stop(self) -> None:
        self._turns.put(False)

    def _begin(self) -> None:
        """Begin to take in what is expected, as far as there is room."""
        while self._begun < min(self._expected, self._asked + AHEAD):
            turns = self._begun - self._taken - len(self._posts)
            foreseen = self._foresight.of(self._begun) if self._wire.waits_idly else -1
            if foreseen >= 0 and not turns:
                self._posts.append(self._post(foreseen))
            elif foreseen < 0 and not self._posts:
                self._turns.put(True)
            else:  # whoever is at it goes on until nothing is left
                return
            self._begun += 1

    def _post(self, foreseen: int) -> _Post:
        """Ask for the tensors that are foreseen, and for a header where one comes."""
        if foreseen < 0:
            return self._with_header(foreseen)
        offered = self._offered.setdefault(foreseen, deque())
        if len(offered) == sum(post.foreseen == foreseen for post in self._posts):  # else one was left over
            offered.append(self._offer(foreseen))
        return _Post(foreseen, None, None) if self._known[foreseen].small else self._with_header(foreseen)

    def _with_header(self, foreseen: int) -> _Post:
        words = self._wire.words(0, 0)
        return _Post(foreseen, words, self._wire.receive([words], HEADERS))

    def _wait(self) -> _ArrivingMessage | ShoalError:
        """Wait for the thread."""
        try:
            return self._arrived.get(timeout=self._timeout)
        except Empty:
            return self._late()

    def _finish_here(self, post: _Post) -> _ArrivingMessage | ShoalError:
        try:
            return self._finish(post, timedelta(seconds=self._timeout))
        except RuntimeError as error:
            return self._late() if "imed out" in str(error) else self._broke(error)

    def _next(self) -> bool:
        if not self._turns.get():
            return False
        try:
            arrival = self._finish(self._post(-1), EVER)
        except Exception as error:  # whatever it is, it is raised where the caller waits
            arrival = self._broke(error)
        self._arrived.put(arrival)
        return not isinstance(arrival, ShoalError)

    def _finish(self, post: _Post, timeout: timedelta) -> _ArrivingMessage | StageFailed:
        """Take in one message."""
        if post.header is None:
            transfer = self._offered[post.foreseen].popleft()
            transfer.wait(timeout)
            if not _is_filler(transfer):
                return self._arrival(post.foreseen, self._learn(post.foreseen), transfer)
            post = self._with_header(-1)
        number, text = self._read(post, timeout)
        if number == ABORT:
            return StageFailed(text.decode())
        if number == NEW:
            number, self._forms = self._forms, self._forms + 1
        skeleton = self._learn(number, text)
        offered = self._offered.get(number)
        transfer = offered.popleft() if offered else self._offer(number)
        transfer.wait(timeout)
        return self._arrival(number, skeleton, transfer)

    def _arrival(self, number: int, skeleton: Skeleton, transfer: WireTransfer) -> _ArrivingMessage:
        tensors = [tensor.to(self._wire.rest(on_host=form.on_host))
                   for tensor, form in zip(transfer.tensors, skeleton.forms, strict=True)]
        return _ArrivingMessage(number, skeleton, tensors, self._stream.record_event())

    def _read(self, post: _Post, timeout: timedelta) -> tuple[int, bytes]:
        """Return what a header announces: the number of a form, or what it is in its place, and the text."""
        assert post.words is not None and post.header is not None
        post.header.wait(timeout)
        number, size = post.words.tolist()
        if size == 0:
            return number, b""
        text = self._wire.text(bytes(size))
        self._wire.receive([text], TEXTS).wait(timeout)
        return number, text.cpu().numpy().tobytes()

    def _learn(self, number: int, text: bytes = b"") -> Skeleton:
        """Return the form of a message; the sender numbers and forgets likewise."""
        skeleton = self._known.pop(number, None) or Skeleton(text)
        if len(self._known) == KNOWN:
            del self._known[next(iter(self._known))]
        self._known[number] = skeleton
        return skeleton

    def _offer(self, number: int) -> WireTransfer:
        """Make room for the tensors of a message of a known form, and ask for them."""
        return self._wire.receive([self._room(form) for form in self._known[number].forms], tag_of(number))

    def _room(self, form: Form) -> Tensor:
        return torch.empty(form.shape, dtype=form.dtype, device=self._wire.way(on_host=form.on_host))

    def _late(self) -> CollectiveFailed:
        return CollectiveTimeout(f"{self._where} did not come from rank {self._wire.peer} within {self._timeout:g} s: it "
                                 f"took a different path, stopped, or is that slow; raise \"timeout\"")


def _is_filler(transfer: WireTransfer) -> bool:
    first = next(tensor for tensor in transfer.tensors if tensor.numel())
    return ctypes.string_at(first.data_ptr(), len(FILLER)) == FILLER
