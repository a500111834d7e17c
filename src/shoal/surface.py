"""The engine's questions: what was configured, where training is, under the names that training scripts know.

Nothing here changes anything.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from shoal.collectives import Communicator
from shoal.data.loader import Loader
from shoal.errors import UsageError
from shoal.optim.sharded import ShardedOptimizer
from shoal.schema import Config
from shoal.zero.placement import StateBytes
from shoal.zero.sharded import ShardedModel


class Surface(nn.Module):
    """Accessors of an engine."""

    module: nn.Module
    device: torch.device
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

    def deepspeed_io(self, dataset: Any, batch_size: int | None = None, route: str = "train", pin_memory: bool = True,
                     data_sampler: Any = None, collate_fn: Any = None, num_local_io_workers: int | None = None) -> Loader:
        """Build the loader of a dataset: this rank's microbatches, shuffled for the route 'train', resumable."""
        if data_sampler is not None:
            raise UsageError("deepspeed_io: data_sampler is not supported: the loader's own order is what makes it "
                             "resumable on any number of ranks; build a torch DataLoader with your sampler instead")
        return Loader(dataset, batch_size=batch_size or self.train_micro_batch_size_per_gpu(), rank=self.communicator.rank,
                      ranks=self.communicator.ranks, shuffle=route == "train", drop_last=self.settings.dataloader_drop_last,
                      collate_fn=collate_fn, num_workers=num_local_io_workers or 0,
                      pin_memory=pin_memory and self.device.type == "cuda")

    def model_state_bytes(self) -> StateBytes:
        """Measure the bytes of model state that rest on this rank."""
        assert self.sharded is not None
        return self.sharded.state_bytes(self.optimizer.state if self.optimizer else {})
