"""Bound the memory that training holds for a while beside the resting state: weights in use, gradients in flight, the step.

    forward    gathered weights, and chunks of the optimizer's state: the deferred step of an offloaded unit runs then
    backward   gathered weights, and gradients on their way to another tier

The greater of the two is the peak, plus the pool of buffers in which gradients are collected and reduced. With steps in
backward both happen at once, and a unit that waits for its step holds its gradient, and weights that are their own master.
Activations come on top: they depend on the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from shoal.zero.placement import STAGES, Stage, effective_row, master_dtype
from shoal.zero.reducer import IN_FLIGHT

__all__ = ["WorkingMemory", "estimate_working_memory"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkingMemory:
    """Bytes of one rank, at most."""

    weights: int
    """Of gathered units that are released between their uses."""
    gradients: int
    """On their way to another tier, or of units that wait for their step."""
    pool: int
    """Of buffers in which gradients are collected and reduced."""
    step: int
    """Of chunks of the optimizer's state."""
    steps_in_backward: bool = False
    """Whether gradients and chunks are in memory at the same time."""

    @property
    def total(self) -> int:
        in_turn = (self.gradients, self.step)
        return self.pool + self.weights + (sum(in_turn) if self.steps_in_backward else max(in_turn))


def estimate_working_memory(
        units: Sequence[int], stage: int, ranks: int, *, compute: torch.dtype, accumulate: torch.dtype, moments: int = 2,
        weights_offloaded: bool = False, state_offloaded: bool = False, window: int = 2, chunks: int = 4,
        chunk: int = 1 << 20, write_ahead: int = 0, in_backward: bool = False) -> WorkingMemory:
    """Return the most that training needs in memory beside what rests there.

    `units` are the elements of each unit in the order of their use; `window` of them are gathered at once where units are
    released between their uses. With `state_offloaded`, `chunks` of at most `chunk` elements are fetched, stepped and
    committed at once, and at most `write_ahead` bytes of gradients wait to be written; or, with `in_backward`
    (offload_optimizer.step_in_backward), for their step.
    """
    row, largest, every = effective_row(STAGES[stage], ranks), max(units, default=0), sum(units)
    reshards = weights_offloaded or (row.shards_weights and ranks > 1)
    gathered = max((sum(units[start:start + window]) for start in range(len(units))), default=0) if reshards else 0
    reducing = IN_FLIGHT if ranks > 1 else 0
    collecting = 1 + reducing if row.shards_gradients else 0
    gradients = step = 0
    if state_offloaded:
        waiting = _waiting_bytes(compute, accumulate, weights_offloaded) if in_backward else None
        gradients = _gradients(row, ranks, largest, every, write_ahead, accumulate, waiting=waiting)
        step = min(chunks * min(chunk, largest), every) * _stepped_bytes(compute, accumulate, moments)
    return WorkingMemory(weights=gathered * compute.itemsize, gradients=gradients, step=step,
                         pool=largest * (collecting + reducing) * accumulate.itemsize, steps_in_backward=in_backward)


def _gradients(row: Stage, ranks: int, largest: int, every: int, write_ahead: int, accumulate: torch.dtype, *,
               waiting: int | None) -> int:
    """Return the bytes of gradients to be written, or where backward steps of units of `waiting` bytes an element."""
    shards = ranks if row.shards_gradients else 1
    if waiting is not None:
        unit = largest // shards * waiting  # one waits for room, beside those that have it
        return min(max(write_ahead, unit) + unit, every // shards * waiting)
    collected = 0 if row.shards_gradients else largest * accumulate.itemsize  # sharded ones are collected in the pool
    return min(write_ahead + collected, every // shards * accumulate.itemsize)


def _waiting_bytes(compute: torch.dtype, accumulate: torch.dtype, weights_offloaded: bool) -> int:
    """Return the bytes an element that a unit holds while it waits for its step in backward."""
    own_master = weights_offloaded and compute == master_dtype(compute)
    return accumulate.itemsize + (compute.itemsize if own_master else 0)


def _stepped_bytes(compute: torch.dtype, accumulate: torch.dtype, moments: int) -> int:
    """Return the bytes an element that a step reads and writes: moments, gradient, master, and weights that are apart."""
    wide = master_dtype(compute)
    return moments * wide.itemsize + accumulate.itemsize + wide.itemsize + (0 if wide == compute else compute.itemsize)
