"""Build an engine: `initialize` takes a model and a JSON file that says how to train it.

The order is a contract between ranks: torch.distributed first, then the configuration (which needs the world size), the
units (whose layout the ranks compare), the optimizer over their masters, the schedule, the loader.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Generator, Iterable, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from logging import INFO, NOTSET
from typing import TYPE_CHECKING, Any, overload

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shoal import comm
from shoal.activation import RecomputeMode, recompute_blocks
from shoal.attention.hugging_face import sparse_attention_in
from shoal.config.load import Source
from shoal.config.resolve import DEFAULT
from shoal.device import has_float64
from shoal.engine.activation_plan import recompute_as_configured, saved_activations
from shoal.engine.base import BaseEngine
from shoal.engine.buffer_sync import move_buffers
from shoal.engine.compiled import Compilation
from shoal.engine.engine import Engine
from shoal.engine.lost_units import missing_units, unit_names
from shoal.engine.mesh_setup import check_ranks_agree, mesh_of, parameter_groups_of
from shoal.engine.optimizer_calls import OptimizerCalls
from shoal.engine.optimizer_traits import (
    OptimizerSource,
    OptimizerTraits,
    check_compression,
    check_optimizer,
    check_warm_up,
    traits_of,
)
from shoal.engine.pipeline_engine import PipelineEngine
from shoal.engine.schema import Config
from shoal.engine.storage_plan import plan_storage
from shoal.errors import CollectiveFailed, ConfigError, NotSupportedYet, UsageError
from shoal.log import logger, warn_once
from shoal.mesh.mesh import Mesh
from shoal.module_hooks import is_scripted
from shoal.nn.linear import linear_kernels_in
from shoal.optim.compressed import CompressedOptimizer
from shoal.optim.handed_over import hand_over
from shoal.optim.masks import check_masks, warn_of_masks
from shoal.optim.registry import make_optimizer, prefers_native
from shoal.optim.sharded import ShardedOptimizer, StepRules
from shoal.optim.views import CAST_ELEMENTS, OptimizerGroups, Views
from shoal.pipeline.module import PipelineModule
from shoal.pipeline.settings import PipelineSettings
from shoal.precision.loss_scale import LossScale, StaticScale, make_loss_scale
from shoal.precision.policy import Averaging, Policy, policy
from shoal.schedule.registry import AnySchedule, make_schedule, required_arguments
from shoal.sequence_parallel.hugging_face import sequence_attention_in
from shoal.sparse.embeddings import check_embeddings, no_sparse_embedding_error
from shoal.transport import process_group
from shoal.transport.collectives import Communicator
from shoal.transport.failure_board import FailureBoard
from shoal.zero.partition import has_float_values
from shoal.zero.sharded import ShardingPlan

if TYPE_CHECKING:  # slow to import with older torch
    from torch.utils.data import Dataset

__all__ = ["EngineClasses", "add_config_arguments", "build", "initialize", "loss_scale_of"]

SHOWN = 5
"""Parameters that a warning names before it counts the rest."""

ScheduleSource = AnySchedule | Callable[[Optimizer], AnySchedule]
ParameterSource = Iterable[Tensor | Mapping[str, Any]]


@overload
def initialize(  # pyright: ignore[reportOverlappingOverload]  a PipelineModule is a Module too: the first overload is taken
    args: Any = None, *, model: PipelineModule, optimizer: OptimizerSource | None = None,
    model_parameters: ParameterSource | None = None, training_data: Dataset[Any] | None = None,
    lr_scheduler: ScheduleSource | None = None, distributed_port: int = 29500, mpu: Any = None,
    dist_init_required: bool | None = None, collate_fn: Callable[[Any], Any] | None = None, config: Source | None = None,
    mesh_param: Any = None, config_params: Source | None = None,
) -> tuple[PipelineEngine, ShardedOptimizer | None, Any, AnySchedule | None]: ...


@overload
def initialize(args: Any = None, model: nn.Module | None = None, optimizer: OptimizerSource | None = None,
               model_parameters: ParameterSource | None = None, training_data: Dataset[Any] | None = None,
               lr_scheduler: ScheduleSource | None = None, distributed_port: int = 29500, mpu: Any = None,
               dist_init_required: bool | None = None, collate_fn: Callable[[Any], Any] | None = None,
               config: Source | None = None, mesh_param: Any = None, config_params: Source | None = None,
               ) -> tuple[Engine, ShardedOptimizer | None, Any, AnySchedule | None]: ...


def initialize(args: Any = None, model: nn.Module | None = None, optimizer: OptimizerSource | None = None,
               model_parameters: ParameterSource | None = None, training_data: Dataset[Any] | None = None,
               lr_scheduler: ScheduleSource | None = None, distributed_port: int = 29500, mpu: Any = None,
               dist_init_required: bool | None = None, collate_fn: Callable[[Any], Any] | None = None,
               config: Source | None = None, mesh_param: Any = None, config_params: Source | None = None,
               ) -> tuple[Engine | PipelineEngine, ShardedOptimizer | None, Any, AnySchedule | None]:
    """Wrap `model` for training as the configuration says; every rank calls it with the same model.

    `config` is a path, a dict, or base64 of JSON; it may come as `args.shoal_config` instead. `optimizer` is an instance
    over the model's parameters, or a function of parameter groups; without it `config` names one. `lr_scheduler` is a
    schedule of that instance, or a function of the optimizer. `training_data` is a dataset to build the loader from.

    Returns (engine, its optimizer, the loader, the schedule), each None when absent; the engine is a `PipelineEngine` if
    the model is a `PipelineModule`. Raises `ConfigError` for the configuration, `UsageError` for the objects,
    `RanksDisagree` when ranks differ.
    """
    engine = build(EngineClasses(), args=args, model=model, optimizer=optimizer, model_parameters=model_parameters,
                   training_data=training_data, lr_scheduler=lr_scheduler, distributed_port=distributed_port, mpu=mpu,
                   dist_init_required=dist_init_required, collate_fn=collate_fn, config=config, mesh_param=mesh_param,
                   config_params=config_params)
    return engine, engine.optimizer, engine.training_dataloader, engine.lr_scheduler


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineClasses:
    """The classes that `build` instantiates: Shoal's own, or subclasses under other names."""

    plain: Callable[..., Engine] = Engine
    pipeline: Callable[..., PipelineEngine] = PipelineEngine
    optimizer: Callable[[Config, Optimizer], type[ShardedOptimizer]] = lambda settings, inner: ShardedOptimizer
    """The class of the sharded optimizer, by the configuration and the inner optimizer."""
    schedules: Mapping[str, Callable[..., AnySchedule]] = field(default_factory=dict[str, Callable[..., AnySchedule]])
    """Schedules that replace those registered under the same names."""
    loss_scale: Callable[[Config], LossScale] = lambda settings: loss_scale_of(settings)
    """The loss scale, by the configuration."""
    checks_fp32: Callable[[Config], bool] = lambda settings: False
    """Whether a step in fp32, too, is skipped where gradients are not finite, by the configuration."""


