"""Bound the memory that training holds for a while beside the resting state: weights in use, gradients in flight, the step.

    forward    the units whose weights are in use or on their way, and pieces of the optimizer's state: a unit that comes
               and goes is stepped when its weights are next asked for
    backward   weights again, and gradients on their way to another tier

The greater of the two is the peak, plus what is always kept: the pool of buffers that gradients are collected in. Where
backward steps, it holds what both do, and of the units that wait for their step the gradient, and the weights that are
their own master. Activations come on top: they depend on the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from shoal.zero.placement import PARTIAL, SHARD, STAGES, Stage, master_dtype, over
from shoal.zero.reducer import IN_FLIGHT

__all__ = ["WorkingMemory", "working"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkingMemory:
    """Bytes of one rank, at most."""

    weights: int
    """Of units whose weights come and go."""
    gradients: int
    """On their way to another tier, or of units that wait for their step."""
    pool: int
    """Of buffers in which gradients are collected and reduced."""
    step: int
    """Of pieces of the optimizer's state."""
    together: bool = False
    """Whether gradients and pieces are there at the same time."""

    @property
    def total(self) -> int:
        return self.pool + self.weights + (sum if self.together else max)((self.gradients, self.step))


def working(units: Sequence[int], stage: int, ranks: int, *, compute: torch.dtype, accumulate: torch.dtype, moments: int = 2,
            weights_away: bool = False, state_away: bool = False, window: int = 2, pieces: int = 4,
            piece: int = 1 << 20, write_ahead: int = 0, in_backward: bool = False) -> WorkingMemory:
    """Return the most that training needs in memory beside what rests there.

    `units` are the elements of each unit in the order of their use; `window` of them have weights in memory at once where
    they come and go. With the state away, `pieces` of at most `piece` elements are stepped, read and written at once, and at
    most `write_ahead` bytes of gradients wait to be written; or `in_backward` (offload_optimizer.step_in_backward) for their
    step.
    """
    row, largest = over(STAGES[stage], ranks), max(units, default=0)
    comes = weights_away or (row.weight is SHARD and ranks > 1)
    in_use = max((sum(units[start:start + window]) for start in range(len(units))), default=0) if comes else 0
    lent = 0 if row.gradient is PARTIAL else largest * (1 + (IN_FLIGHT if ranks > 1 else 0))
    travelling = largest * IN_FLIGHT if ranks > 1 else 0
    step = 0
    if state_away:
        wide = master_dtype(compute)
        each = moments * wide.itemsize + accumulate.itemsize + wide.itemsize + (0 if wide == compute else compute.itemsize)
        step = min(pieces * min(piece, largest), sum(units)) * each
    gradients = _own(row, sum(units), ranks) * accumulate.itemsize if state_away else 0
    collected = largest * accumulate.itemsize if row.gradient is PARTIAL else 0  # else it is lent
    leaving = min(write_ahead + collected, gradients)
    if in_backward and state_away:
        master = compute.itemsize if weights_away and compute == master_dtype(compute) else 0
        each = _own(row, largest, ranks) * (accumulate.itemsize + master)  # one waits for room, beside those that have it
        leaving = min(max(write_ahead, each) + each, _own(row, sum(units), ranks) * (accumulate.itemsize + master))
    return WorkingMemory(weights=in_use * compute.itemsize, gradients=leaving,
                         pool=(lent + travelling) * accumulate.itemsize,
                         step=step, together=in_backward)


def _own(row: Stage, elements: int, ranks: int) -> int:
    return elements if row.gradient is PARTIAL else elements // ranks
