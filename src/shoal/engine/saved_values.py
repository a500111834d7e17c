"""The values of a checkpoint that are no tensors: counters, options, positions, and what the model is made of.

Those of `shared_values` are the same on every rank. Random states differ, and are saved by each rank for itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar, cast

from shoal.checkpoint import Snapshot, extra_states, rng
from shoal.engine.training_objects import TrainingObjects
from shoal.engine.training_state import group_names, parameter_shapes
from shoal.log import logger
from shoal.mesh.parameter_groups import ParameterGroups
from shoal.optim.masks import MASK
from shoal.optim.sharded import ShardedOptimizer
from shoal.zero.sharded import ShardedModel

__all__ = ["CLIENT_STEP", "EXTRA", "load_values", "of_all_stages", "shared_values"]

T = TypeVar("T")

EXTRA = "extra_states"
"""The key of the modules' extra state among the shared values; older checkpoints have none."""

CLIENT_STEP = "client_step"
"""The key of the step at which the client state was saved, which in a copy in memory is an earlier one."""


def shared_values(training: TrainingObjects, parameter_groups: ParameterGroups, stage: int,
                  client_state: Mapping[str, Any], client_step: int | None, data: dict[str, Any] | None, *,
                  exclude_frozen: bool) -> dict[str, object]:
    """Return the values that are the same on every rank; the client state is of step `client_step`. A collective call.

    `data` is the state of the loader.
    """
    sharded, optimizer = training.sharded, training.optimizer
    kept = {name for name, p in sharded.named().items() if p.requires_grad or not exclude_frozen}
    shapes = {name: shape for name, shape in parameter_shapes(sharded).items() if name in kept}
    return {
        **training.progress.counters(),
        "parameters": of_all_stages(parameter_groups, shapes),
        "tied": of_all_stages(parameter_groups, sharded.tied_names()),
        EXTRA: of_all_stages(parameter_groups, extra_states(sharded.model)),
        "stage": stage,
        "mesh": parameter_groups.mesh.ranks.tolist(),
        "optimizer": None if optimizer is None else type(optimizer.optimizer).__name__,
        "groups": [{key: value for key, value in group.items() if key not in ("params", MASK)}
                   for group in ([] if optimizer is None else optimizer.param_groups)],
        "group_names": None if optimizer is None else _names_of_groups(parameter_groups, sharded, optimizer),
        "loss_scale": {} if optimizer is None else optimizer.scaler.state_dict(),
        "residual_scale": 1.0 if optimizer is None else optimizer.scaler.value,
        "lr_scheduler": None if training.lr_scheduler is None else dict(training.lr_scheduler.state_dict()),
        "data": data,
        "guard": None if training.guard is None else training.guard.state_dict(),
        "client_state": dict(client_state),
        CLIENT_STEP: client_step,
    }


def load_values(training: TrainingObjects, snapshot: Snapshot, private: dict[str, object] | None, ranks: int, *,
                optimizer: bool, schedule: bool) -> None:
    """Load the shared values of `snapshot`, and this rank's `private` ones, None where another number of ranks saved it.

    `ranks` load it; `optimizer` and `schedule` say whether their values are loaded.
    """
    shared = snapshot.shared
    training.progress.load_counters(shared, training.accumulation)
    if training.guard is not None:
        training.guard.load_state_dict(cast("dict[str, Any]", shared.get("guard") or {}))
    if optimizer and training.optimizer is not None:
        saved_groups = cast("list[dict[str, Any]]", shared["groups"])
        for group, options in zip(training.optimizer.param_groups, saved_groups, strict=True):
            group.update(options)
        training.optimizer.scaler.load_state_dict(cast("dict[str, Any]", shared["loss_scale"]))
        scale = training.optimizer.scaler.value  # the configuration of this engine may have set another one
        training.optimizer.rescale_residuals(scale / cast("float", shared.get("residual_scale", scale)))
    if schedule and training.lr_scheduler is not None and shared["lr_scheduler"] is not None:
        training.lr_scheduler.load_state_dict(cast("dict[str, Any]", shared["lr_scheduler"]))
    if training.dataloader is not None and shared["data"] is not None:
        training.dataloader.load_state_dict(shared["data"])
    if training.optimizer is not None:
        training.optimizer.set_compression()
    if private is not None:
        rng.restore(cast("dict[str, object]", private["random"]))
    else:
        logger.info("%s was saved by %d ranks and is loaded by %d, or on another mesh, or by DeepSpeed: random states "
                    "are not restored", snapshot.path, snapshot.ranks, ranks)


def of_all_stages(parameter_groups: ParameterGroups, facts: dict[str, T]) -> dict[str, T]:
    """Return the union of the `facts` of all pipeline stages. A collective call."""
    gathered = parameter_groups.communicator("pipeline").gather_objects(facts)
    return {name: fact for each in gathered for name, fact in each.items()}


def _names_of_groups(parameter_groups: ParameterGroups, sharded: ShardedModel,
                     optimizer: ShardedOptimizer) -> list[list[str]]:
    """Return the names of the parameters of each optimizer group, of all pipeline stages."""
    stages = parameter_groups.communicator("pipeline").gather_objects(group_names(sharded, optimizer))
    return [list(dict.fromkeys(name for names in groups for name in names)) for groups in zip(*stages, strict=True)]
