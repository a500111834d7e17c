"""The objects of an engine whose state a checkpoint holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from shoal.engine.progress import Progress
from shoal.optim.sharded import ShardedOptimizer
from shoal.resilience.guard import Guard
from shoal.schedule.registry import AnySchedule
from shoal.zero.sharded import ShardedModel

__all__ = ["TrainingObjects"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingObjects:
    """The parts of one training that a checkpoint saves and loads."""

    sharded: ShardedModel
    optimizer: ShardedOptimizer | None
    lr_scheduler: AnySchedule | None
    dataloader: Any
    progress: Progress
    guard: Guard | None
    compute: torch.dtype
    """The dtype of weights in forward and backward."""
    accumulation: int
    """Microbatches of a step."""