def build(classes: EngineClasses, *, args: Any, model: nn.Module | None, optimizer: OptimizerSource | None,
          model_parameters: ParameterSource | None, training_data: Dataset[Any] | None, lr_scheduler: ScheduleSource | None,
          distributed_port: int, mpu: Any, dist_init_required: bool | None, collate_fn: Callable[[Any], Any] | None,
          config: Source | None, mesh_param: Any, config_params: Source | None) -> Engine | PipelineEngine:
    """Build the engine that `initialize` returns, as an instance of one of `classes`."""
    model = _check_model(model)
    source = _source(args, config, config_params)
    process_group.init_distributed(distributed_port=distributed_port, dist_init_required=dist_init_required,
                                   timeout=_timeout(source))
    _take_back(model)
    compilation = Compilation()
    with compilation.undone_on_failure():
        model = compilation.unwrap(model)
        try:
            mesh = mesh_of(source, model, mpu, mesh_param)
            settings = Config.resolve(source, data_ranks=mesh.size("data"), data_ranks_origin=_data_ranks_origin(mesh))
        except (ConfigError, UsageError) as error:
            process_group.announce_failure(error)
            raise
        failure_board = FailureBoard(check_ranks_agree(model, mesh, settings))
        _set_up_log(settings)
        process_group.keep_threads()
        with _published_on_failure(failure_board):
            zero = settings.zero_optimization
            parameter_groups = parameter_groups_of(mesh, model, zero.stage, partial(
                Communicator, timeout=settings.timeout, debug=settings.debug, direct_bytes=settings.direct_bytes,
                gather_elements=zero.allgather_bucket_size, reduce_elements=zero.reduce_bucket_size))
            device = process_group.device()
            if not has_float64(device):
                raise NotSupportedYet(f"{device}: the device has no float64, in which the norm of gradients is summed; "
                                      f"train on the CPU: shoal.init_distributed(dist_backend='gloo') before initialize")
            traits = traits_of(settings, optimizer)
            if traits.compressing:
                check_compression(settings, mesh, model, traits.name)
            make_engine = classes.pipeline if isinstance(model, PipelineModule) else classes.plain
            engine = make_engine(model, settings, mesh, parameter_groups, failure_board, device, compilation)
        with (_restored_on_failure(engine), _published_on_failure(failure_board),
              _attention_in(engine), linear_kernels_in(engine.module, settings.kernels.linear, device)):
            sharded_optimizer = _shard(engine, optimizer, model_parameters, traits, classes)
            move_buffers(model, parameter_groups.buffers, device)
            schedule = _schedule(settings, sharded_optimizer, lr_scheduler, classes)
            loader = None if training_data is None else engine.deepspeed_io(training_data, collate_fn=collate_fn)
            engine.attach(sharded_optimizer, schedule, loader, client_optimizer=optimizer,
                          optimizer_calls=OptimizerCalls(engine))
    if isinstance(optimizer, Optimizer) and sharded_optimizer is not None:
        hand_over(optimizer, sharded_optimizer)
    _warn_of_unused("optimizer", optimizer, settings.optimizer.type)
    _warn_of_unused("scheduler", lr_scheduler, settings.scheduler.type)
    if optimizer is None and settings.optimizer.type is None and (lr_scheduler is not None or settings.scheduler.type):
        warn_once("scheduler: has no effect without an optimizer; give initialize one, or name one in the configuration")
    if isinstance(optimizer, Optimizer) and model_parameters is not None:
        warn_once("initialize: model_parameters has no effect beside an optimizer instance, whose own groups count")
    if not isinstance(model, PipelineModule) and settings.pipeline != PipelineSettings():
        warn_once(f"pipeline: has no effect: the model is a {type(model).__name__}, and no PipelineModule")
    if settings.dump_state and parameter_groups.world.rank == 0:
        logger.info("configuration: %s", settings.as_dict())
    return engine


