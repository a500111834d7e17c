"""The one call: a model, and a JSON file that says how to train it.

The order is a contract between ranks: distributed first, then the configuration (which needs the world size), the units
(which compare what every rank built), the optimizer over their masters, the schedule, the loader.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from logging import INFO, NOTSET
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shoal import comm
from shoal.config.load import Source
from shoal.config.resolve import DEFAULT
from shoal.engine.checks import check_compressing, check_warm_up
from shoal.engine.engine import Engine
from shoal.engine.frozen_check import FrozenParamCheck
from shoal.engine.lost import missing, named
from shoal.engine.mesh_setup import mesh_of, parameter_groups_of
from shoal.engine.optimizer_traits import OptimizerSource, OptimizerTraits, check_optimizer, chosen
from shoal.engine.pipeline_engine import PipelineEngine
from shoal.engine.rank_consistency import agree, facts_of
from shoal.engine.replicated_grads import ReplicatedGradCheck
from shoal.engine.schema import Config
from shoal.engine.storage_plan import plan_storage
from shoal.engine.translate import loss_scale_of, plan_of, policy_of, rules_of
from shoal.errors import CollectiveFailed, ConfigError, NotSupportedYet, UsageError
from shoal.log import logger, warn_once
from shoal.mesh.mesh import Mesh
from shoal.optim.compressed import CompressedOptimizer
from shoal.optim.groups import Groups
from shoal.optim.masks import check_masks, warn_of_masks
from shoal.optim.registry import make_optimizer
from shoal.optim.sharded import ShardedOptimizer
from shoal.optim.views import Views
from shoal.pipeline.module import PipelineModule
from shoal.pipeline.settings import PipelineSettings
from shoal.schedule.registry import AnySchedule, make_schedule
from shoal.sparse.embeddings import check_embeddings, no_sparse_embedding_error
from shoal.transport import process_group
from shoal.transport.collectives import Communicator
from shoal.transport.failure_board import FailureBoard
from shoal.zero.sharded import ShardedModel

if TYPE_CHECKING:  # slow to import with older torch
    from torch.utils.data import Dataset

ScheduleSource = AnySchedule | Callable[[Optimizer], AnySchedule]


def initialize(args: Any = None, model: nn.Module | None = None, optimizer: OptimizerSource | None = None,
               model_parameters: Iterable[Tensor | Mapping[str, Any]] | None = None,
               training_data: Dataset[Any] | None = None, lr_scheduler: ScheduleSource | None = None,
               distributed_port: int = 29500, mpu: Any = None, dist_init_required: bool | None = None,
               collate_fn: Callable[[Any], Any] | None = None, config: Source | None = None, mesh_param: Any = None,
               config_params: Source | None = None) -> tuple[Engine, ShardedOptimizer | None, Any, AnySchedule | None]:
    """Wrap `model` for training as the configuration says; every rank calls it with the same model.

    `config` is a path, a dict, or base64 of JSON; it may come as `args.shoal_config` instead. `optimizer` is an instance
    over the model's parameters, or a function of parameter groups; without it `config` names one. `lr_scheduler` is a
    schedule of that instance, or a function of the optimizer. `training_data` is a dataset to build the loader from.

    Returns (engine, its optimizer, the loader, the schedule), each None when absent. Raises `ConfigError` for the
    configuration, `UsageError` for the objects, `RanksDisagree` when ranks differ.
    """
    if model is None:
        raise UsageError("initialize: model is missing; pass the torch module to train")
    source = _source(args, config, config_params)
    process_group.init_distributed(distributed_port=distributed_port, dist_init_required=dist_init_required,
                                 timeout=_timeout(source))
    try:
        mesh = mesh_of(source, model, mpu, mesh_param)
        settings = Config.resolve(source, data_ranks=mesh.size("data"), data_ranks_origin=_counted(mesh))
    except (ConfigError, UsageError) as error:
        process_group.announce_failure(error)
        raise
    board = FailureBoard(agree(facts_of(model, mesh, settings)))
    _listen(settings)
    zero = settings.zero_optimization
    parameter_groups = parameter_groups_of(mesh, model, zero.stage, partial(
        Communicator, timeout=settings.timeout, debug=settings.debug, direct_bytes=settings.direct_bytes,
        gather_elements=zero.allgather_bucket_size, reduce_elements=zero.reduce_bucket_size))
    device = process_group.device()
    engine = (PipelineEngine if isinstance(model, PipelineModule) else Engine)(
        model, settings, mesh, parameter_groups, board, device)
    engine.client_optimizer = optimizer
    stepping = chosen(settings, optimizer)
    _check_device(settings, device)
    if stepping.compressing:
        check_compressing(settings, mesh, model, stepping.name)
    _move_buffers(model, parameter_groups.data, device)
    with _untouched_by_failure(engine, optimizer):
        _build(engine, optimizer, model_parameters, stepping)
        engine.lr_scheduler = _schedule(engine, lr_scheduler)
        if training_data is not None:
            engine.training_dataloader = engine.deepspeed_io(training_data, collate_fn=collate_fn)
    _warn_of_unused("optimizer", optimizer, settings.optimizer.type)
    _warn_of_unused("scheduler", lr_scheduler, settings.scheduler.type)
    if isinstance(optimizer, Optimizer) and model_parameters is not None:
        warn_once("initialize: model_parameters has no effect beside an optimizer instance, whose own groups count")
    if not isinstance(model, PipelineModule) and settings.pipeline != PipelineSettings():
        warn_once(f"pipeline: has no effect: the model is a {type(model).__name__}, and no PipelineModule")
    if settings.dump_state and parameter_groups.world.rank == 0:
        logger.info("configuration: %s", settings.as_dict())
    return engine, engine.optimizer, engine.training_dataloader, engine.lr_scheduler


def add_config_arguments(parser: Any) -> Any:
    """Add `--shoal-config FILE` to an argparse parser; `--deepspeed` and `--deepspeed_config` mean the same. Return it."""
    group = parser.add_argument_group("Shoal", "distributed training")
    group.add_argument("--shoal-config", "--deepspeed_config", "--deepspeed-config", "--deepscale_config",
                       dest="shoal_config", metavar="FILE", default=None, help="the JSON configuration")
    group.add_argument("--deepspeed", "--deepscale", action="store_true", help="accepted for published scripts; no effect")
    return parser


def _listen(settings: Config) -> None:
    """Let be heard and recorded what the configuration asks for."""
    if settings.log_level is not None:
        logger.setLevel(settings.log_level.upper())
    elif logger.level == NOTSET and (settings.steps_per_print or settings.dump_state
                                     or settings.comms_logger.verbose):
        logger.setLevel(INFO)  # who asks for lines is to see them
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


def _check_device(settings: Config, device: torch.device) -> None:
    """Raise for what cannot be done where the model is to compute."""
    if settings.zero_optimization.offload_optimizer.step_in_backward and device.type != "cpu":
        raise NotSupportedYet(f"zero_optimization.offload_optimizer.step_in_backward: the model is to compute on {device}; "
                              f"backward steps on the host alone so far: set it to false")


def _counted(mesh: Mesh) -> str:
    """Say who counted the data ranks."""
    world = f"the world size of torch.distributed, from {process_group.world_size_origin()}"
    others = mesh.ranks.numel() // mesh.size("data")
    return world if others == 1 else f"{world}, divided by the {others} ranks of one copy of the model in {mesh}"


def _timeout(source: Source) -> timedelta | None:
    """Return the configured timeout, if there is one; what is wrong with `source` is said once the ranks are counted."""
    try:
        settings = Config.resolve(source, data_ranks=None)
    except ConfigError:
        return None
    return None if settings.origins["timeout"] == DEFAULT else timedelta(seconds=settings.timeout)


def _build(engine: Engine, optimizer: OptimizerSource | None,
           parameters: Iterable[Tensor | Mapping[str, Any]] | None, stepping: OptimizerTraits) -> None:
    """Give the engine its units and its optimizer, of which `stepping` is known."""
    settings, model = engine.settings, engine.module
    named = settings.optimizer.type is not None
    groups = Groups.collect(model, optimizer.param_groups if isinstance(optimizer, Optimizer) else parameters)
    engine.policy = dtypes = policy_of(settings, model, stepping, engine.communicator)
    if settings.sparse_gradients and not any(engine.parameter_groups.world.gather_objects([*check_embeddings(model)])):
        raise no_sparse_embedding_error(model)
    trained = groups.of if optimizer is not None or named else {}
    place = plan_storage(settings, model, trained, stepping.moments, dtypes, engine.parameter_groups, engine.device)
    engine.sharded = ShardedModel(model, engine.parameter_groups, place, aliases=engine.aliases)
    engine.sharded.shard(trained, plan_of(settings, stepping), dtypes, roots=engine.roots, announced=engine.announces,
                         boundary=engine.is_gradient_accumulation_boundary, sync=engine.synchronising)
    engine.frozen = FrozenParamCheck(
        (member.name, member.parameter) for unit in engine.sharded.units for member in unit.members)
    for each in engine.sharded.passes:
        each.before_backward = engine.before_backward
    if engine.parameter_groups.tensor is not None:
        engine.copies = ReplicatedGradCheck({member.name: member.parameter for unit in engine.sharded.trainable
                                             if unit.replica_group.tensor_replicated for member in unit.members})
    if not trained and not (engine.mesh.size("pipeline") > 1 and (optimizer is not None or named)):
        return  # a stage may have nothing to train, and steps with the others all the same
    _see_to_masks(engine, groups, stepping)
    views = Views(engine.sharded.trainable, len(groups.options))
    if isinstance(optimizer, Optimizer):
        inner = groups.rebind(optimizer, views)
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
    if isinstance(inner, CompressedOptimizer) and not stepping.compressing:
        raise UsageError(f"initialize: the optimizer function returned a {type(inner).__name__}, of which must be known "
                         f"before state is placed; name it in the configuration, or pass an instance")
    rules = rules_of(settings, dtypes, OptimizerTraits.of(inner), named=optimizer is None)
    engine.optimizer = ShardedOptimizer(engine.sharded, views, inner, loss_scale_of(settings), rules)


def _see_to_masks(engine: Engine, groups: Groups, stepping: OptimizerTraits) -> None:
    """Raise `ConfigError` for a mask that does not fit; say of one that nobody reads that it has no effect."""
    assert engine.sharded is not None
    if stepping.compressing:
        check_masks(engine.sharded.trainable, groups.options, engine.sharded.cuts)
    else:
        warn_of_masks(groups.options, stepping.name)


@contextmanager
def _untouched_by_failure(engine: Engine, optimizer: OptimizerSource | None) -> Generator[None]:
    """Give the model and the optimizer back as they were when building the engine fails, so that another try may follow.

    What other ranks hold, and do not give, stays guarded: reading it raises, so that nobody takes it for weights. Those that
    did not fail, and wait for this one now or later, are told why.
    """
    groups = [list(group["params"]) for group in optimizer.param_groups] if isinstance(optimizer, Optimizer) else []
    try:
        yield
    except Exception as failure:
        if isinstance(optimizer, Optimizer):
            for group, params in zip(optimizer.param_groups, groups, strict=False):
                group["params"] = params
        if not isinstance(failure, CollectiveFailed):  # which tells of another rank
            engine.board.publish(f"rank {engine.global_rank}: initialize failed: {type(failure).__name__}: {failure}")
        if engine.sharded is not None:
            engine.parameter_groups.shorten_timeouts()
            try:
                engine.sharded.destroy()
            except Exception as error:
                logger.error("rank %d: initialize failed, and the parameters of %s could not be had back: build the model "
                             "again, reading this one raises: %s", engine.global_rank, named(missing(engine.sharded)), error)
        raise


def _schedule(engine: Engine, source: ScheduleSource | None) -> AnySchedule | None:
    """Return the schedule of the configuration, or the one that `source` is or makes."""
    if engine.optimizer is None:
        return None
    settings, optimizer, schedule = engine.settings.scheduler, engine.optimizer.optimizer, None
    if source is not None:
        schedule = source(optimizer) if callable(source) else source
    elif settings.type is not None:
        schedule = make_schedule(settings.type, settings.params, optimizer)
    if isinstance(optimizer, CompressedOptimizer):
        named = None if source is not None else settings.params.get("total_num_steps")
        check_warm_up(optimizer, getattr(schedule, "total_steps", named))
    return schedule


def _warn_of_unused(section: str, given: object, named: str | None) -> None:
    """Say that an object takes the place of what the configuration names."""
    if given is not None and named is not None:
        warn_once(f"{section}: initialize was given an object, which is used; '{named}' of the configuration is not")


def _move_buffers(model: nn.Module, communicator: Communicator, device: torch.device) -> None:
    """Bring the buffers to the device, with rank 0's values, as the parameters have them."""
    for name, buffer in model.named_buffers():
        buffer.data = buffer.data.to(device)
        if buffer.numel():
            values = buffer.data.contiguous()
            communicator.broadcast(values.view(-1).view(torch.uint8), 0, f"buffer '{name}'")
            buffer.data.copy_(values)
