"""Set up the mesh of a job: combine the sizes that the model, the `mpu` and the configuration give, or refuse them.

    PipelineModule   its pipeline ranks, or its whole topology
    mpu              a shoal.Mesh, or a Megatron-style object
    mesh_param       (data ranks, sequence ranks)
    configuration    mesh.*, pipeline.stages, tensor_parallel.autotp_size, zero_optimization.mics_shard_size,
                     sequence_parallel_size, data_parallel_size

Sources that give the size of one axis must agree; ranks that no axis needs are data ranks. Once the mesh is known, all ranks
compare the model, the mesh and the configuration, before anything is built. Later checks compare ranks that hold the same
parameters; ranks of different pipeline stages hold none in common, and would train different models unnoticed.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from math import prod
from typing import Any

import torch.distributed as dist
from torch import nn

from shoal.config.load import Source
from shoal.config.resolve import leaves
from shoal.engine.schema import Config
from shoal.errors import RanksDisagree, UsageError
from shoal.mesh.mesh import AXES, Mesh, adapt
from shoal.mesh.parameter_groups import ParameterGroups
from shoal.mesh.tensor_slice import TensorSlice, cuts_of
from shoal.pipeline.module import PipelineModule
from shoal.tensor_parallel import parallelize
from shoal.transport import process_group
from shoal.transport.collectives import Communicator
from shoal.zero.placement import STAGES

__all__ = ["aliases_of", "check_ranks_agree", "configured_mesh", "mesh_of", "parameter_groups_of"]

PER_RANK = ("aio", "dump_state", "log_level", "steps_per_print", "timeout", "vocabulary_size", "nvme_path")
"""Keys that ranks may differ in, at any depth."""


# The mesh


def mesh_of(source: Source, model: nn.Module, mpu: Any, mesh_param: Any) -> Mesh:
    """Return the mesh of this job; every rank calls it.

    Raises `UsageError` when two sources give an axis different sizes, and when the sizes do not multiply to the ranks.
    """
    given = _configured_sizes(Config.resolve(source, data_ranks=None))
    if not isinstance(model, PipelineModule):
        for key, sizes in given.items():
            if sizes.get("pipeline", 1) > 1:
                raise UsageError(f"initialize: {key} asks for {sizes['pipeline']} pipeline ranks, and the model is a "
                                 f"{type(model).__name__}, which has no stages; give a shoal.PipelineModule")
    if mesh_param is not None:
        data, sequence = mesh_param
        given |= {"mesh_param": {"data": data, "sequence": sequence}}
    if isinstance(model, PipelineModule):
        if mpu is None and model.topology_given:
            mpu = Mesh.of(model.topology())
        given["PipelineModule"] = {"pipeline": model.num_stages}
    if mpu is not None:
        mesh = adapt(mpu)
        source_name = "mpu or topology" if isinstance(model, PipelineModule) else "mpu"
        given[source_name] = {axis: mesh.size(axis) for axis in (*AXES, "data")}
        _merge(given)
        _check_stages(mesh, model)
        return mesh
    return _mesh_of_sizes(_merge(given))


def configured_mesh(config: Source) -> Mesh:
    """Return the mesh that a configuration asks for, to a script that needs its groups before `initialize`.

    Every rank calls it, and passes the mesh on as `mpu`. Raises `ConfigError` for the configuration, `UsageError` for
    sizes that do not multiply to the ranks.
    """
    process_group.init_distributed()
    return _mesh_of_sizes(_merge(_configured_sizes(Config.resolve(config, data_ranks=None))))


def _configured_sizes(config: Config) -> dict[str, dict[str, int]]:
    """Return the sizes of axes that the configuration gives, by key."""
    given: dict[str, dict[str, int]] = {}
    for axis in AXES:
        if (size := getattr(config.mesh, axis)) is not None:
            given[f"mesh.{axis}"] = {axis: size}
    if config.pipeline.stages is not None:
        given["pipeline.stages"] = {"pipeline": config.pipeline.stages}
    if config.tensor_parallel.size is not None:
        given["tensor_parallel.autotp_size"] = {"tensor": config.tensor_parallel.size}
    if config.sequence_parallel_size is not None:
        given["sequence_parallel_size"] = {"sequence": config.sequence_parallel_size}
    if config.data_parallel_size is not None:
        given["data_parallel_size"] = {"data": config.data_parallel_size}
    if config.zero_optimization.mics_shard_size > 0:
        given["zero_optimization.mics_shard_size"] = {"shard": config.zero_optimization.mics_shard_size}
    return given


def _merge(given: Mapping[str, Mapping[str, int]]) -> dict[str, int]:
    """Return the size of each axis from the sizes that each source gives. Raises `UsageError` where two sources differ."""
    merged: dict[str, int] = {}
    origin: dict[str, str] = {}
    for source, sizes in given.items():
        for axis, size in sizes.items():
            if merged.setdefault(axis, size) != size:
                raise UsageError(f"initialize: the {axis} axis has {merged[axis]} ranks by {origin[axis]} and {size} by "
                                 f"{source}; give both the same, or leave one out")
            origin.setdefault(axis, source)
    return merged


def _mesh_of_sizes(sizes: dict[str, int]) -> Mesh:
    """Return the mesh with these sizes of axes; the remaining ranks are data ranks."""
    data = sizes.pop("data", None)
    if "shard" in sizes and "replica" not in sizes:  # the remaining ranks hold copies of a shard group
        sizes["replica"] = max(1, dist.get_world_size() // prod(sizes.values()))
    mesh = Mesh(**sizes)  # pyright: ignore[reportArgumentType]  the names of axes
    if data is not None and mesh.size("data") != data:
        raise UsageError(f"initialize: {data} data ranks are asked for (data_parallel_size or mesh_param), and {mesh} of "
                         f"{dist.get_world_size()} ranks has {mesh.size('data')}; change a size, or leave that out")
    return mesh


def _check_stages(mesh: Mesh, model: nn.Module) -> None:
    """Raise on every rank unless each has built the stages of its position in the mesh."""
    built = model.pipeline_rank if isinstance(model, PipelineModule) else mesh.rank("pipeline")
    pairs = process_group.gather_objects((built, mesh.rank("pipeline")), "initialize: stages")
    for rank, (stage, place) in enumerate(pairs):
        if stage != place:
            raise UsageError(f"initialize: rank {rank} built the stages of pipeline rank {stage}, and its place in the mesh "
                             f"is {place}; pass PipelineModule the topology of that mesh (topology=), whose order of axes "
                             f"differs from its own")


# The parameters on it


def parameter_groups_of(mesh: Mesh, model: nn.Module, stage: int,
                        communicator_of: Callable[[dist.ProcessGroup], Communicator]) -> ParameterGroups:
    """Return the ranks that hold each parameter of `model`, whose state rests as ZeRO `stage` says.

    Cuts a whole model over the tensor ranks first, if its plan is known.
    """
    stages: dict[str, list[int]] = {}
    if isinstance(model, PipelineModule):
        model.finish_pending()
        for tied in (tied for tied in model.tied.values() if len(tied.stages) > 1):
            stages[tied.name] = [model.owner[stage] for stage in tied.stages]
    if mesh.size("tensor") > 1 and not _on_any_rank(mesh, bool(_marked_slices(model, mesh) or cuts_of(model))):
        _slice_layers(mesh, model)
    aliases = aliases_of(model)
    cuts = {aliases.get(name, name): cut for name, cut in (_marked_slices(model, mesh) | cuts_of(model)).items()}
    return ParameterGroups(mesh, communicator_of, tensor_slices=cuts, stages=stages, hybrid=STAGES[stage].shards_state)


def aliases_of(model: nn.Module) -> Mapping[str, str]:
    """Return the names in the whole model of parameters that have other names on this rank, by these."""
    return {here: tied.name for here, tied in model.tied.items()} if isinstance(model, PipelineModule) else {}


def _slice_layers(mesh: Mesh, model: nn.Module) -> None:
    """Slice a whole model by the plan that is known for its class."""
    if isinstance(model, PipelineModule):
        raise UsageError(f"initialize: the mesh has {mesh.size('tensor')} tensor ranks, and no layer of the PipelineModule "
                         f"is sliced over them: before initialize call shoal.tensor_parallel.parallelize(model, "
                         f"mesh.group('tensor'), plan, stages=mesh.group('pipeline')) with mesh = shoal.Mesh(...), and pass "
                         f"mpu=mesh; or build it of layers of shoal.tensor_parallel")
    try:
        parallelize(model, mesh.group("tensor"), stages=mesh.group("pipeline"))
    except UsageError as error:
        raise UsageError(f"initialize: the mesh has {mesh.size('tensor')} tensor ranks, and no layer of the model is "
                         f"sliced over them. {error}. Or build it of layers of shoal.tensor_parallel, or mark the "
                         f"parameters of layers of your own by tensor_model_parallel=True and partition_dim") from error


def _on_any_rank(mesh: Mesh, here: bool) -> bool:
    """Return whether `here` is true on any rank of the job."""
    return any(process_group.gather_objects(here, "initialize: slices")) if mesh.size("pipeline") > 1 else here


def _marked_slices(model: nn.Module, mesh: Mesh) -> dict[str, TensorSlice]:
    """Return the slices of parameters that Megatron-style layers have marked: sliced evenly along `partition_dim`."""
    rank, ranks = mesh.rank("tensor"), mesh.size("tensor")
    cuts: dict[str, TensorSlice] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        marks = vars(parameter) if hasattr(parameter, "__dict__") else {}
        if ranks > 1 and (marks.get("tensor_model_parallel") or marks.get("model_parallel")):
            dim = marks.get("partition_dim", 0)
            if not (isinstance(dim, int) and 0 <= dim < parameter.ndim):
                raise UsageError(f"initialize: '{name}' is marked as sliced over the tensor ranks along partition_dim "
                                 f"{dim!r}, and its part here is {tuple(parameter.shape)}; give it the dim that is sliced, "
                                 f"0 to {parameter.ndim - 1}, or set tensor_model_parallel to False if it is not")
            cuts[name] = TensorSlice.even(dim, [parameter.shape[dim] * ranks], rank, ranks)
    return cuts


# Agreement of ranks


def check_ranks_agree(model: nn.Module, mesh: Mesh, settings: Config) -> str:
    """Raise `RanksDisagree` at the first difference between ranks, or return a random word that all ranks share.

    Compared are the layers of a pipeline (name, class and size), where its stages begin and its schedule; the rank at each
    position of the mesh; and every key of the configuration but those of `PER_RANK`. No other job, and no other call of this
    one, returns the same word.
    """
    by_rank = process_group.gather_objects((_facts(model, mesh, settings), secrets.token_hex(8)), "initialize")
    first, word = by_rank[0]
    for rank, (facts, _) in enumerate(by_rank):
        for key in (*first, *facts):
            if first.get(key) != facts.get(key):
                raise RanksDisagree(f"initialize: ranks differ in {key}: rank 0 has {first.get(key, 'none')}, rank {rank} "
                                    f"has {facts.get(key, 'none')}; give every rank the same layers, in the same order, "
                                    f"and the same configuration")
    return word


def _facts(model: nn.Module, mesh: Mesh, settings: Config) -> dict[str, str]:
    """Return the facts that must be the same on every rank, by name, the most informative first."""
    facts = dict(model.facts()) if isinstance(model, PipelineModule) else {"pipeline": "none"}
    facts["mesh"] = f"{mesh} of ranks {mesh.ranks.flatten().tolist()}"
    facts |= {f"configuration, {path}": repr(value) for path, value in leaves(settings.as_dict())
              if not set(path.split(".")) & set(PER_RANK)}
    return facts