def _attention_in(engine: BaseEngine) -> AbstractContextManager[None]:
    """Give the Hugging Face models in the module the attention that the configuration and the mesh ask for."""
    sparsity, tensor_rank = engine.settings.sparse_attention, engine.mesh.rank("tensor")
    if engine.mesh.size("sequence") == 1:
        return sparse_attention_in(engine.module, sparsity, tensor_rank=tensor_rank)
    return sequence_attention_in(engine.module, engine.sequence, sparsity, tensor_rank=tensor_rank)


def _check_model(model: object) -> nn.Module:
    """Return `model` if it is a module that an engine can train."""
    if model is None:
        raise UsageError("initialize: model is missing; pass the torch module to train")
    if isinstance(model, type):
        raise UsageError(f"initialize: model is the class {model.__name__}; pass an instance, model={model.__name__}(...)")
    if isinstance(model, BaseEngine):
        raise UsageError("initialize: model is an engine; pass the module that it trains, engine.module")
    if not isinstance(model, nn.Module):
        raise UsageError(f"initialize: model is a {type(model).__name__}; pass an instance of torch.nn.Module")
    if is_scripted(model):
        raise UsageError(f"initialize: model is a {type(model).__name__}, which takes no hooks; pass the torch module that "
                         f"was scripted or traced, or one whose forward calls it")
    _check_has_values(model)
    for name, parameter in model.named_parameters():
        if parameter.is_inference():
            raise UsageError(f"initialize: parameter '{name}' was made within torch.inference_mode(), which no step may "
                             f"write to; build the model outside of it, or give it a clone, nn.Parameter(value.clone())")
        if not isinstance(parameter, nn.Parameter):  # pyright: ignore[reportUnnecessaryIsInstance]  of torch.jit.load
            raise UsageError(f"initialize: parameter '{name}' is a {type(parameter).__name__}, as those of a module that "
                             f"torch.jit.load returns, which an engine cannot train; script the module anew in this process")
    return model


