"""A model as a list of layers that is divided into pipeline stages; each rank builds only the stages that it owns.

    layers      0  1  2 | 3  4 | 5  6  7 | 8        the same list on every rank
    stages         0       1        2      3        contiguous layers, balanced
    ranks          0       1        0      1        the owner of each stage

Parameters are named by layer, whatever the stages, so a checkpoint loads into any other division of the same list.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shoal.device import forked_rng
from shoal.errors import PipelineError, UsageError
from shoal.mesh.topology import PipeDataParallelTopology, ProcessTopology
from shoal.pipeline.layer import Built, Layer, LayerSpec, named
from shoal.pipeline.schedules import make_schedule
from shoal.pipeline.stage import PipelineStage, Recompute
from shoal.pipeline.stage_partition import divide
from shoal.pipeline.tying import Tied, tie
from shoal.transport import process_group
from shoal.zero.init import is_building_sharded
from shoal.zero.sharded import TiedBuffer

__all__ = ["PipelineModule"]


class PipelineModule(nn.Module):
    """A sequence of layers that is divided into pipeline stages; each rank builds its own stages.

    `layers` is a list of `LayerSpec`, `TiedLayerSpec`, modules and functions, an `nn.Sequential`, or a mapping of names to
    these. The keys of a mapping, dots included, prefix the parameter names ("transformer.h.0" gives
    "transformer.h.0.weight"), so a plain model with the same names shares checkpoints with the pipeline; layers of a list
    are named by their number. Specs are built only on the ranks of their stage; modules given as instances stay in memory on
    every rank until the caller drops the list. Each layer receives the return value of the layer before it as one argument
    (see `Unpacked`).

    The number of pipeline ranks is `num_stages`, or the axis `pipe` of `topology`; without a topology it is the slowest
    axis. Each rank owns `stages_per_rank` stages: stage s is on rank s mod p, or with the schedule "zbv" in a V (rank r owns
    r and 2p-1-r). `partition_method` divides the layers so that the heaviest stage is as light as possible:

        "parameters", "best"    by trainable parameters
        "uniform"               by number of layers
        "type:REGEX"            by the number of layers whose class name matches, ignoring case
        "profile"               by the time of forward and backward, measured on `sample`, one microbatch (inputs, labels)
        [0, 3, 7, 9]            as given: stage k is layers b[k] to b[k+1]-1

    With `seed_layers`, torch is seeded with `base_seed` + the layer's number before each build (or `seed_fn` is called with
    that number), so that every division builds the same weights; torch's generators are restored afterwards. Activations
    are recomputed in groups of `activation_checkpoint_interval` layers (0: none) by `activation_checkpoint_func(function,
    *args)`, torch's non-reentrant checkpoint by default, and only for the classes named in `checkpointable_layers`.
    `dynamic_shape` has no effect: every microbatch may have its own shapes. `loss_fn(output, labels)` runs in the last
    stage; it must have no parameters.

    Raises `UsageError` for sizes that do not fit the world, layers that cannot be divided, and a stage without parameters.
    """

    def __init__(self, layers: Any, num_stages: int | None = None, topology: ProcessTopology | None = None,
                 loss_fn: Callable[..., Any] | None = None, seed_layers: bool = False,
                 seed_fn: Callable[[int], Any] | None = None, base_seed: int = 1234,
                 partition_method: str | Sequence[int] = "parameters", activation_checkpoint_interval: int = 0,
                 activation_checkpoint_func: Callable[..., Any] | None = None,
                 checkpointable_layers: Collection[str] | None = None, dynamic_shape: bool = False, *,
                 schedule: str = "1f1b", stages_per_rank: int | None = None, sample: Any = None):
        super().__init__()
        if seed_fn is not None and not seed_layers:
            raise UsageError("PipelineModule: seed_fn: got one without seed_layers=True, and would never call it")
        if is_building_sharded():
            raise UsageError("PipelineModule: built within zero.Init, in which every rank must build the same parameters; "
                             "leave zero.Init out: each rank builds its own layers only, and initialize shards them")
        _refuse_nested(found := self._named(layers))
        _refuse_parameters(loss_fn)
        process_group.init_distributed()
        self.dynamic_shape = dynamic_shape
        self.schedule = schedule
        self.topology_given = topology is not None
        """Whether a topology was given, which then defines the mesh; otherwise the configuration defines the other axes."""
        self._topology = _topology(num_stages, topology)
        self.num_stages = self._topology.get_dim("pipe")
        """Pipeline ranks."""
        self.pipeline_rank: int = self._topology.get_coord(dist.get_rank()).pipe
        placed = make_schedule(schedule, ranks=self.num_stages, microbatches=1, stages_per_rank=stages_per_rank)
        self.stages_per_rank, self.owner = placed.stages_per_rank, placed.owner
        """The pipeline rank of each stage."""
        self.numbers = tuple(stage for stage, rank in enumerate(self.owner) if rank == self.pipeline_rank)
        """The stages of this rank."""
        self.names = tuple(layer.name for layer in found)
        """The names of all layers, in order."""
        self._loss = (loss_fn,)  # in a tuple, so that a loss module is no submodule: its state is not the model's
        self._partition = divide(found, len(self.owner), partition_method, sample=sample, loss_fn=loss_fn)
        seeding = _Seeding(seed_layers, seed_fn, base_seed)
        self.stages = tuple(
            PipelineStage(number, seeding.build(found[self._partition.of(number)])) for number in self.numbers)
        """The stages of this rank, as modules."""
        self.tied: Mapping[str, Tied] = {}
        """This rank's parameters that several layers share, by their names in `named_parameters`."""
        self.tied = self._register([layer for stage in self.stages for layer in stage.layers])
        self.tied_buffers = self._tied_buffers({layer.path: layer for layer in reversed(found)})
        """This rank's buffers of modules that several layers share, by their names in `named_buffers`."""
        self._recompute = Recompute(function=activation_checkpoint_func, kinds=checkpointable_layers)
        self.set_checkpoint_interval(activation_checkpoint_interval)

    def _named(self, layers: Any) -> tuple[Layer, ...]:
        """Return the layers with their names."""
        return named(layers)

    @property
    def loss_fn(self) -> Callable[..., Any] | None:
        """The loss function: the last stage calls it with its output and the labels."""
        return self._loss[0]

    def forward(self, inputs: Any) -> Any:
        """Run all layers, if one rank has them all. Raises `PipelineError` otherwise."""
        if self.num_stages > 1:
            raise PipelineError(f"PipelineModule.forward: its layers are divided over {self.num_stages} pipeline ranks; use "
                                f"train_batch and eval_batch of the engine, or num_stages=1 to call it as a plain model")
        for stage in self.stages:
            inputs = stage(inputs)
        return inputs

    def partitions(self) -> tuple[int, ...]:
        """Return the boundaries of the stages: stage k is layers p[k] to p[k+1]-1."""
        return self._partition.boundaries

    def stage_owner(self, layer_idx: int) -> int:
        """Return the pipeline rank of a layer. Raises `UsageError` for an index out of range."""
        if not 0 <= layer_idx < len(self.names):
            raise UsageError(f"stage_owner: got layer {layer_idx}; there are the layers 0 to {len(self.names) - 1}")
        return self.owner[bisect_right(self._partition.boundaries, layer_idx) - 1]

    def topology(self) -> ProcessTopology:
        """Return the topology: the coordinates of all ranks."""
        return self._topology

    def num_pipeline_stages(self) -> int:
        """Return the number of pipeline ranks."""
        return self.num_stages

    def facts(self) -> Mapping[str, str]:
        """Return the facts that must be equal on every rank, by their name in error messages."""
        return {"the number of layers": str(len(self.names)),
                **{f"layer {index}": layer for index, layer in enumerate(self._partition.described)},
                "where stages begin": str(list(self.partitions())), "the stages of ranks": str(list(self.owner)),
                "the schedule": repr(self.schedule), "tied weights": "; ".join(map(str, self._partition.ties)) or "none"}

    def set_checkpoint_interval(self, interval: int) -> None:
        """Recompute activations in groups of `interval` layers from now on; 0: no recomputation."""
        if interval < 0:
            raise UsageError(f"activation_checkpoint_interval: got {interval}; give layers per group, or 0 for no recompute")
        self._recompute = replace(self._recompute, interval=interval)
        for stage in self.stages:
            stage.set_recompute(self._recompute)

    def finish_pending(self) -> None:
        """Make the stages run the modules that now have the layers' names: a tensor-parallel plan may have replaced them."""
        for stage in self.stages:
            for layer in stage.layers:
                if layer.module is not None:
                    layer.body = self.get_submodule(layer.path)
                    setattr(stage, str(layer.index), layer.body)

    def get_additional_losses(self) -> Mapping[str, Tensor] | None:
        """Return further losses to report; None, unless a subclass overrides it."""
        return None

    def train(self, mode: bool = True) -> Self:
        for stage in self.stages:
            stage.train(mode)
        if isinstance(self.loss_fn, nn.Module):
            self.loss_fn.train(mode)
        return super().train(mode)

    def extra_repr(self) -> str:
        return f"pipeline rank {self.pipeline_rank} of {self.num_stages}, stages {list(self.numbers)} of {len(self.owner)}"

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        if isinstance(self.loss_fn, nn.Module):
            self.loss_fn._apply(fn)
        return super()._apply(fn, recurse)

    def _register(self, layers: Sequence[Built]) -> Mapping[str, Tied]:
        """Register the layers as submodules under their names, tie their shared weights, and return these by name."""
        shared = [(each, parameter) for each, parameter in tie(self._partition.ties, layers)]
        for layer in layers:
            if layer.module is not None:
                self._add_submodule(layer.path, layer.module)
        names = {parameter: name for name, parameter in self.named_parameters()}
        return {names[parameter]: Tied(name=each.name, stages=each.stages) for each, parameter in shared}

    def _tied_buffers(self, first: Mapping[str, Layer]) -> dict[str, TiedBuffer]:
        """Return the buffers of modules that layers share, of which `first` is the first in the whole model, by path."""
        built = [layer for stage in self.stages for layer in stage.layers]
        here = {layer.index for layer in built}
        shared = {layer.path: layer.module for layer in built if layer.path != layer.name and layer.module is not None}
        return {f"{path}.{name}": TiedBuffer(name=f"{first[path].name}.{name}", saved_here=first[path].index in here)
                for path, module in shared.items() for name, _ in module.named_buffers()}

    def _add_submodule(self, name: str, module: nn.Module) -> None:
        """Register a module under a name, with a parent module for each part of a dotted name."""
        *path, leaf = name.split(".")
        parent: nn.Module = self
        try:
            for part in path:
                if part not in dict(parent.named_children()):
                    parent.add_module(part, _Branch())
                parent = parent.get_submodule(part)
            parent.add_module(leaf, module)
        except KeyError as error:
            raise UsageError(f"layers: the name '{name}' cannot be: {error.args[0]} in {type(parent).__name__}; rename the "
                             f"layer") from error


