"""The engine's questions: what was configured, where training is, under the names that training scripts know.

Nothing here changes anything.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from shoal.collectives import Communicator
from shoal.optim.sharded import ShardedOptimizer
from shoal.schema import Config
from shoal.zero.placement import StateBytes
from shoal.zero.sharded import ShardedModel


class Surface(nn.Module):
    """Accessors of an engine."""

    settings: Config
    communicator: Communicator
    optimizer: ShardedOptimizer | None
    sharded: ShardedModel | None

    def train_batch_size(self) -> int:
        return self.settings.batch.total

    def train_micro_batch_size_per_gpu(self) -> int:
        return self.settings.batch.micro

    def gradient_accumulation_steps(self) -> int:
        return self.settings.batch.accumulation

    def zero_optimization_stage(self) -> int:
        return self.settings.zero_optimization.stage

    def get_lr(self) -> list[float]:
        """The learning rate of each group."""
        return [] if self.optimizer is None else [group["lr"] for group in self.optimizer.param_groups]

    def get_mom(self) -> list[Any]:
        """The betas, or the momentum, of each group."""
        if self.optimizer is None:
            return []
        return [group.get("betas", group.get("momentum", 0.0)) for group in self.optimizer.param_groups]

    def get_global_grad_norm(self) -> float | None:
        """The global norm at the last step, before clipping; None where no clipping or overflow check asked for it."""
        return None if self.optimizer is None else self.optimizer.norm

    def loss_scale(self) -> float:
        return 1.0 if self.optimizer is None else self.optimizer.loss_scale

    @property
    def global_rank(self) -> int:
        return self.communicator.rank

    @property
    def world_size(self) -> int:
        return self.communicator.ranks

    @property
    def config(self) -> dict[str, Any]:
        return self.settings.as_dict()

    def model_state_bytes(self) -> StateBytes:
        """Measure the bytes of model state that rest on this rank."""
        assert self.sharded is not None
        return self.sharded.state_bytes(self.optimizer.state if self.optimizer else {})