def _check_has_values(model: nn.Module) -> None:
    """Raise `UsageError` for parameters and buffers on the meta device."""
    empty = [name for named in (model.named_parameters(), model.named_buffers()) for name, tensor in named if tensor.is_meta]
    if empty:
        more = f" and {len(empty) - 1} more" if len(empty) > 1 else ""
        raise UsageError(f"initialize: tensors of the {type(model).__name__} on the meta device have no values: "
                         f"'{empty[0]}'{more}; build the model within shoal.zero.Init() instead, which shards each layer "
                         f"once it is built, or call model.to_empty(device=...) and load or initialise its weights first")


def _take_back(model: nn.Module) -> None:
    """Detach the engine that `model` has already, as after running a cell of a notebook again."""
    if (former := BaseEngine.of(model)) is not None:
        logger.warning("initialize: the model had an engine of %d steps, which is destroyed: the weights stay, the state of "
                       "its optimizer is gone. Call engine.destroy() first to hide this warning", former.global_steps)
        former.destroy()


def add_config_arguments(parser: Any) -> Any:
    """Add `--shoal-config FILE` to an argparse parser; `--deepspeed` and `--deepspeed_config` mean the same. Return it."""
    group = parser.add_argument_group("Shoal", "distributed training")
    group.add_argument("--shoal-config", "--deepspeed_config", "--deepspeed-config", "--deepscale_config",
                       dest="shoal_config", metavar="FILE", default=None, help="the JSON configuration")
    group.add_argument("--deepspeed", "--deepscale", action="store_true", help="accepted for published scripts; no effect")
    return parser


def _set_up_log(settings: Config) -> None:
    """Set the level of the library's logger, and begin to record collectives, as the configuration asks."""
    if settings.log_level is not None:
        logger.setLevel(settings.log_level.upper())
    elif logger.level == NOTSET and (settings.steps_per_print or settings.dump_state or settings.comms_logger.verbose
                                     or settings.resilience.vault.every is not None):
        logger.setLevel(INFO)  # else the lines that these settings ask for would not be shown
    if settings.comms_logger.enabled:
        comm.record(settings.comms_logger)


def _source(args: Any, config: Source | None, config_params: Source | None) -> Source:
    """Return the one configuration that was given."""
    given: dict[str, Source] = {}
    for name in ("shoal_config", "deepspeed_config", "deepscale_config"):
        value = vars(args).get(name) if args is not None else None
        if value is not None:
            given[f"args.{name}"] = value
    given |= {name: value for name, value in (("config", config), ("config_params", config_params)) if value is not None}
    if len(given) != 1:
        raise ConfigError(f"initialize: got {'no configuration' if not given else ' and '.join(given)}; give one: "
                          f"config=PATH_OR_DICT, or --shoal-config on the command line through args")
    return next(iter(given.values()))


