"""Shoal's engines under their published names: the published accessors, return values and error types.

`PublishedEngine` is what the engine and the pipeline engine (`pipeline_engine.py`) have in common.
"""

from __future__ import annotations

from abc import ABCMeta
from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from math import inf
from pathlib import Path
from typing import Any, Protocol, Self

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.compat.assembly import assemble
from shoal.compat.deepspeed.monitor.monitor import MonitorMaster
from shoal.compat.deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine
from shoal.compat.deepspeed.runtime.config import DeepSpeedConfig
from shoal.compat.deepspeed.runtime.dataloader import DeepSpeedDataLoader
from shoal.compat.deepspeed.runtime.progressive_layer_drop import ProgressiveLayerDrop
from shoal.compat.deepspeed.runtime.zero.offload_config import OffloadDeviceEnum
from shoal.compat.deepspeed.utils import groups
from shoal.compat.deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint, write_script
from shoal.compat.parameters import owned_by
from shoal.compat.published_load import LEFT_OVER, load_result
from shoal.compat.raising import as_published, published_errors
from shoal.device import can_pin
from shoal.engine.base import BaseEngine
from shoal.engine.engine import Engine
from shoal.errors import NotSupportedYet, UsageError
from shoal.zero.gathered import gathered

__all__ = ["DeepSpeedEngine", "PublishedEngine"]

PLD_THETA, PLD_GAMMA = 1.0, 0.001
"""The published defaults of `progressive_layer_drop`."""
RESERVED = "checkpoint_parallel_dimensions"
"""A key of checkpoints that `client_state` may not have."""


def _never(self: Any) -> bool:
    """Return False: Shoal has no such feature yet, and the configuration refuses it."""
    return False


class CustomLoad(Protocol):
    """A function that writes a state dict into a module."""

    def __call__(self, *, src: Any, dst: Any) -> object: ...


