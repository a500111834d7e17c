"""Which units of a tensor each rank sends to each other: the one description of what attention exchanges.

A tensor (batch, heads, length, dim) is cut into units, a head's share of rows: all rows that a rank has, or blocks of them.
A plan says by peer which units are sent, and where in the result they go. Gradients take the same way back: where one unit
went to several ranks, its gradient is the sum of what they return, in rank order and in fp32.

    exchange   units -> the ranks that compute with them        heads for sequence (Ulysses), or blocks of keys and values
    give back  their gradients -> the ranks that sent them      the same table, read from right to left
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from shoal.device import HOST, kept_for_stream
from shoal.sequence_parallel.axis import SequenceAxis
from shoal.transport.reduction import wide_dtype

__all__ = ["EXCHANGE", "RETURN", "Moves", "Operand", "SentBytes", "exchange", "give_back"]

EXCHANGE, RETURN = "sequence exchange", "sequence return"
"""The kinds of messages: the way there, and the way back."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Moves:
    """The sends and receives that redistribute the units of one tensor. Entries of this rank itself are copies.

    A table equals itself alone: it is made once, and kept on each device.
    """

    send: tuple[Tensor, ...]
    """By peer, the units that this rank sends to it: int64 on the host, ascending."""
    receive: tuple[Tensor, ...]
    """By peer, the positions in the result of the units that it sends here."""
    units: int
    """Units of the tensor."""
    results: int
    """Units of the result; those that no rank sends are zeros."""
    shared: bool
    """Whether a unit goes to several ranks."""

    @property
    def covers(self) -> bool:
        """Whether every unit of the result is written."""
        return sum(map(len, self.receive)) == self.results

    def on(self, device: torch.device) -> Moves:
        """Return the same table on `device`."""
        return self if device == HOST else _placed(device, self)


@kept_for_stream
def _placed(device: torch.device, moves: Moves) -> Moves:
    return replace(moves, send=tuple(each.to(device) for each in moves.send),
                   receive=tuple(each.to(device) for each in moves.receive))


@dataclass(frozen=True, slots=True, kw_only=True)
class SentBytes:
    """The bytes that one rank sends to others for one attention."""

    forward: int
    backward: int

    @property
    def total(self) -> int:
        return self.forward + self.backward


@dataclass(frozen=True, slots=True)
class Operand:
    """A tensor (batch, units, elements of a unit), and what happens to it."""

    tensor: Tensor
    moves: Moves


def exchange(axis: SequenceAxis, facts: str, operands: Sequence[Operand], *, kind: str = EXCHANGE) -> list[Tensor]:
    """Return the results (batch, result units, elements), sent in one message to each rank. Wide dtypes come first."""
    tables = [operand.moves.on(operand.tensor.device) for operand in operands]
    tensors = [operand.tensor for operand in operands]
    swap = axis.swap(kind, facts, [_packed(tensors, [table.send[peer] for table in tables], skip=peer == axis.rank)
                                   for peer in range(axis.ranks)],
                     [0 if peer == axis.rank else sum(_bytes(tensor, len(table.receive[peer]))
                                                      for tensor, table in zip(tensors, tables, strict=True))
                      for peer in range(axis.ranks)])
    results = [tensor.new_empty(tensor.shape[0], table.results, tensor.shape[2]) if table.covers else
               tensor.new_zeros(tensor.shape[0], table.results, tensor.shape[2])
               for tensor, table in zip(tensors, tables, strict=True)]
    for tensor, table, result in zip(tensors, tables, results, strict=True):
        result.index_copy_(1, table.receive[axis.rank], tensor.index_select(1, table.send[axis.rank]))
    for peer, received in enumerate(swap.wait()):
        parts = _unpacked(received, tensors, [len(table.receive[peer]) for table in tables]) if peer != axis.rank else ()
        for part, table, result in zip(parts, tables, results, strict=False):
            result.index_copy_(1, table.receive[peer], part)
    return results


def give_back(axis: SequenceAxis, facts: str, gradients: Sequence[Operand], *, kind: str = RETURN) -> list[Tensor]:
    """Return the gradients of what `exchange` was given, from those of its results, in the dtypes of these."""
    tables = [gradient.moves.on(gradient.tensor.device) for gradient in gradients]
    tensors = [gradient.tensor for gradient in gradients]
    swap = axis.swap(kind, facts, [_packed(tensors, [table.receive[peer] for table in tables], skip=peer == axis.rank)
                                   for peer in range(axis.ranks)],
                     [0 if peer == axis.rank else sum(_bytes(tensor, len(table.send[peer]))
                                                      for tensor, table in zip(tensors, tables, strict=True))
                      for peer in range(axis.ranks)])
    totals = [tensor.new_zeros(tensor.shape[0], table.units, tensor.shape[2],
                               dtype=wide_dtype(tensor.dtype) if table.shared else tensor.dtype)
              for tensor, table in zip(tensors, tables, strict=True)]
    for peer, received in enumerate(swap.wait()):
        parts = ([tensor.index_select(1, table.receive[peer]) for tensor, table in zip(tensors, tables, strict=True)]
                 if peer == axis.rank else _unpacked(received, tensors, [len(table.send[peer]) for table in tables]))
        for part, table, total in zip(parts, tables, totals, strict=True):
            if table.shared:
                total.index_add_(1, table.send[peer], part.to(total.dtype))
            else:
                total.index_copy_(1, table.send[peer], part)
    return [total.to(tensor.dtype) for total, tensor in zip(totals, tensors, strict=True)]


def _packed(tensors: Sequence[Tensor], units: Sequence[Tensor], *, skip: bool) -> Tensor:
    """Return the bytes of some units of each tensor; none for one's own rank."""
    if skip:
        return torch.empty(0, dtype=torch.uint8, device=tensors[0].device)
    return torch.cat([tensor.index_select(1, some).view(-1).view(torch.uint8)
                      for tensor, some in zip(tensors, units, strict=True)])


def _unpacked(received: Tensor, tensors: Sequence[Tensor], counts: Sequence[int]) -> list[Tensor]:
    """Return the units (batch, count, elements) of each tensor that `received` holds."""
    parts = received.split([_bytes(tensor, count) for tensor, count in zip(tensors, counts, strict=True)])
    return [part.view(tensor.dtype).view(tensor.shape[0], count, tensor.shape[2])
            for part, tensor, count in zip(parts, tensors, counts, strict=True)]


def _bytes(tensor: Tensor, units: int) -> int:
    return tensor.shape[0] * units * tensor.shape[2] * tensor.element_size()