def _data_ranks_origin(mesh: Mesh) -> str:
    """Return where the number of data ranks comes from, for errors."""
    world = f"the world size of torch.distributed, from {process_group.world_size_origin()}"
    others = mesh.ranks.numel() // mesh.size("data")
    return world if others == 1 else f"{world}, divided by the {others} ranks of one copy of the model in {mesh}"


def _timeout(source: Source) -> timedelta | None:
    """Return the configured timeout, if there is one; errors in `source` are raised once the ranks are counted."""
    try:
        settings = Config.resolve(source, data_ranks=None)
    except ConfigError:
        return None
    return None if settings.origins["timeout"] == DEFAULT else timedelta(seconds=settings.timeout)


def _shard(engine: BaseEngine, optimizer: OptimizerSource | None, parameters: ParameterSource | None,
           traits: OptimizerTraits, classes: EngineClasses) -> ShardedOptimizer | None:
    """Shard the engine's model, and build the optimizer with these `traits` over its masters."""
    settings, model = engine.settings, engine.module
    named = settings.optimizer.type is not None
    groups = OptimizerGroups.collect(model, optimizer.param_groups if isinstance(optimizer, Optimizer) else parameters)
    dtypes = _precision(settings, model, traits, engine.communicator)
    _cast_running_statistics(model, dtypes.compute)
    if settings.sparse_gradients and not any(engine.parameter_groups.world.gather_objects([*check_embeddings(model)])):
        raise no_sparse_embedding_error(model)
    trained = groups.group_of if optimizer is not None or named else {}
    if not trained and (optimizer is not None or named) and engine.mesh.size("pipeline") == 1:
        raise UsageError(f"initialize: no parameter of the {type(model).__name__} that the optimizer is given requires "
                         f"gradients: all are frozen. Call requires_grad_(True) on those to train, or leave the optimizer "
                         f"out of the configuration and of initialize to evaluate alone")
    if trained:
        _warn_of_untrained(model, trained)
    storage = plan_storage(settings, model, trained, traits.moments, dtypes, engine.parameter_groups, engine.device)
    recompute_as_configured(settings, engine)
    activations = saved_activations(settings, engine)
    plan = ShardingPlan.of(settings.zero_optimization, compressed=traits.compressing, by_rows=settings.sparse_gradients,
                           activations=activations)
    sharded = engine.shard(trained, plan, dtypes, storage)
    if not trained and not (engine.mesh.size("pipeline") > 1 and (optimizer is not None or named)):
        return None  # but a stage without trained parameters steps with the others all the same
    if traits.compressing:
        check_masks(sharded.trainable, groups.options, sharded.tensor_slices)
    else:
        warn_of_masks(groups.options, traits.name)
    views = Views(sharded.trainable)
    if isinstance(optimizer, Optimizer):
        inner = groups.copy_over(optimizer, views)
    elif optimizer is not None:
        inner = groups.build(optimizer, views)
        if not isinstance(inner, Optimizer):  # pyright: ignore[reportUnnecessaryIsInstance]  a user's function
            raise UsageError(f"initialize: the optimizer function returned a {type(inner).__name__}; return a torch "
                             f"optimizer over the groups that it was given")
    else:
        assert settings.optimizer.type is not None
        inner = make_optimizer(settings.optimizer.type, settings.optimizer.params,
                               [{**options, "params": views.of_group(i)} for i, options in enumerate(groups.options)])
    check_optimizer(settings, inner)
    if isinstance(inner, CompressedOptimizer) and not traits.compressing:
        raise UsageError(f"initialize: the optimizer function returned a {type(inner).__name__}, which must be known "
                         f"before state is placed; name it in the configuration, or pass an instance")
    if len(inner.param_groups) != len(groups.options):
        raise UsageError(f"initialize: the optimizer function returned {len(inner.param_groups)} groups for "
                         f"{len(groups.options)}; return an optimizer over the groups that it was given")
    groups.show_params(inner)
    rules = _step_rules(settings, dtypes, OptimizerTraits.of(inner), classes, named=optimizer is None)
    return classes.optimizer(settings, inner)(sharded, views, inner, classes.loss_scale(settings), rules)


