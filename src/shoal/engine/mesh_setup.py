"""Which mesh a job trains on: what the model, the `mpu` and the configuration say, put together or refused.

    PipelineModule   its pipeline ranks, or its whole topology
    mpu              a shoal.Mesh, or a Megatron-style object
    configuration    mesh.*, pipeline.stages, tensor_parallel.autotp_size, zero_optimization.mics_shard_size

Whoever speaks of an axis must agree with the others; the ranks that nobody speaks for are data ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import Any

import torch.distributed as dist
from torch import nn

from shoal.config.load import Source
from shoal.engine.schema import Config
from shoal.errors import UsageError
from shoal.mesh.mesh import AXES, Mesh, adapt
from shoal.mesh.parameter_groups import ParameterGroups
from shoal.mesh.tensor_slice import TensorSlice, cuts_of
from shoal.pipeline.module import PipelineModule
from shoal.tensor_parallel import parallelize
from shoal.transport import process_group
from shoal.transport.collectives import Communicator

__all__ = ["configured_mesh", "mesh_of", "parameter_groups_of"]


def mesh_of(source: Source, model: nn.Module, mpu: Any, mesh_param: Any) -> Mesh:
    """Return the mesh of this job; every rank calls it.

    Raises `UsageError` when two sources give an axis different sizes, and when the sizes do not multiply to the ranks.
    """
    said = _configured(Config.resolve(source, data_ranks=None))
    if not isinstance(model, PipelineModule):
        for key, sizes in said.items():
            if sizes.get("pipeline", 1) > 1:
                raise UsageError(f"initialize: {key} asks for {sizes['pipeline']} pipeline ranks, and the model is a "
                                 f"{type(model).__name__}, which has no stages; give a shoal.PipelineModule")
    if mesh_param is not None:
        shard, sequence = mesh_param
        said |= {"mesh_param": {"shard": shard, "sequence": sequence}}
    if isinstance(model, PipelineModule):
        if mpu is None and model.topology_given:
            mpu = Mesh.of(model.topology())
        said["PipelineModule"] = {"pipeline": model.num_stages}
    if mpu is not None:
        mesh = adapt(mpu)
        said["mpu" if not isinstance(model, PipelineModule) else "mpu or topology"] = _sizes(mesh)
        _agreed(said)
        _check_places(mesh, model)
        return mesh
    return _of_sizes(_agreed(said))


def configured_mesh(config: Source) -> Mesh:
    """Return the mesh that a configuration asks for, to a script that needs its groups before `initialize`.

    Every rank calls it, and passes the mesh on as `mpu`. Raises `ConfigError` for the configuration, `UsageError` for
    sizes that do not multiply to the ranks.
    """
    process_group.init_distributed()
    return _of_sizes(_agreed(_configured(Config.resolve(config, data_ranks=None))))


def _of_sizes(sizes: dict[str, int]) -> Mesh:
    """Return the mesh of so many ranks by axis; the ranks that nobody speaks for are data ranks."""
    if "shard" in sizes and "replica" not in sizes:  # whatever else is left are copies of a shard group
        sizes["replica"] = max(1, dist.get_world_size() // prod(sizes.values()))
    return Mesh(**sizes)  # pyright: ignore[reportArgumentType]  the names of axes


def _check_places(mesh: Mesh, model: nn.Module) -> None:
    """Raise on every rank unless each has built the stages of its place in the mesh."""
    built = model.pipeline_rank if isinstance(model, PipelineModule) else mesh.rank("pipeline")
    for rank, (stage, place) in enumerate(process_group.gather_objects((built, mesh.rank("pipeline")),
                                                                "initialize: stages")):
        if stage != place:
            raise UsageError(f"initialize: rank {rank} built the stages of pipeline rank {stage}, and its place in the mesh "
                             f"is {place}; pass PipelineModule the topology of that mesh (topology=), whose order of axes "
                             f"differs from its own")


def parameter_groups_of(mesh: Mesh, model: nn.Module, stage: int,
                        communicator_of: Callable[[dist.ProcessGroup], Communicator]) -> ParameterGroups:
    """Return the ranks that hold each parameter of `model`, whose state ZeRO `stage` places."""
    stages: dict[str, list[int]] = {}
    if isinstance(model, PipelineModule):
        model.settle()
        for tied in (tied for tied in model.tied.values() if len(tied.stages) > 1):
            stages[tied.name] = [model.owner[stage] for stage in tied.stages]
    if mesh.size("tensor") > 1 and not _anywhere(mesh, bool(_marked(model, mesh) or cuts_of(model))):
        _cut_layers(mesh, model)
    aliases = aliases_of(model)
    cuts = {aliases.get(name, name): cut for name, cut in (_marked(model, mesh) | cuts_of(model)).items()}
    return ParameterGroups(mesh, communicator_of, tensor_slices=cuts, stages=stages, hybrid=stage > 0)


def _cut_layers(mesh: Mesh, model: nn.Module) -> None:
    """Cut a model that is whole by the plan that is known for its class."""
    if isinstance(model, PipelineModule):
        raise UsageError(f"initialize: the mesh has {mesh.size('tensor')} tensor ranks, and no layer of the PipelineModule "
                         f"is cut over them: before initialize call shoal.tensor_parallel.parallelize(model, "
                         f"mesh.group('tensor'), plan, stages=mesh.group('pipeline')) with mesh = shoal.Mesh(...), and pass "
                         f"mpu=mesh; or build it of layers of shoal.tensor_parallel")
    try:
        parallelize(model, mesh.group("tensor"), stages=mesh.group("pipeline"))
    except UsageError as error:
        raise UsageError(f"initialize: the mesh has {mesh.size('tensor')} tensor ranks, and no layer of the model is cut "
                         f"over them. {error}. Or build it of layers of shoal.tensor_parallel, or mark the parameters of "
                         f"layers of your own by tensor_model_parallel=True and partition_dim") from error


def _anywhere(mesh: Mesh, here: bool) -> bool:
    """Return whether something is so on any rank of the job."""
    return any(process_group.gather_objects(here, "initialize: cuts")) if mesh.size("pipeline") > 1 else here


def _marked(model: nn.Module, mesh: Mesh) -> dict[str, TensorSlice]:
    """Return the cuts of parameters that Megatron-style layers have marked: cut evenly along `partition_dim`."""
    rank, ranks = mesh.rank("tensor"), mesh.size("tensor")
    found: dict[str, TensorSlice] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        marks = vars(parameter) if hasattr(parameter, "__dict__") else {}
        if ranks > 1 and (marks.get("tensor_model_parallel") or marks.get("model_parallel")):
            dim = marks.get("partition_dim", 0)
            if not (isinstance(dim, int) and 0 <= dim < parameter.ndim):
                raise UsageError(f"initialize: '{name}' is marked as cut over the tensor ranks along partition_dim {dim!r}, "
                                 f"and its part here is {tuple(parameter.shape)}; give it the dim that is cut, 0 to "
                                 f"{parameter.ndim - 1}, or set tensor_model_parallel to False if it is not")
            found[name] = TensorSlice.even(dim, [parameter.shape[dim] * ranks], rank, ranks)
    return found


def aliases_of(model: nn.Module) -> Mapping[str, str]:
    """Return the names of parameters that have another in the whole model than here."""
    return {here: tied.name for here, tied in model.tied.items()} if isinstance(model, PipelineModule) else {}


def _configured(config: Config) -> dict[str, dict[str, int]]:
    """Return the sizes that the configuration gives, by key."""
    said: dict[str, dict[str, int]] = {}
    for axis in AXES:
        if (size := getattr(config.mesh, axis)) is not None:
            said[f"mesh.{axis}"] = {axis: size}
    if config.pipeline.stages is not None:
        said["pipeline.stages"] = {"pipeline": config.pipeline.stages}
    if config.tensor_parallel.size is not None:
        said["tensor_parallel.autotp_size"] = {"tensor": config.tensor_parallel.size}
    if config.zero_optimization.mics_shard_size > 0:
        said["zero_optimization.mics_shard_size"] = {"shard": config.zero_optimization.mics_shard_size}
    return said


def _agreed(said: Mapping[str, Mapping[str, int]]) -> dict[str, int]:
    """Return the size of each axis that somebody spoke of."""
    sizes: dict[str, int] = {}
    origin: dict[str, str] = {}
    for who, theirs in said.items():
        for axis, size in theirs.items():
            if sizes.setdefault(axis, size) != size:
                raise UsageError(f"initialize: the {axis} axis has {sizes[axis]} ranks by {origin[axis]} and {size} by "
                                 f"{who}; give both the same, or leave one out")
            origin.setdefault(axis, who)
    return sizes


def _sizes(mesh: Mesh) -> dict[str, int]:
    return {axis: mesh.size(axis) for axis in AXES}