class _Branch(nn.Module):
    """A parent module for one part of a dotted name."""


class _Seeding:
    """Builds layers, each from its own seed if `seeded`; layers of one path get the module of the first."""

    def __init__(self, seeded: bool, function: Callable[[int], Any] | None, base: int):
        self._seeded = seeded
        self._function = torch.manual_seed if function is None else function
        self._base = base
        self._bodies: dict[str, nn.Module] = {}

    def build(self, layers: Iterable[Layer]) -> list[Built]:
        """Build layers in order."""
        built: list[Built] = []
        with forked_rng() if self._seeded else nullcontext():
            for layer in layers:
                if self._seeded:
                    self._function(self._base + layer.index)
                built.append(layer.build(self._bodies.get(layer.path)))
                if (module := built[-1].module) is not None:
                    self._bodies[layer.path] = module
        return built


def _topology(num_stages: int | None, topology: ProcessTopology | None) -> ProcessTopology:
    """Return the given topology, or that of `num_stages` pipeline ranks. Raises `UsageError` if it does not fit the job."""
    world = dist.get_world_size()
    if topology is None and num_stages is None:
        raise UsageError("PipelineModule: give num_stages, or a topology with an axis 'pipe'")
    if topology is None:
        assert num_stages is not None
        if type(num_stages) is not int:
            raise UsageError(f"PipelineModule: num_stages: got {num_stages!r}; give a whole number of pipeline ranks")
        if num_stages < 1 or world % num_stages:
            fits = ", ".join(str(count) for count in range(1, world + 1) if world % count == 0)
            raise UsageError(f"PipelineModule: num_stages: got {num_stages}; the {world} ranks of the job do not divide by "
                             f"it: give one of {fits}, or start a multiple of {max(1, num_stages)} ranks")
        return PipeDataParallelTopology(num_pp=num_stages, num_dp=world // num_stages)
    ranks = topology.get_dim("pipe")
    if ranks == 0 or topology.world_size() != world or num_stages not in (None, ranks):
        raise UsageError(f"PipelineModule: got {topology} of {topology.world_size()} ranks and num_stages={num_stages}; "
                         f"a topology has an axis 'pipe', as long as num_stages if that is given, and the {world} ranks of "
                         f"the job in all")
    return topology


def _refuse_nested(layers: Sequence[Layer]) -> None:
    for layer in layers:
        kind = layer.source.typename if isinstance(layer.source, LayerSpec) else type(layer.source)
        if issubclass(kind, PipelineModule):
            raise UsageError(f"layers: {layer} is a PipelineModule, and pipelines do not nest; give its layers instead")


def _refuse_parameters(loss_fn: Callable[..., Any] | None) -> None:
    if isinstance(loss_fn, nn.Module) and any(True for _ in loss_fn.parameters()):
        raise UsageError(f"PipelineModule: loss_fn: {type(loss_fn).__name__} has parameters, which no stage would train; "
                         f"make the module with the parameters the last layer")
