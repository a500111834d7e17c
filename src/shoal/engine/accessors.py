"""The engine's other questions: where training is, on which ranks, with which objects. Nothing here changes anything.

What neither the engine nor torch's module has is looked for in the user's module.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shoal.data.loader import Loader
from shoal.engine.configured import Configured
from shoal.errors import UsageError
from shoal.mesh.mesh import Mesh
from shoal.mesh.parameter_groups import ParameterGroups
from shoal.optim.sharded import ShardedOptimizer
from shoal.transport import process_group
from shoal.transport.collectives import Communicator
from shoal.zero.placement import StateBytes
from shoal.zero.sharded import ShardedModel

ROUTES = ("train", "eval", "predict")


class Surface(Configured):
    """Accessors of an engine."""

    module: nn.Module
    device: torch.device
    mesh: Mesh
    parameter_groups: ParameterGroups
    communicator: Communicator
    optimizer: ShardedOptimizer | None
    sharded: ShardedModel | None
    has_moe_layers: bool = False
    monitor: None = None
    timers: None = None
    flops_profiler: None = None
    destroyed: bool = False
    """Whether `destroy` was called: the model is its own again."""

    def __getattr__(self, name: str) -> Any:
        """Return the attribute of the module that the engine lacks."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            module = vars(self).get("_modules", {}).get("module")
            if module is None:
                raise
        try:
            return getattr(module, name)
        except AttributeError:
            raise AttributeError(f"neither {type(self).__name__} nor its module {type(module).__name__} has an attribute "
                                 f"'{name}'") from None

    def get_lr(self) -> list[float]:
        """Return the learning rate of each group."""
        return [] if self.optimizer is None else [group["lr"] for group in self.optimizer.param_groups]

    def get_mom(self) -> list[Any]:
        """Return the betas, or the momentum, of each group."""
        if self.optimizer is None:
            return []
        return [group.get("betas", group.get("momentum", 0.0)) for group in self.optimizer.param_groups]

    def get_type(self) -> list[str]:
        """Return the optimizer's class for each group."""
        return [] if self.optimizer is None else [type(self.optimizer.optimizer).__name__] * len(self.get_lr())

    def get_global_grad_norm(self) -> float | None:
        """The global norm at the last step, before clipping; None where no clipping or overflow check asked for it."""
        return None if self.optimizer is None else self.optimizer.norm

    def loss_scale(self) -> float:
        """The factor that the next loss is multiplied by before its backward; 1 without fp16."""
        return 1.0 if self.optimizer is None else self.optimizer.loss_scale

    def get_wall_clock_timers(self) -> dict[str, float]:
        """Return the timers that run: none."""
        return {}

    @property
    def basic_optimizer(self) -> Optimizer | None:
        """The torch optimizer within `optimizer`, over this rank's slices."""
        return None if self.optimizer is None else self.optimizer.optimizer

    @property
    def global_rank(self) -> int:
        return self.parameter_groups.world.rank

    @property
    def local_rank(self) -> int:
        """Which of its host's ranks this is."""
        return process_group.local_rank()

    @property
    def world_size(self) -> int:
        return self.parameter_groups.world.ranks

    @property
    def mpu(self) -> Mesh:
        """The mesh, under the name of Megatron-style scripts."""
        return self.mesh

    @property
    def dp_world_size(self) -> int:
        """Ranks that see different samples."""
        return self.communicator.ranks

    @property
    def mp_world_size(self) -> int:
        """Ranks that share one replica of the model."""
        return self.mesh.get_model_parallel_world_size()

    @property
    def param_names(self) -> dict[nn.Parameter, str]:
        """The name of each of the module's parameters."""
        return {parameter: name for name, parameter in self.module.named_parameters()}

    def deepspeed_io(self, dataset: Any, batch_size: int | None = None, route: str = "train", pin_memory: bool = True,
                     data_sampler: Any = None, collate_fn: Any = None, num_local_io_workers: int | None = None) -> Loader:
        """Build the loader of a dataset: this rank's microbatches, shuffled for the route 'train', resumable.

        Raises `UsageError` for a route other than 'train', 'eval' or 'predict', for a sampler, and for no dataset.
        """
        if data_sampler is not None:
            raise UsageError("deepspeed_io: data_sampler is not supported: the loader's own order is what makes it "
                             "resumable on any number of ranks; build a torch DataLoader with your sampler instead")
        if route not in ROUTES:
            raise UsageError(f"deepspeed_io: route: got {route!r}; choose one of {', '.join(ROUTES)}")
        return Loader(dataset, batch_size=batch_size or self.train_micro_batch_size_per_gpu(), rank=self.communicator.rank,
                      ranks=self.communicator.ranks, shuffle=route == "train", drop_last=self.settings.dataloader_drop_last,
                      collate_fn=collate_fn, num_workers=num_local_io_workers or 0,
                      pin_memory=pin_memory and self.device.type == "cuda")

    def model_state_bytes(self) -> StateBytes:
        """Measure the bytes of model state that rest on this rank."""
        assert self.sharded is not None
        if self.optimizer is not None:
            self.optimizer.settle()
        return self.sharded.state_bytes(self.optimizer.optimizer.state if self.optimizer else {})

    def refuse_destroyed(self, call: str) -> None:
        """Raise `UsageError` from `call` once the engine has let go of the model."""
        if self.destroyed:
            raise UsageError(f"{call}: this engine was destroyed, and has no part in the model any more; use the module "
                             f"itself, or build another engine over it by shoal.initialize")

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Let `to`, `half`, `cuda` and their like pass where they change nothing.

        Raises `UsageError` where they would move or cast the parameters away from the engine's buffers.
        """
        probe = torch.empty(0, dtype=self.policy.compute, device=self.device)
        moved = fn(probe)
        if (moved.dtype, moved.device) != (probe.dtype, probe.device):
            raise UsageError(f"the engine's model is {probe.dtype} on {probe.device} and cannot become {moved.dtype} on "
                             f"{moved.device}: its parameters are views of the engine's buffers. Convert the model before "
                             f"initialize, set fp16 or bf16 in the configuration, or call engine.destroy() first")
        return self