def _warn_of_untrained(model: nn.Module, trained: Container[nn.Parameter]) -> None:
    """Warn of parameters that require gradients and are in no group of the optimizer."""
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad and parameter not in trained]
    if names:
        more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
        warn_once(f"initialize: {len(names)} parameters of the {type(model).__name__} require gradients and are in no group "
                  f"of the optimizer: {', '.join(names[:SHOWN])}{more}. They get no gradient, and no other optimizer can "
                  f"step them: give them to this one in a group of their own, which may have another lr, or freeze them by "
                  f"requires_grad_(False)")


@contextmanager
def _published_on_failure(failure_board: FailureBoard) -> Generator[None]:
    """Publish a failure of this rank to the ranks that did not fail, and wait for this one now or later."""
    try:
        yield
    except Exception as failure:
        if not isinstance(failure, CollectiveFailed):  # which tells of another rank
            failure_board.publish(f"rank {comm.get_rank()}: initialize failed: {type(failure).__name__}: {failure}")
        raise


@contextmanager
def _restored_on_failure(engine: BaseEngine) -> Generator[None]:
    """Give the model back as it was when building the engine fails, so that another try may follow.

    Shards that other ranks do not return stay guarded: reading such a parameter raises, so that it is not taken for weights.
    """
    try:
        yield
    except Exception:
        recompute_blocks(engine.recomputed, RecomputeMode.NONE)
        if engine.sharded is not None:
            engine.parameter_groups.shorten_timeouts()
            try:
                engine.sharded.destroy()
            except Exception as error:
                logger.error("rank %d: initialize failed, and the parameters of %s could not be restored: build the model "
                             "again, reading this one raises: %s", engine.global_rank,
                             unit_names(missing_units(engine.sharded)), error)
        raise


def _schedule(settings: Config, sharded: ShardedOptimizer | None, source: ScheduleSource | None,
              classes: EngineClasses) -> AnySchedule | None:
    """Return the schedule of the configuration, or the one that `source` is or makes."""
    if sharded is None:
        return None
    optimizer, schedule = sharded.optimizer, None
    if source is not None:
        schedule = source(optimizer) if callable(source) else source
    elif settings.scheduler.type is not None:
        schedule = make_schedule(settings.scheduler.type, settings.scheduler.params, optimizer,
                                 replaced_by=classes.schedules)
    if isinstance(optimizer, CompressedOptimizer):
        configured = None if source is not None else settings.scheduler.params.get("total_num_steps")
        check_warm_up(optimizer, getattr(schedule, "total_steps", configured))
    if schedule is not None and (names := required_arguments(schedule)):
        kind = type(schedule).__name__
        warn_once(f"scheduler: engine.step() alone does not advance a {kind}, whose step requires {', '.join(names)}: call "
                  f"engine.step(lr_kwargs={{'{names[0]}': ...}}), or the step of the schedule itself. transformers' Trainer "
                  f"calls it only where the configuration has no section 'optimizer'")
    return schedule


def _warn_of_unused(section: str, given: object, named: str | None) -> None:
    """Warn where an object takes the place of the one that the configuration names."""
    if given is not None and named is not None:
        warn_once(f"{section}: initialize was given an object, which is used; '{named}' of the configuration is not")


# Sections of the configuration, as arguments of each part


