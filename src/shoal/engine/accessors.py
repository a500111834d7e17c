"""DeepSpeed's names of an engine beside the training loop: accessors, and calls that another object answers.

Configuration, batch sizes, counters, learning rates, ranks, objects: each answer is the value in force. A published key that
the configuration refuses has one answer. A call is handed to the object whose work it is, or refused: nothing here decides
when an engine trains.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shoal.config.batch import BatchSizes
from shoal.data.loader import Loader
from shoal.device import can_pin, empty_cache
from shoal.engine.progress import Progress
from shoal.engine.schema import Config
from shoal.engine.state_dicts import StateDicts
from shoal.errors import NotSupportedYet, UsageError
from shoal.log import logger
from shoal.mesh.mesh import Mesh
from shoal.mesh.parameter_groups import ParameterGroups
from shoal.optim.sharded import ShardedOptimizer
from shoal.precision.policy import Policy
from shoal.sequence_parallel import Positions, SequenceAxis, split_batch
from shoal.sequence_parallel.hugging_face import padding_of
from shoal.transport import process_group
from shoal.transport.collectives import Communicator
from shoal.zero.placement import STAGES, StateBytes
from shoal.zero.sharded import ShardedModel

__all__ = ["Accessors"]

ROUTES = ("train", "eval", "predict")


class Accessors:
    """The published accessors, mixed into every engine. The engine provides the attributes that they use."""

    module: nn.Module
    settings: Config
    batch: BatchSizes
    policy: Policy
    progress: Progress
    device: torch.device
    mesh: Mesh
    parameter_groups: ParameterGroups
    communicator: Communicator
    optimizer: ShardedOptimizer | None
    client_optimizer: object
    sharded: ShardedModel | None
    state_dicts: StateDicts
    has_moe_layers: bool = False
    monitor: Any = None
    timers: None = None
    flops_profiler: None = None

    # Configuration

    @property
    def config(self) -> dict[str, Any]:
        """The configuration as it was given, in a dict of its own; `settings` holds it with every default resolved."""
        return self.settings.given

    @property
    def _config(self) -> Config:
        return self.settings

    def train_batch_size(self) -> int:
        """Samples per optimizer step over all data ranks."""
        return self.batch.total

    def train_micro_batch_size_per_gpu(self) -> int:
        """Samples per forward on one rank."""
        return self.batch.micro

    def gradient_accumulation_steps(self) -> int:
        """Microbatches per optimizer step."""
        return self.batch.accumulation

    def get_batch_info(self) -> tuple[int, int, int]:
        """Return the batch of a step, of one forward on one rank, and the microbatches of a step."""
        return self.batch.total, self.batch.micro, self.batch.accumulation

    def zero_optimization(self) -> bool:
        """Whether anything is sharded."""
        return STAGES[self.settings.zero_optimization.stage].shards_state

    def zero_optimization_stage(self) -> int:
        """The ZeRO stage, 0 to 3."""
        return self.settings.zero_optimization.stage

    def zero_optimization_partition_gradients(self) -> bool:
        """Whether gradients are sharded: at stages 2 and 3."""
        return STAGES[self.settings.zero_optimization.stage].shards_gradients

    def zero_optimization_partition_weights(self) -> bool:
        """Whether weights are sharded: at stage 3."""
        return STAGES[self.settings.zero_optimization.stage].shards_weights

    def zero_gather_16bit_weights_on_model_save(self) -> bool:
        """Whether `save_16bit_model` may gather the weights at stage 3."""
        return self.settings.zero_optimization.stage3_gather_16bit_weights_on_model_save

    def fp16_enabled(self) -> bool:
        """Whether the model computes in fp16."""
        return self.settings.fp16.enabled

    def bfloat16_enabled(self) -> bool:
        """Whether the model computes in bf16."""
        return self.settings.bf16.enabled

    def amp_enabled(self) -> bool:
        """False: Apex is not used."""
        return False

    def dynamic_loss_scale(self) -> bool:
        """Whether the loss scale is adjusted during training."""
        return self.settings.fp16.enabled and self.settings.fp16.dynamic

    def gradient_clipping(self) -> float:
        """The largest global L2 norm of the gradients; 0 disables clipping."""
        return self.settings.gradient_clipping

    def optimizer_name(self) -> str | None:
        """The class of the optimizer that `initialize` was given, or the configured name."""
        if self.client_optimizer is not None and not callable(self.client_optimizer):
            return type(self.client_optimizer).__name__
        return self.settings.optimizer.type

    def scheduler_name(self) -> str | None:
        """The configured name of the learning-rate schedule."""
        return self.settings.scheduler.type

    def steps_per_print(self) -> int | None:
        """Steps between two progress lines in the log; None: no lines."""
        return self.settings.steps_per_print

    def dump_state(self) -> bool:
        """Whether `initialize` logs the resolved configuration."""
        return self.settings.dump_state

    def wall_clock_breakdown(self) -> bool:
        """False: the configuration refuses timers."""
        return False

    def memory_breakdown(self) -> bool:
        """False: the configuration refuses memory reports."""
        return False

    def postscale_gradients(self) -> bool:
        """Whether gradients are divided by the number of ranks, or by a part of it, after they are summed."""
        return not self.policy.averaging.is_before(accumulate=self.policy.accumulate, wire=self.policy.reduce)

    def gradient_predivide_factor(self) -> float:
        """The divisor of gradients before they are summed: 1, a part of the number of ranks, or all of it."""
        factors = self.policy.averaging.factors(self.batch.data_ranks, accumulate=self.policy.accumulate,
                                                wire=self.policy.reduce)
        return 1 / factors.before

    @property
    def communication_data_type(self) -> torch.dtype:
        """The dtype in which gradients are reduced. Setting another one raises `UsageError`."""
        return self.policy.reduce

    @communication_data_type.setter
    def communication_data_type(self, dtype: torch.dtype) -> None:
        if dtype != self.policy.reduce:
            raise UsageError(f"communication_data_type: got {dtype}, but the buffers of this engine were made for "
                             f"{self.policy.reduce}; set communication_data_type in the configuration instead")

    # Progress; scripts may set the counters

    @property
    def micro_steps(self) -> int:
        """Microbatches so far."""
        return self.progress.micro_steps

    @micro_steps.setter
    def micro_steps(self, count: int) -> None:
        self.progress.micro_steps = count

    @property
    def global_steps(self) -> int:
        """Optimizer steps so far, skipped ones included."""
        return self.progress.global_steps

    @global_steps.setter
    def global_steps(self, count: int) -> None:
        self.progress.global_steps = count

    @property
    def global_samples(self) -> int:
        """Samples of these steps, over all data ranks."""
        return self.progress.global_samples

    @global_samples.setter
    def global_samples(self, count: int) -> None:
        self.progress.global_samples = count

    @property
    def skipped_steps(self) -> int:
        """Steps that an overflow of the gradients has skipped."""
        return self.progress.skipped_steps

    @skipped_steps.setter
    def skipped_steps(self, count: int) -> None:
        self.progress.skipped_steps = count

    def was_step_applied(self) -> bool:
        """Whether the last call of `step` changed the weights."""
        return self.progress.step_applied

    # Optimizer

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
        """The global norm at the last step, before clipping; None before the first, or without `compute_grad_norm`."""
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

    # Ranks and the model

    @property
    def global_rank(self) -> int:
        """This rank's number in the job."""
        return self.parameter_groups.world.rank

    @property
    def local_rank(self) -> int:
        """This rank's number on its host."""
        return process_group.local_rank()

    @property
    def world_size(self) -> int:
        """Ranks of the job."""
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

    def model_state_bytes(self) -> StateBytes:
        """Measure the bytes of model state that rest on this rank."""
        assert self.sharded is not None
        if self.optimizer is not None:
            self.optimizer.finish_deferred_steps()
        return self.sharded.state_bytes(self.optimizer.optimizer.state if self.optimizer else {})

    # Data

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
                      pin_memory=pin_memory and can_pin(self.device))

    @cached_property
    def sequence(self) -> SequenceAxis:
        """The ranks that have the other parts of this rank's sequences, for attention and losses."""
        return SequenceAxis(self.parameter_groups.communicator("sequence"))

    def split_sequence(self, batch: Mapping[str, Any], *, multiple: int = 1, padding_token: int | None = None,
                       causal: bool = True, positions: Positions | None = None) -> dict[str, Any]:
        """Return this rank's part of a batch of whole sequences: see `shoal.sequence_parallel.split_batch`.

        `padding_token` and `positions` are those of a model of Hugging Face transformers unless given; else 0 and "all".
        """
        padding, counted = padding_of(self.module)
        return split_batch(batch, self.sequence, multiple=multiple, causal=causal, positions=positions or counted,
                           padding_token=padding if padding_token is None else padding_token)

    # State dicts

    def consolidated_state_dict(self, dtype: torch.dtype | None = None, *, exclude_frozen: bool = False,
                                ) -> dict[str, Tensor] | None:
        """Gather the model's state dict on rank 0, unit by unit, on the CPU; None on the other ranks. All ranks call it.

        Parameters come in `dtype`, by default their own; torch.float32 gives the masters of a 16-bit training. Raises
        `UsageError` for a `dtype` that is no floating-point one.
        """
        return self.state_dicts.consolidate(dtype, exclude_frozen=exclude_frozen)

    def _consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Tensor] | None:
        return self.consolidated_state_dict(exclude_frozen=exclude_frozen_parameters)

    _zero3_consolidated_16bit_state_dict = _consolidated_16bit_state_dict

    def save_16bit_model(self, save_dir: str | Path, save_filename: str = "pytorch_model.bin",
                         exclude_frozen_parameters: bool = False) -> bool:
        """Save the weights in the compute dtype as one file that `torch.load` reads; every rank calls it.

        At stage 3 it returns False, with a warning, unless `stage3_gather_16bit_weights_on_model_save` is true.
        """
        if self.zero_optimization_partition_weights() and not self.zero_gather_16bit_weights_on_model_save():
            logger.warning("save_16bit_model: nothing is saved; at stage 3 the weights must be gathered first: set "
                           "zero_optimization.stage3_gather_16bit_weights_on_model_save to true")
            return False
        self.state_dicts.save(Path(save_dir) / save_filename, exclude_frozen=exclude_frozen_parameters)
        return True

    def save_fp16_model(self, save_dir: str | Path, save_filename: str = "pytorch_model.bin") -> bool:
        """The older name of `save_16bit_model`."""
        return self.save_16bit_model(save_dir, save_filename)

    def save_pretrained(self, save_directory: str | Path, dtype: torch.dtype | None = None, **options: Any) -> None:
        """Save the model by its own `save_pretrained`, for `from_pretrained`; every rank calls it, rank 0 writes.

        Parameters come in `dtype`, by default their own; `options` go to the model's method. Raises `UsageError` for a model
        without one, and on every rank the error of the method.
        """
        self.state_dicts.save_pretrained(save_directory, dtype, options)

    def module_state_dict(self, destination: dict[str, Any] | None = None, prefix: str = "", keep_vars: bool = False,
                          exclude_frozen_parameters: bool = False) -> dict[str, Any]:
        """Return the module's own state dict, of the weights in the compute dtype, as views of the engine's buffers.

        At stage 3, outside `shoal.gathered(engine.module)`, reading a value of it raises `ReleasedError`;
        `consolidated_state_dict` gathers.
        """
        return self.state_dicts.of_module(destination, prefix, keep_vars=keep_vars, exclude_frozen=exclude_frozen_parameters)

    def load_module_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True, custom_load_fn: Any = None) -> None:
        """Load a state dict of the module, or its entry 'module'; every rank calls it with the same one.

        Raises `UsageError` for no mapping, for tensors of another shape and, if `strict`, for names on one side only.
        """
        self.state_dicts.load(checkpoint, strict=strict, custom_load_fn=custom_load_fn)

    # Published controls of memory and communication

    def allreduce_gradients(self, bucket_size: int = 500_000_000) -> None:
        """Reduce now what backward passes left unreduced; every rank calls it. `bucket_size` changes nothing here."""
        if self.sharded is not None:
            self.sharded.flush()

    def buffered_allreduce_fallback(self, grads: Any = None, elements_per_buffer: int = 500_000_000) -> None:
        """Do the same as `allreduce_gradients`; raises `UsageError` for `grads` of the caller's."""
        if grads is not None:
            raise UsageError("buffered_allreduce_fallback: grads is not supported: the engine collects gradients itself; "
                             "reduce your own with torch.distributed.all_reduce")
        self.allreduce_gradients(elements_per_buffer)

    def empty_partition_cache(self) -> None:
        """Release every gathered parameter that is not in use, and the allocator's unused memory."""
        if self.sharded is not None:
            for unit in self.sharded.units:
                unit.release()
        empty_cache(self.device)

    def offload_states(self, include: Any = None, device: str = "cpu", pin_memory: bool = True,
                       non_blocking: bool = False) -> None:
        """Raise `NotSupportedYet`."""
        raise NotSupportedYet("offload_states: not supported yet: state rests where the configuration says; save a "
                              "checkpoint and call engine.destroy() to free the memory")

    def reload_states(self, non_blocking: bool = False) -> None:
        """Raise `NotSupportedYet`."""
        raise NotSupportedYet("reload_states: not supported yet, as offload_states is not; leave both out")
