"""How a reader takes a text: a sparse one whole, a dense one in pieces; and the blocks that it sees of what it takes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

import structure
from shoal.attention import Blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """`name` is "dense" or "sparse"; a sample has `times` pieces of `dense` bytes; the model has `heads`."""

    name: str
    dense: int
    times: int
    heads: int

    def blocks(self, text: Tensor) -> Blocks:
        """Return what a reader sees of `text` (length + 1,) when it takes it at once."""
        if self.name == "dense":
            return structure.dense(len(text) - 1)
        return structure.sparse(bytes(text[:-1].tolist()), self.heads)


def pieces(sample: Tensor, way: Way) -> Iterator[Tensor]:
    """Yield what a reader takes at once of a sample (length + 1,): parts (some + 1,), each with the byte after it."""
    span = way.dense if way.name == "dense" else len(sample) - 1
    for start in range(0, len(sample) - 1, span):
        yield sample[start:start + span + 1]


def bits_of(model: Callable[[Tensor, Blocks], Tensor], text: bytes, way: Way) -> Tensor:
    """Return the bits (len(text),) of every byte, the first from nothing but the end of another file.

    A dense reader moves on by half of its length at a time, so that it sees at least that much before a byte.
    """
    span = way.dense if way.name == "dense" else way.dense * way.times
    stride = span // 2 if way.name == "dense" else span
    stream = torch.frombuffer(bytearray(b"\0" + text), dtype=torch.uint8)
    bits = torch.empty(len(text))
    done = 0
    for start in range(0, len(text), stride):
        if done == len(text):
            break
        window = stream[start:start + span + 1]
        short = len(window) - 1
        window = F.pad(window, (0, -short % structure.BLOCK))
        found = model(window[None], way.blocks(window))[0, :short] / math.log(2)
        bits[done:start + short] = found[done - start:]
        done = start + short
    return bits