def _precision(settings: Config, model: nn.Module, traits: OptimizerTraits, data: Communicator) -> Policy:
    """Return the dtypes of compute, of accumulated gradients and of their reduction over `data`, and how they average."""
    accumulate = settings.data_types.grad_accum_dtype
    if traits.compressing and accumulate is None:  # 16 bits would round the compression error away
        accumulate = "fp32" if settings.fp16.enabled or settings.bf16.enabled else None
    dtypes = {name: parameter.dtype for name, parameter in model.named_parameters() if has_float_values(parameter)}
    model_dtype = next(iter(dtypes.values()), torch.float32)
    other = next((name for name, dtype in dtypes.items() if dtype is not model_dtype), None)
    if other is not None and not (settings.fp16.enabled or settings.bf16.enabled):
        warn_once(f"initialize: parameter '{other}' is {dtypes[other]} and the first one is {model_dtype}: an engine has "
                  f"one dtype for all, and this model trains in {model_dtype}. Drop casts to {dtypes[other]} from its "
                  f"forward; or set bf16 or fp16 in the configuration, or use autocast")
    averaging = Averaging(prescale=settings.prescale_gradients, predivide=settings.gradient_predivide_factor,
                          wide=not data.native, times=data.ranks if settings.gradient_allreduce_op == "sum" else 1)
    return policy(fp16=settings.fp16.enabled, bf16=settings.bf16.enabled, model_dtype=model_dtype,
                  communication_data_type=settings.communication_data_type, grad_accum_dtype=accumulate,
                  averaging=averaging)


def _cast_running_statistics(model: nn.Module, dtype: torch.dtype) -> None:
    """Give the running mean and variance of a BatchNorm the dtype of its weights, as `model.to(dtype)` would.

    Other buffers keep theirs. torch refuses a BatchNorm whose weights are of 16 bits and whose statistics are not.
    """
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.affine:  # pyright: ignore[reportPrivateUsage]
            for name in ("running_mean", "running_var"):
                if (buffer := getattr(module, name)) is not None:
                    setattr(module, name, buffer.to(dtype))


def _step_rules(settings: Config, dtypes: Policy, traits: OptimizerTraits, classes: EngineClasses, *,
                named: bool) -> StepRules:
    """Return the rules of a step, by an optimizer that the configuration `named` or by another."""
    overflows = traits.compressing or torch.float16 in (dtypes.compute, dtypes.reduce)
    overflows |= dtypes.compute is torch.float32 and classes.checks_fp32(settings)
    zero, offload = settings.zero_optimization, settings.zero_optimization.offload_optimizer
    ahead = (offload.buffer_count - 1) // 2 if offload.pipeline_read else 0
    native = named and prefers_native(settings.optimizer.type, settings.optimizer.params)
    return StepRules(
        clipping=settings.gradient_clipping,
        check_overflow=overflows or (settings.bf16.enabled and settings.bf16.check_grad_overflow),
        compute_norm=zero.compute_grad_norm or settings.resilience.guard.enabled, allow_unused=zero.ignore_unused_parameters,
        chunk_elements=min(zero.sub_group_size, CAST_ELEMENTS), native=native, fetches_ahead=ahead,
        commits_behind=offload.buffer_count - 1 - ahead if offload.pipeline_write else 0,
        in_backward=bool(offload.step_in_backward))


def loss_scale_of(settings: Config) -> LossScale:
    """Return the factor of losses, and how it changes; 1 without fp16."""
    fp16 = settings.fp16
    if not fp16.enabled:
        return StaticScale(1.0)
    return make_loss_scale(loss_scale=fp16.loss_scale, initial_scale_power=fp16.initial_scale_power,
                           loss_scale_window=fp16.loss_scale_window, hysteresis=fp16.hysteresis,
                           consecutive_hysteresis=fp16.consecutive_hysteresis, min_loss_scale=fp16.min_loss_scale)
