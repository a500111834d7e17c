"""Gradient statistics of all ranks before any unit steps: the global norm, overflow, and which slots have a gradient.

Every rank sums the squares of the shards that it owns, and the sums are added in rank order. Each element counts once, and
the norm has the same bits at every stage. An overflow on any rank makes the norm infinite or NaN on all ranks.

The norm stays on the device until something on the host asks for it, so that a step need not wait for backward. The masks
are the host's, and travel between hosts where the group has a backend for that.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, reduce
from math import isfinite
from operator import or_

import torch
from torch import Tensor

from shoal.mesh.parameter_groups import ParameterGroups
from shoal.zero.trainable_unit import TrainableUnit

_WORD_BITS = 62


class GlobalNorm:
    """The norm of all gradients, a number on the device of the weights."""

    def __init__(self, tensor: Tensor):
        self.tensor = tensor
        """fp64, of no dimensions."""

    @cached_property
    def value(self) -> float:
        """The norm on the host. The first read waits for the device."""
        return self.tensor.item()

    def __truediv__(self, scale: float) -> GlobalNorm:
        divided = GlobalNorm(self.tensor / scale)
        if "value" in vars(self):  # the host has waited for it
            vars(divided)["value"] = self.value / scale
        return divided


@dataclass(frozen=True, slots=True, kw_only=True)
class GradStats:
    """Statistics of the reduced gradients, equal on all ranks."""

    norm: GlobalNorm | None
    """Global L2 norm of the gradients, still multiplied by the loss scale; None if it was not requested."""
    slots_with_grad: dict[TrainableUnit, int]
    """Per unit a bit mask: bit i is set if slot i received a gradient on any rank."""

    @property
    def overflow(self) -> bool:
        return self.norm is not None and not isfinite(self.norm.value)


def reduce_grad_stats(units: list[TrainableUnit], parameter_groups: ParameterGroups, *, norm: bool,
                      device: torch.device) -> GradStats:
    """Reduce the `norm` of the gradients (if requested) over all ranks, and each unit's mask of slots with a gradient over
    its replica group. The weights, and the norm, are on `device`.
    """
    world = parameter_groups.world
    squares = _squares(units, device).view(1).view(torch.int64) if norm else None
    slots_with_grad: dict[TrainableUnit, int] = {}
    sums: Tensor | None = None
    for communicator in parameter_groups.communicators:
        held = [unit for unit in units if communicator in (unit.communicator, unit.replica_group.replicas)]
        masks = [slots_with_grad.get(unit, unit.gradient.accumulator.slots_with_grad) for unit in held]
        words = [word for unit, mask in zip(held, masks, strict=True) for word in _to_words(mask, len(unit.members))]
        message = torch.tensor(words, dtype=torch.int64, device=communicator.words_device)
        joined = communicator is world and squares is not None and squares.device == message.device
        if joined:
            assert squares is not None
            message = torch.cat([message, squares])
        if not len(message):
            continue
        rows = communicator.gather_step_words(message)
        if joined:
            sums, rows = rows[:, -1], rows[:, :-1]
        slots_with_grad |= _masks(held, rows.tolist())
    if squares is not None and sums is None:
        sums = world.gather_words(squares, "the gradient norm").flatten()
    return GradStats(norm=None if sums is None else GlobalNorm(sums.contiguous().view(torch.float64).sum().sqrt()),
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


def _squares(units: list[TrainableUnit], device: torch.device) -> Tensor:
    """Return the sum of squares of the gradients that this rank owns, in fp64 on `device`; a replicated unit counts on its
    first copy only.
    """
    norms = [unit.gradient.norm() for unit in units if unit.replica_group.is_first_copy]
    return torch.stack(norms).double().square().sum() if norms else torch.zeros((), dtype=torch.float64, device=device)


def _to_words(mask: int, bits: int) -> list[int]:
    return [mask >> start & ((1 << _WORD_BITS) - 1) for start in range(0, bits, _WORD_BITS)]