class PublishedEngine(BaseEngine):
    """One model in training, with the published members."""

    published: DeepSpeedConfig
    managed: bool = True
    """Whether the engine counts the microbatches of a step; else each call of `step` is a boundary."""

    def __init__(self, args: Any, model: Any, optimizer: Any = None, model_parameters: Any = None,
                 training_data: Any = None, lr_scheduler: Any = None, mpu: Any = None,
                 dist_init_required: bool | None = None, collate_fn: Any = None, config: Any = None,
                 config_class: DeepSpeedConfig | None = None, mesh_device: Any = None, dont_change_device: bool = False):
        """Build the engine as `initialize` does; the device is the accelerator's, with `dont_change_device` too.

        Raises `NotSupportedYet` for `mesh_device`.
        """
        with published_errors():
            if mesh_device is not None:
                raise NotSupportedYet("mesh_device: not supported yet; give initialize mesh_param, or an mpu")
            self._assemble(args=args, model=model, optimizer=optimizer, model_parameters=model_parameters,
                           training_data=training_data, lr_scheduler=lr_scheduler, mpu=mpu,
                           dist_init_required=dist_init_required, collate_fn=collate_fn, config=config,
                           config_class=config_class)

    @classmethod
    def assembled(cls, **arguments: Any) -> Self:
        """Build the engine of a call of `initialize`, whose arguments are more than those of the constructor."""
        self = cls.__new__(cls)
        self._assemble(**arguments)
        return self

    def _assemble(self, **arguments: Any) -> None:
        self._configure(assemble(self._begin, **arguments))

    def _report(self, **values: Any) -> None:
        """Write events of the step that was just taken to the monitors, against the samples so far."""
        if self.monitor.enabled and self.optimizer is not None:
            found = {"lr": self.get_lr()[0], **values}
            if self.settings.fp16.enabled:
                found["loss_scale"] = self.optimizer.loss_scale
            self.monitor.write_events([(f"Train/Samples/{name}", value, self.global_samples)
                                       for name, value in found.items()])

    def _begin(self, *parts: Any) -> Self:
        """Begin as Shoal's own engine, of its parts."""
        super().__init__(*parts)
        return self

    def _configure(self, given: Mapping[str, Any]) -> None:
        """Keep the configuration as it was given, for the published accessors."""
        self.published = DeepSpeedConfig(dict(given), mpu=self.mesh)
        self.managed = self.published.managed_gradient_accumulation
        self.monitor = MonitorMaster(self.published.monitor_config)
        if self.published.pld_enabled:
            self._check_drops_layers()
            self.progressive_layer_drop = ProgressiveLayerDrop(self.pld_theta(), self.pld_gamma())
        groups.set_mesh(self.mesh)
        if self.sharded is not None:
            members = (member.parameter for unit in self.sharded.units for member in unit.members)
            owned_by(self.optimizer, members, stage=self.settings.zero_optimization.stage)

    def _check_drops_layers(self) -> None:
        if self.pipeline_parallelism:
            raise NotSupportedYet("progressive_layer_drop: not supported yet beside a PipelineModule, whose layers get no "
                                  "keyword arguments; set progressive_layer_drop.enabled to false")

    @property
    def config(self) -> dict[str, Any]:
        """The configuration as it was given."""
        return self.published._param_dict  # pyright: ignore[reportPrivateUsage]  the published name

    @property
    def _config(self) -> Any:
        return self.published

    progressive_layer_drop: ProgressiveLayerDrop | None = None
    """The schedule of dropped layers, with `progressive_layer_drop.enabled`."""
    checkpoint_engine = TorchCheckpointEngine()
    """Reads and writes single files for scripts; the engine's own checkpoints are not written by it."""
    store_gradients: bool = False
    training_data: Any = None
    collate_fn: Any = None
    pipeline_parallelism: bool = False
    dont_change_device: bool = False
    loaded_checkpoint_mp_world_size: int | None = None
    loaded_checkpoint_dp_world_size: int | None = None
    num_experts: tuple[int, ...] = ()
    is_deepcompile_enabled = is_deepcompile_active = random_ltd_enabled = _never
    curriculum_learning_enabled = data_sampling_enabled = autotuning_enabled = super_offload = _never

    @property
    def inside_no_sync_ctxt(self) -> bool:
        """Whether the present call is within `no_sync`."""
        return not self.progress.sync

    @property
    def dist_backend(self) -> str:
        """The backend of torch.distributed."""
        return dist.get_backend()

    @property
    def data_parallel_group(self) -> Any:
        """The group of the data ranks."""
        return self.communicator.group

    seq_data_parallel_group = data_parallel_group

    @property
    def client_lr_scheduler(self) -> Any:
        """The schedule that `initialize` was given, or built."""
        return self.lr_scheduler

    # Loops

    def train(self, mode: bool = True) -> Any:
        """Set the module's training mode."""
        return super().train(mode)

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the present microbatch is the last of a step."""
        return (self.managed or self.progress.boundary_override is not None) and super().is_gradient_accumulation_boundary()

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context of `torch_autocast`, in which the model runs."""
        if not self.published.torch_autocast_enabled:
            return nullcontext()
        return torch.autocast(self.device.type, self.published.torch_autocast_dtype or torch.bfloat16)

    def get_global_grad_norm(self) -> float | None:
        """Return the global norm at the last step, before clipping; as published, infinite where an overflow skipped it."""
        skipped = self.optimizer is not None and self.optimizer.overflow
        return inf if skipped else super().get_global_grad_norm()

    # Checkpoints

    @as_published
    def save_checkpoint(self, save_dir: str | Path, tag: str | int | None = None,
                        client_state: Mapping[str, Any] | None = None, save_latest: bool = True,
                        exclude_frozen_parameters: bool = False) -> bool:
        """Save the training state; returns True once it is written, unless `checkpoint.async_save` is true.

        The folder has DeepSpeed's files beside Shoal's, unless `checkpoint.layout` is "shoal". Keys of `client_state` that
        an earlier load left there are written anew.
        """
        if not str(save_dir):
            raise UsageError("save_checkpoint: save_dir is empty; give a folder")
        if isinstance(client_state, Mapping):
            if RESERVED in client_state:
                raise KeyError(f"save_checkpoint: client_state has the key '{RESERVED}', which is reserved; rename it")
            client_state = {key: value for key, value in client_state.items() if key not in LEFT_OVER}
        saved = super().save_checkpoint(save_dir, tag, client_state=client_state, save_latest=save_latest,
                                        exclude_frozen_parameters=exclude_frozen_parameters)
        if self.settings.zero_optimization.stage and self.global_rank == 0:
            write_script(save_dir)
        return saved

    @as_published
    def load_checkpoint(self, load_dir: str | Path, tag: str | int | None = None, load_module_strict: bool = True,
                        load_optimizer_states: bool = True, load_lr_scheduler_states: bool = True,
                        load_module_only: bool = False, custom_load_fn: CustomLoad | None = None,
                        ) -> tuple[str | None, dict[str, Any] | None]:
        """Load a checkpoint; returns (path, client_state), or (None, None) where nothing is saved.

        The path is that of a model file in DeepSpeed's layout, and the state has its other keys, where there is one.
        `custom_load_fn(src=state, dst=module)` writes the saved weights into the whole module, on every rank.
        """
        path, client = super().load_checkpoint(
            load_dir, tag, load_module_strict and custom_load_fn is None, load_optimizer_states, load_lr_scheduler_states,
            load_module_only)
        if path is not None and custom_load_fn is not None:
            saved = get_fp32_state_dict_from_zero_checkpoint(load_dir, None if tag is None else str(tag))
            self._load_by(custom_load_fn, saved)
        return (path, client) if path is None or client is None else load_result(path, client, self.communicator.rank)

    @as_published
    def load_module_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True,
                               custom_load_fn: CustomLoad | None = None, fetch_z3_params: bool = False,
                               z3_params_to_fetch: Any = None, allowed_missing_keys: Any = None) -> None:
        """Load the entry 'module' of a checkpoint, or a state dict; whole weights at every stage.

        `custom_load_fn(src=state, dst=module)` writes the weights instead. The keywords after it have no effect: what is
        loaded is gathered in any case.
        """
        if custom_load_fn is None:
            super().load_module_state_dict(checkpoint, strict)
        else:
            inner = checkpoint.get("module") if isinstance(checkpoint, Mapping) else None  # pyright: ignore[reportUnnecessaryIsInstance]  scripts pass others
            self._load_by(custom_load_fn, checkpoint if inner is None else inner)

    def _load_by(self, load: CustomLoad, state: Any) -> None:
        with gathered(self.module, modifier_rank=0):
            load(src=state, dst=self.module)

    set_train_batch_size = as_published(BaseEngine.set_train_batch_size)
    set_train_micro_batch_size = as_published(BaseEngine.set_train_micro_batch_size)

    @as_published
    def deepspeed_io(self, dataset: Any, batch_size: int | None = None, route: str = "train", pin_memory: bool = True,
                     data_sampler: Any = None, collate_fn: Any = None, num_local_io_workers: int | None = None) -> Any:
        """Build the loader of a dataset; with a `data_sampler`, torch's, whose position is not saved."""
        if data_sampler is None:
            return super().deepspeed_io(dataset, batch_size, route, pin_memory, None, collate_fn, num_local_io_workers)
        return DeepSpeedDataLoader(
            dataset, batch_size or self.train_micro_batch_size_per_gpu(), pin_memory and can_pin(self.device),
            self.local_rank, None, collate_fn, num_local_io_workers, data_sampler,
            dataloader_drop_last=self.settings.dataloader_drop_last)

    def set_data_post_process_func(self, post_process_func: Callable[..., Any]) -> None:
        """Raise `NotSupportedYet`: batches pass as the loader yields them."""
        with published_errors():
            raise NotSupportedYet("set_data_post_process_func: not supported yet; change the batch in the loader's "
                                  "collate_fn, or before the engine's forward")

    def set_custom_curriculum_learning_schedule(self, schedule_func_dict: Mapping[str, Any]) -> None:
        """Raise `NotSupportedYet`: the engine samples by no curriculum."""
        with published_errors():
            raise NotSupportedYet("set_custom_curriculum_learning_schedule: not supported yet; schedule difficulty in the "
                                  "training loop by runtime.data_pipeline.curriculum_scheduler.CurriculumScheduler")

    compile = as_published(BaseEngine.compile)

    @as_published
    def offload_states(self, include: Any = None, device: Any = OffloadDeviceEnum.cpu, pin_memory: bool = True,
                       non_blocking: bool = False) -> None:
        """Move state to the host, where all of it rests on a machine without an accelerator.

        Raises `NotSupportedYet` on an accelerator.
        """
        if self.device.type != "cpu":
            super().offload_states()

    @as_published
    def reload_states(self, non_blocking: bool = False) -> None:
        """Move state back, after `offload_states`."""
        if self.device.type != "cpu":
            super().reload_states()

    # Accessors whose answer is one value of the configuration

    def optimizer_name(self) -> str | None:
        """Return the class of the optimizer that `initialize` was given, or the configured name in lower case."""
        given = self.client_optimizer
        return self.published.optimizer_name if given is None or callable(given) else type(given).__name__

    def wall_clock_breakdown(self) -> bool:
        """Return the configured value; Shoal records phases by `engine.trace()`."""
        return self.published.wall_clock_breakdown

    def memory_breakdown(self) -> bool:
        """Return the configured value."""
        return self.published.memory_breakdown

    def postscale_gradients(self) -> bool:
        """Return whether `prescale_gradients` is off."""
        return not self.published.prescale_gradients

    def checkpoint_serialization_enabled(self) -> bool:
        """Return the configured value."""
        return bool(self.published.checkpoint_config["checkpoint_serialization"])

    def checkpoint_writer_enabled(self) -> bool:
        """Whether a writer is configured."""
        return self.published.checkpoint_config["writer"] is not None

    def steps_per_print(self) -> int | None:
        """Return the configured value."""
        return self.published.steps_per_print

    def pld_params(self) -> Any:
        """Return the section `progressive_layer_drop`, None if there is none."""
        return self.published.pld_params

    def pld_theta(self) -> float:
        """Return the share of layers that is kept in the end."""
        return (self.pld_params() or {}).get("theta", PLD_THETA)

    def pld_gamma(self) -> float:
        """Return how fast the share of kept layers falls."""
        return (self.pld_params() or {}).get("gamma", PLD_GAMMA)

    def get_pld_theta(self) -> float | None:
        """Return the share of layers that the present step keeps, None without progressive layer dropping."""
        return None if self.progressive_layer_drop is None else self.progressive_layer_drop.get_theta()

    def zero_offload_optimizer(self) -> Any:
        """Return the published section of offloaded optimizer state, None if there is none."""
        return self.published.zero_config.offload_optimizer

    def zero_offload_param(self) -> Any:
        """Return the published section of offloaded weights, None if there is none."""
        return self.published.zero_config.offload_param

    def zero_use_cpu_optimizer(self) -> bool:
        """Whether the optimizer's state rests on the host or on disk."""
        section = self.zero_offload_optimizer()
        return section is not None and section.device in (OffloadDeviceEnum.cpu, OffloadDeviceEnum.nvme)

    def zero_cpu_offload(self) -> bool:
        """Whether the optimizer's state rests on the host."""
        section = self.zero_offload_optimizer()
        return section is not None and section.device == OffloadDeviceEnum.cpu

    def zero_nvme_offload_optimizer(self) -> bool:
        """Whether the optimizer's state rests on disk."""
        return self.settings.zero_optimization.offload_optimizer.device == "nvme"

    def initial_dynamic_scale(self) -> int:
        """Return the first dynamic loss scale."""
        return self.published.float16_config.initial_dynamic_scale()

    def dynamic_loss_scale_args(self) -> dict[str, Any]:
        """Return the keywords of the dynamic loss scaler."""
        return self.published.float16_config.dynamic_loss_scale_args()

    def get_data_types(self) -> tuple[torch.dtype, torch.dtype]:
        """Return the dtype of the weights and that of accumulated gradients."""
        return self.policy.compute, self.policy.accumulate

    def checkpoint_tag_validation_enabled(self) -> bool:
        """Whether tags are compared between ranks."""
        return self.published.checkpoint_tag_validation_enabled

    def checkpoint_tag_validation_fail(self) -> bool:
        """Whether tags that differ between ranks are an error."""
        return self.published.checkpoint_tag_validation_fail

    def get_data_parallel_rank(self) -> int:
        """Return this rank's number among the data ranks."""
        return self.communicator.rank

    def get_model_parallel_rank(self) -> int:
        """Return this rank's number among the ranks of one replica."""
        return self.mesh.get_model_parallel_rank()

    get_tensor_parallel_rank = get_model_parallel_rank


