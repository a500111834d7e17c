"""Uneven inputs: within `engine.join()` a rank whose data has ended takes part in the calls that other ranks still make.

Each rank says at every call of the engine which one it makes, or that its data has ended. A rank that has ended makes the
same calls: the forward of its last batch again, a backward whose gradients are zero, the step. So it issues the same
collectives in the same order at every stage. Buffers (the statistics of BatchNorm) keep their values.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from shoal.engine.progress import Progress
from shoal.errors import RanksDisagree, UsageError
from shoal.transport.collectives import Communicator
from shoal.tree import tensors_within, tree_map

__all__ = ["Join", "JoinedCall"]


class JoinedCall(IntEnum):
    """A call of the engine, as ranks announce it."""

    ENDED = 0
    """No more calls: the data has ended."""
    FORWARD = 1
    EVALUATION = 2
    """A forward without gradients."""
    BACKWARD = 3
    STEP = 4


class Joined(Protocol):
    """The part of an engine that `Join` uses."""

    module: nn.Module
    communicator: Communicator
    device: torch.device
    progress: Progress

    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...
    def backward(self, loss: Tensor) -> Tensor: ...
    def step(self) -> None: ...
    def is_gradient_accumulation_boundary(self) -> bool: ...
    def reduces_gradients(self) -> bool: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _Announced:
    """The present call of the ranks with data, as they announced it."""

    call: JoinedCall
    first: int
    """The first rank with data."""
    without_batch: list[int]
    """The ranks that never had a batch."""
    boundary: bool
    """Whether the microbatch ends a step."""
    sync: bool
    """Whether backward passes communicate."""


class Join:
    """The calls of one engine in a context of `engine.join()`."""

    def __init__(self, engine: Joined):
        self._engine = engine
        self._batch: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        self._outputs: list[Any] = []  # of forwards since the last backward, of a rank that has ended
        self._buffers: list[tuple[Tensor, Tensor]] = []
        self._has_ended = False

    def announce(self, call: JoinedCall, batch: tuple[tuple[Any, ...], dict[str, Any]] | None = None) -> None:
        """Tell the other ranks which call this rank makes; raises `RanksDisagree` where others make another."""
        if self._has_ended:
            return
        self._batch = batch or self._batch
        announced = self._exchange(call)
        self._give_batch(announced)

    def finish(self) -> None:
        """Make the calls of the other ranks until the data of all has ended."""
        self._has_ended = True
        while (announced := self._exchange(JoinedCall.ENDED)).call is not JoinedCall.ENDED:
            self._give_batch(announced)
            self._follow(announced)
        self._restore_buffers()

    def _follow(self, announced: _Announced) -> None:
        engine = self._engine
        with engine.progress.one_pass(boundary=announced.boundary, sync=announced.sync):
            match announced.call:
                case JoinedCall.FORWARD | JoinedCall.EVALUATION:
                    with torch.set_grad_enabled(announced.call is JoinedCall.FORWARD):
                        output = self._forward()
                    self._outputs += [output] if announced.call is JoinedCall.FORWARD else []
                case JoinedCall.BACKWARD:
                    engine.backward(self._zero_loss())
                case JoinedCall.STEP:
                    self._restore_buffers()
                    engine.step()
                case JoinedCall.ENDED:
                    raise AssertionError("no call to follow")

    def _forward(self) -> Any:
        """Run the last batch once more; `_restore_buffers` gives the buffers the values that they have now."""
        assert self._batch is not None
        if not self._buffers:
            self._buffers = [(buffer, buffer.detach().clone()) for buffer in self._engine.module.buffers()]
        return self._engine(*self._batch[0], **self._batch[1])

    @torch.no_grad()
    def _restore_buffers(self) -> None:
        """Undo what forwards changed in buffers; not before their backward, which may read them."""
        buffers, self._buffers = self._buffers, []
        for buffer, value in buffers:
            buffer.copy_(value)

    def _zero_loss(self) -> Tensor:
        """Return a loss that leads to zero gradients through the forwards since the last backward."""
        outputs, self._outputs = self._outputs, []
        found = [tensor for output in outputs for tensor in tensors_within(output) if tensor.requires_grad]
        if not found:
            raise UsageError("join: another rank calls backward, and the data of this rank has ended: no tensor with a "
                             "gradient was found in the output of its last forward; return tensors, or containers of "
                             "tensors, from the model")
        return torch.stack([tensor.float().sum() for tensor in found]).sum() * 0.0

    def _give_batch(self, announced: _Announced) -> None:
        """Send a batch to ranks that never had one, from the first rank that has."""
        if announced.call not in (JoinedCall.FORWARD, JoinedCall.EVALUATION) or not announced.without_batch:
            return
        rank = self._engine.communicator.rank
        batches = self._engine.communicator.gather_objects(self._batch if rank == announced.first else None)
        if rank in announced.without_batch:
            self._batch = tree_map(lambda tensor: tensor.to(self._engine.device), batches[announced.first])

    def _exchange(self, call: JoinedCall) -> _Announced:
        engine = self._engine
        own = [call, self._batch is None, engine.is_gradient_accumulation_boundary(), engine.reduces_gradients()]
        words = torch.tensor([int(word) for word in own], dtype=torch.int64, device=engine.communicator.words_device)
        rows = engine.communicator.gather_words(words, "a call within engine.join()").tolist()
        calls = {rank: JoinedCall(row[0]) for rank, row in enumerate(rows) if row[0]}
        if len({*calls.values()}) > 1:
            raise RanksDisagree("join: ranks make different calls: " + ", ".join(
                f"rank {rank} {made.name.lower()}" for rank, made in calls.items()) + "; let every rank with data make the "
                "same calls of the engine, in one order")
        first = next(iter(calls), 0)
        without_batch = [rank for rank, row in enumerate(rows) if row[1]]
        return _Announced(call=calls.get(first, JoinedCall.ENDED), first=first, without_batch=without_batch,
                     boundary=bool(rows[first][2]), sync=bool(rows[first][3]))
