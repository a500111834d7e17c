"""One decision for all ranks before any unit steps: the global norm, overflow, and who received a gradient.

Every rank sums the squares of the spans that it owns, and the sums are added in rank order: an element counts once, and
the norm has the same bits at every stage. An overflow anywhere makes the norm infinite or NaN everywhere.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from math import isfinite, sqrt

import torch

from shoal.collectives import Communicator
from shoal.zero.unit import Unit

_WORD_BITS = 62


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What all ranks know of the gradients before a step."""

    norm: float | None
    """Of the gradients as they are (still scaled by the loss scale); None when it was not asked for."""
    touched: dict[Unit, int]
    """For each unit a bit for each slot that received a gradient on some rank."""

    @property
    def overflow(self) -> bool:
        return self.norm is not None and not isfinite(self.norm)


def judge(units: list[Unit], communicator: Communicator, *, norm: bool) -> Verdict:
    """Agree over the ranks on the norm of the reduced gradients (if asked for) and on who received one."""
    squares = _squares(units) if norm else 0.0
    masks = [unit.gradient.touched for unit in units if unit.gradient is not None]
    words = [_to_word(squares), *(word for unit, mask in zip(units, masks, strict=True)
                                                     for word in _to_words(mask, len(unit.members)))]
    device = units[0].full.device if units else torch.device("cpu")
    rows: list[list[int]] = communicator.gather_words(torch.tensor(words, dtype=torch.int64, device=device)).tolist()
    total = sum(_from_word(row[0]) for row in rows)
    merged = [0] * len(words)
    for row in rows:
        merged = [word | other for word, other in zip(merged, row, strict=True)]
    touched: dict[Unit, int] = {}
    position = 1
    for unit in units:
        count = len(_to_words(0, len(unit.members)))
        touched[unit] = sum(word << i * _WORD_BITS for i, word in enumerate(merged[position:position + count]))
        position += count
    return Verdict(norm=(sqrt(total) if isfinite(total) else total) if norm else None, touched=touched)


def _squares(units: list[Unit]) -> float:
    """Return the sum of squares of the gradients that this rank owns."""
    norms = [unit.gradient.norm() for unit in units if unit.gradient is not None]
    return sum(value * value for value in torch.stack([norm.double() for norm in norms]).tolist()) if norms else 0.0


def _to_word(value: float) -> int:
    return struct.unpack("<q", struct.pack("<d", value))[0]


def _from_word(word: int) -> float:
    return struct.unpack("<d", struct.pack("<q", word))[0]


def _to_words(mask: int, bits: int) -> list[int]:
    return [mask >> start & ((1 << _WORD_BITS) - 1) for start in range(0, bits, _WORD_BITS)]