def _answers(path: str) -> Callable[[PublishedEngine], Any]:
    """Return an accessor of the configuration's value at `path`."""
    def answer(self: PublishedEngine) -> Any:
        found: Any = self.published
        for name in path.split("."):
            found = getattr(found, name)
        return found

    answer.__doc__ = f"Return the configuration's `{path}`."
    return answer


_ANSWERS = {
    "optimizer_params": "optimizer_params", "optimizer_legacy_fusion": "optimizer_legacy_fusion",
    "scheduler_name": "scheduler_name", "scheduler_params": "scheduler_params",
    "zero_allow_untested_optimizer": "zero_allow_untested_optimizer",
    "zero_force_ds_cpu_optimizer": "zero_force_ds_cpu_optimizer", "dataloader_drop_last": "dataloader_drop_last",
    "managed_gradient_accumulation": "managed_gradient_accumulation", "use_node_local_storage": "use_node_local_storage",
    "load_universal_checkpoint": "load_universal_checkpoint", "log_level": "log_level", "aio_config": "aio_config",
    "swap_tensor_config": "aio_config", "data_efficiency_enabled": "data_efficiency_enabled",
    "data_efficiency_config": "data_efficiency_config", "torch_autocast_enabled": "torch_autocast_enabled",
    "torch_autocast_dtype": "torch_autocast_dtype", "fp16_auto_cast": "float16_config.auto_cast",
    "torch_autocast_lower_precision_safe_modules": "torch_autocast_lower_precision_safe_modules",
    "fp16_master_weights_and_gradients": "float16_config.fp16_master_weights_and_grads",
    "bf16_master_weights_and_gradients": "bfloat16_config.bf16_master_weights_and_grads",
    "bf16_optimizer_states": "bfloat16_config.bf16_optimizer_states",
    "flops_profiler_enabled": "flops_profiler_config.enabled", "pld_enabled": "pld_enabled",
    "progressive_layer_drop_enabled": "pld_enabled", "sparse_gradients_enabled": "sparse_gradients_enabled",
    "elasticity_enabled": "elasticity_enabled", "is_sanity_checks_enabled": "zero_config.enable_sanity_checks",
    **{f"flops_profiler_{name}": f"flops_profiler_config.{name}" for name in (
        "recompute_fwd_factor", "profile_step", "module_depth", "top_modules", "detailed", "output_file")},
    **{f"zero_{name}": f"zero_config.{name}" for name in (
        "reduce_scatter", "overlap_comm", "sub_group_size", "reduce_bucket_size", "allgather_bucket_size",
        "compute_grad_norm", "contiguous_gradients", "load_from_fp32_weights", "elastic_checkpoint", "max_live_parameters",
        "max_reuse_distance", "prefetch_bucket_size", "module_granularity_threshold", "param_persistence_threshold",
        "model_persistence_threshold", "gather_16bit_weights_on_model_save", "legacy_stage1", "ignore_unused_parameters",
        "allgather_partitions", "round_robin_gradients", "parameter_alignment", "log_trace_cache_warnings",
        "allgather_sequential", "save_muon_momentum_buffer_in_memory")},
    "zero_multi_rank_bucket_allreduce": "zero_config.use_multi_rank_bucket_allreduce",
    **{name: f"zero_config.{name}" for name in (
        "zero_hpz_partition_size", "zero_quantized_weights", "zero_quantized_nontrainable_weights",
        "zero_quantized_gradients")},
}  # fmt: skip
"""Published accessors, and the value of the published configuration that each returns."""

