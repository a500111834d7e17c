"""Gradient statistics of all ranks before any unit steps: the global norm, overflow, and which slots have a gradient.

Every rank sums the squares of the spans that it owns, and the sums are added in rank order. Each element counts once, and
the norm has the same bits at every stage. An overflow on any rank makes the norm infinite or NaN on all ranks.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import reduce
from math import isfinite, sqrt
from operator import or_

import torch

from shoal.mesh.parameter_groups import ParameterGroups
from shoal.zero.trainable_unit import TrainableUnit

_WORD_BITS = 62


@dataclass(frozen=True, slots=True, kw_only=True)
class GradStats:
    """Statistics of the reduced gradients, equal on all ranks."""

    norm: float | None
    """Global L2 norm of the gradients, still multiplied by the loss scale; None if it was not requested."""
    slots_with_grad: dict[TrainableUnit, int]
    """Per unit a bit mask: bit i is set if slot i received a gradient on any rank."""

    @property
    def overflow(self) -> bool:
        return self.norm is not None and not isfinite(self.norm)


def reduce_grad_stats(units: list[TrainableUnit], parameter_groups: ParameterGroups, *, norm: bool,
                      device: torch.device) -> GradStats:
    """Reduce the `norm` of the gradients (if requested) over all ranks, and each unit's mask of slots with a gradient over
    its replica group. The messages are tensors on `device`, the device of the weights.
    """
    total = 0.0
    slots_with_grad: dict[TrainableUnit, int] = {}
    for communicator in parameter_groups.communicators:
        held = [unit for unit in units if communicator in (unit.communicator, unit.replica_group.replicas)]
        masks = [slots_with_grad.get(unit, unit.gradient.accumulator.slots_with_grad) for unit in held]
        words = [word for unit, mask in zip(held, masks, strict=True) for word in _to_words(mask, len(unit.members))]
        if communicator is parameter_groups.world:
            words.append(_to_word(_squares(units) if norm else 0.0))
        if not words:
            continue
        rows: list[list[int]] = communicator.gather_words(torch.tensor(words, dtype=torch.int64, device=device)).tolist()
        if communicator is parameter_groups.world:
            total = sum(_from_word(row.pop()) for row in rows)
        slots_with_grad |= _masks(held, rows)
    return GradStats(norm=(sqrt(total) if isfinite(total) else total) if norm else None,
                     slots_with_grad={unit: slots_with_grad[unit] for unit in units})


def _masks(units: list[TrainableUnit], rows: list[list[int]]) -> dict[TrainableUnit, int]:
    """Return per unit the bitwise or of all ranks' masks, whose words are the columns of `rows`."""
    merged = [reduce(or_, column) for column in zip(*rows, strict=True)]
    masks: dict[TrainableUnit, int] = {}
    for unit in units:
        count = len(_to_words(0, len(unit.members)))
        mine, merged = merged[:count], merged[count:]
        masks[unit] = sum(word << i * _WORD_BITS for i, word in enumerate(mine))
    return masks


def _squares(units: list[TrainableUnit]) -> float:
    """Return the sum of squares of the gradients that this rank owns; a replicated unit counts on its first copy only."""
    norms = [unit.gradient.norm() for unit in units if unit.replica_group.is_first_copy]
    return sum(value * value for value in torch.stack([norm.double() for norm in norms]).tolist()) if norms else 0.0


def _to_word(value: float) -> int:
    return struct.unpack("<q", struct.pack("<d", value))[0]


def _from_word(word: int) -> float:
    return struct.unpack("<d", struct.pack("<q", word))[0]


def _to_words(mask: int, bits: int) -> list[int]:
    return [mask >> start & ((1 << _WORD_BITS) - 1) for start in range(0, bits, _WORD_BITS)]