for _name, _path in _ANSWERS.items():
    setattr(PublishedEngine, _name, _answers(_path))


class DeepSpeedEngine(PublishedEngine, Engine, metaclass=ABCMeta):
    """The engine that `deepspeed.initialize` returns for a module."""

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the model; within `torch.autocast` where `torch_autocast` asks for it.

        With `progressive_layer_drop` a model in training gets the keywords `progressive_layer_drop` and `pld_theta`.
        """
        if self.progressive_layer_drop is not None and self.module.training:
            self.progressive_layer_drop.update_state(self.global_steps)
            kwargs |= self.progressive_layer_drop.get_state()
        with published_errors(), self.autocast():
            return super().forward(*inputs, **kwargs)

    def backward(self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True, **unused: Any) -> Tensor:
        """Accumulate the gradients of `loss`; returns it divided by the accumulation steps, in its own dtype.

        Keywords of older versions (`allreduce_gradients`, `release_loss`) have no effect.
        """
        with published_errors():
            return super().backward(loss, retain_graph=retain_graph, scale_wrt_gas=scale_wrt_gas).to(loss.dtype)

    def step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        """At a boundary apply the gradients and advance the schedule; elsewhere count the microbatch."""
        before = self.global_steps
        with published_errors(), nullcontext() if self.managed else self.progress.at_boundary(True):
            super().step(lr_kwargs)
        if self.global_steps > before:
            self._report()

    @contextmanager
    def no_sync(self) -> Generator[None]:
        """Accumulate without communication, at every stage; raises `AssertionError` when it is nested."""
        with published_errors(), super().no_sync():
            yield

    @contextmanager
    def coalesce_grad_reduction(self) -> Generator[None]:
        """Take several backward passes of one step, whose gradients are summed; each is reduced as it comes."""
        yield

    @as_published
    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Say whether the present microbatch is the last of a step, instead of counting."""
        if not self.managed:
            raise UsageError("set_gradient_accumulation_boundary: managed_gradient_accumulation is false, so every step() "
                             "is a boundary; leave the call out")
        super().set_gradient_accumulation_boundary(is_boundary)
