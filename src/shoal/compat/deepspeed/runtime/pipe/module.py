"""Pipeline modules under their published names, with the published methods, attributes and errors.

Layers of one key whose modules have the same parameters share one module on each rank, which is named `tied_modules.KEY`,
and all its parameters are tied between stages: so every division of the layers trains the same model. Layers of one key
that differ are modules of their own, and share the weights that `tied_weight_attr` names. Checkpoints name a tied weight by
its first layer in both cases, as Shoal's own do.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn

import shoal.comm
from shoal.compat.deepspeed.runtime.activation_checkpointing import checkpointing
from shoal.compat.deepspeed.runtime.pipe.topology import PipeDataParallelTopology as PipeDataParallelTopology
from shoal.compat.deepspeed.runtime.pipe.topology import PipelineParallelGrid, ProcessTopology
from shoal.errors import NotSupportedYet, PipelineError, UsageError
from shoal.pipeline import layer, module
from shoal.pipeline.tying import Tied
from shoal.transport.process_group import group_of
from shoal.zero.gathered import gathered

__all__ = ["LayerSpec", "PipelineError", "PipelineModule", "TiedLayerSpec"]


class _NotALayer(UsageError, TypeError):
    """A `typename` that is no module class."""


class _NotAMethod(NotSupportedYet, NotImplementedError):
    """A `partition_method` that is not implemented."""


class _Nested(UsageError, NotImplementedError):
    """A pipeline as a layer of a pipeline."""


class _NoLayer(UsageError, AssertionError):
    """A layer that the pipeline lacks."""


def _require_class(typename: object) -> None:
    if not isinstance(typename, type):
        raise _NotALayer(f"LayerSpec: got {typename!r}; give a subclass of torch.nn.Module, and its arguments after it")


class LayerSpec(layer.LayerSpec):
    """A layer that is built on the ranks of its stage: `typename(*module_args, **module_kwargs)`."""

    def __init__(self, typename: Any, *module_args: Any, **module_kwargs: Any):
        _require_class(typename)
        super().__init__(typename, *module_args, **module_kwargs)
        self.global_rank = dist.get_rank() if dist.is_initialized() else -1

    def __repr__(self) -> str:
        return f"{self.typename.__name__}({self.module_args}, {self.module_kwargs})"

    def build(self, log: bool = False) -> nn.Module:
        """Build the layer."""
        return super().build()


class TiedLayerSpec(LayerSpec, layer.TiedLayerSpec):
    """A layer that shares its weights `tied_weight_attr` with every other layer of the same `key`."""

    def __init__(self, key: str, typename: Any, *module_args: Any, forward_fn: Callable[..., Any] | None = None,
                 tied_weight_attr: str | Sequence[str] = ("weight",), **module_kwargs: Any):
        _require_class(typename)
        layer.TiedLayerSpec.__init__(self, key, typename, *module_args, forward_fn=forward_fn,
                                     tied_weight_attr=tied_weight_attr, **module_kwargs)
        self.tied_weight_attr: Any = list(self.tied_weight_attr)


class PipelineModule(module.PipelineModule):
    """A sequence of layers that is divided into pipeline stages; each rank builds its own stages.

    The arguments are those of Shoal's own, which says what they do. Parameters are named by layer: "0.weight".
    """

    def __init__(self, layers: Any, num_stages: int | None = None, topology: Any = None,
                 loss_fn: Callable[..., Any] | None = None, seed_layers: bool = False,
                 seed_fn: Callable[[int], Any] | None = None, base_seed: int = 1234,
                 partition_method: Any = "parameters", activation_checkpoint_interval: int = 0,
                 activation_checkpoint_func: Callable[..., Any] | None = None, checkpointable_layers: Any = None,
                 dynamic_shape: bool = False, **native: Any):
        method = str(partition_method).lower()
        if isinstance(partition_method, str) and not (
                method in ("uniform", "parameters", "best") or method.startswith("type:") or "sample" in native):
            raise _NotAMethod(f"Partitioning method {partition_method} not implemented: choose 'parameters', 'uniform', "
                              f"'type:REGEX', or 'profile' with sample=, one microbatch")
        if any(isinstance(each, module.PipelineModule) for each in _listed(layers)):
            raise _Nested("PipelineModule: a layer is a PipelineModule, and pipelines do not nest; give its layers instead")
        recompute = activation_checkpoint_func or checkpointing.checkpoint
        super().__init__(layers, num_stages, topology, loss_fn, seed_layers, seed_fn, base_seed, partition_method,
                         activation_checkpoint_interval, recompute, checkpointable_layers, dynamic_shape, **native)
        self.seed_layers, self.seed_fn, self.base_seed = seed_layers, seed_fn, base_seed
        self.activation_checkpoint_interval = activation_checkpoint_interval
        self.activation_checkpoint_func = recompute
        self.checkpointable_layers = checkpointable_layers
        self.global_rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.local_rank, self.world_group = shoal.comm.get_local_rank(), dist.group.WORLD
        self.stage_id = self.pipeline_rank
        self.micro_offset = 0
        self._layer_specs = _listed(layers)
        self._num_layers = len(self.names)
        given = super().topology()
        if isinstance(given, ProcessTopology):
            self._topo = given
        elif topology is None:
            self._topo = PipeDataParallelTopology(*given.dims)
        else:
            self._topo = ProcessTopology(given.axes, given.dims)
        self._grid = PipelineParallelGrid(topology=self._topo)
        self.tied_comms = dict(self._tied_comms())
        """The objects that join the stages that share a key: `ranks`, `group`, `weight_attr` and `module`, by key."""

    def _named(self, layers: Any) -> tuple[layer.Layer, ...]:
        """Return the layers; those of one key with the same parameters share a path, and tie all their parameters."""
        found = {each.index: each for each in super()._named(layers)}
        keys: dict[str, list[layer.Layer]] = {}
        for each in found.values():
            if isinstance(each.source, layer.TiedLayerSpec):
                keys.setdefault(each.source.key, []).append(each)
        for key, members in keys.items():
            weights = layer.parameters_of(members[0])
            if all(_kind(each) is _kind(members[0]) and layer.parameters_of(each) == weights for each in members):
                for each in members:
                    source: Any = copy(each.source)
                    source.tied_weight_attr = tuple(weights)
                    found[each.index] = replace(each, path=f"tied_modules.{key}", source=source)
        return tuple(found.values())

    def _register(self, layers: Sequence[layer.Built]) -> Mapping[str, Tied]:
        self.tied_modules = nn.ModuleDict()
        """The modules of this rank that layers share, by key."""
        return super()._register(layers)

    def _tied_comms(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the facts of the keys that several stages share, this rank among them. Every rank calls it."""
        keys: dict[str, list[int]] = {}
        for index, spec in enumerate(self._layer_specs):
            if isinstance(spec, layer.TiedLayerSpec):
                keys.setdefault(spec.key, []).append(index)
        for key, members in keys.items():
            owners = sorted({self.stage_owner(index) for index in members})
            places = [self._topo.get_coord(rank)._asdict() for rank in self._topo.filter_match(pipe=owners[0])]
            lists = [tuple(self._topo.get_rank(**{**place, "pipe": owner}) for owner in owners) for place in places]
            group = group_of(lists) if len(owners) > 1 else None
            mine = next((ranks for ranks in lists if self.global_rank in ranks), ())
            if group is not None and mine:
                here = next(built.module for built in self._built if built.index in members)
                yield key, {"ranks": list(mine), "group": group, "weight_attr": self.tied_weight_attrs[key], "module": here}

    def forward(self, forward_input: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]  published so
        """Run the layers of this rank."""
        for stage in self.stages:
            forward_input = stage(forward_input)
        return forward_input

    def get_tied_weights_and_groups(self) -> list[tuple[nn.Parameter, Any]]:
        """Return each weight that stages share, with the group of its ranks."""
        return [(attrgetter(name)(comm["module"]), comm["group"])
                for comm in self.tied_comms.values() for name in comm["weight_attr"]]

    def allreduce_tied_weight_gradients(self) -> None:
        """Sum `grad` of each weight that stages share, for scripts without an engine, which does it by itself."""
        for weight, group in self.get_tied_weights_and_groups():
            if weight.grad is not None:
                shoal.comm.all_reduce(weight.grad, group=group)

    def save_state_dict(self, save_dir: str, checkpoint_engine: Any, exclude_frozen_params: bool = False) -> None:
        """Write the weights of each layer of this rank to its published file. Every rank calls it."""
        with gathered(self):
            for place, built in enumerate(self._built):
                if built.module is not None and getattr(self._topo.get_coord(self.global_rank), "data", 0) == 0:
                    frozen = {name for name, each in built.module.named_parameters() if not each.requires_grad}
                    skipped = frozen if exclude_frozen_params else set[str]()
                    state = {name: value.detach().clone() for name, value in built.module.state_dict().items()
                             if name not in skipped}
                    checkpoint_engine.save(state, self.ckpt_layer_path(save_dir, place))
        shoal.comm.barrier()

    def load_state_dir(self, load_dir: str, checkpoint_engine: Any, strict: bool = True) -> None:
        """Load the weights of each layer of this rank from its published file. Every rank calls it."""
        with gathered(self, modifier_rank=0):
            for place, built in enumerate(self._built):
                if built.module is not None:
                    state = checkpoint_engine.load(self.ckpt_layer_path(load_dir, place), map_location="cpu")
                    built.module.load_state_dict(state, strict=strict)

    def topology(self) -> ProcessTopology:
        """Return the topology: the coordinates of all ranks."""
        return self._topo

    @property
    def parts(self) -> list[int]:
        """The first layer of each stage, and the number of layers."""
        return list(super().partitions())

    def partitions(self) -> list[int]:  # pyright: ignore[reportIncompatibleMethodOverride]  published as a list
        """Return the first layer of each stage, and the number of layers."""
        return self.parts

    @property
    def _built(self) -> list[layer.Built]:
        return [built for stage in self.stages for built in stage.layers]

    @property
    def _local_start(self) -> int:
        return self._built[0].index

    @property
    def _local_stop(self) -> int:
        return self._built[-1].index + 1

    @property
    def forward_funcs(self) -> list[Callable[..., Any]]:
        """The layers of this rank, as functions of one value."""
        return [built.body if built.call is None else partial(built.call, built.body) for built in self._built]

    @property
    def fwd_map(self) -> dict[str, int]:
        """The place of each module of this rank in `forward_funcs`, by its name; without those of `tied_modules`."""
        return {built.name: place for place, built in enumerate(self._built)
                if built.module is not None and built.path == built.name}

    @property
    def tied_weight_attrs(self) -> dict[str, list[str]]:
        """The names of the tied weights, by key."""
        return {spec.key: list(spec.tied_weight_attr) for spec in self._layer_specs if isinstance(spec, layer.TiedLayerSpec)}

    def stage_owner(self, layer_idx: int) -> int:
        """Return the pipeline rank of a layer. Raises `AssertionError` for an index out of range."""
        try:
            return super().stage_owner(layer_idx)
        except UsageError as error:
            raise _NoLayer(*error.args) from None

    def mpu(self) -> PipelineParallelGrid:
        """Return the grid of process groups."""
        return self._grid

    def set_checkpoint_interval(self, interval: int) -> None:
        """Recompute activations in groups of `interval` layers from now on; 0: no recomputation."""
        super().set_checkpoint_interval(interval)
        self.activation_checkpoint_interval = interval

    def _count_layer_params(self) -> list[int]:
        """Return the trainable parameters of each layer."""
        return [layer.contents_of(each).trainable for each in layer.named(self._layer_specs)]

    def _find_layer_type(self, layername: str) -> list[int]:
        """Return the layers whose class name matches a pattern. Raises `UsageError` if none does."""
        found = [each.index for each in layer.named(self._layer_specs)
                 if re.search(layername, each.kind, re.IGNORECASE)]
        if not found:
            raise UsageError(f"Partitioning '{layername}' found no valid layers to partition")
        return found

    def ckpt_prefix(self, checkpoints_path: str, tag: Any) -> str:
        """Return the published prefix of this rank's module files."""
        place = self.topology().get_coord(self.global_rank)
        omit = [axis for axis in place._fields if axis == "data"]
        return str(Path(checkpoints_path) / str(tag) / f"module-{self.topology().get_rank_repr(self.global_rank, omit)}")

    def ckpt_layer_path(self, ckpt_dir: str, local_layer_idx: int) -> str:
        """Return the published file of a layer of this rank."""
        rank = self.topology().get_rank_repr(self.global_rank)
        return str(Path(ckpt_dir) / f"layer_{self._local_start + local_layer_idx:02d}{f'-{rank}' if rank else ''}"
                                    f"-model_states.pt")

    def ckpt_layer_path_list(self, ckpt_dir: str, local_layer_idx: int) -> list[str]:
        """Return the published files of a layer, of all tensor ranks, that are there."""
        number = self._local_start + local_layer_idx
        return sorted(map(str, Path(ckpt_dir).glob(f"layer_{number:02d}-*model_states.pt")))


def _kind(each: layer.Layer) -> type | None:
    return each.source.typename if isinstance(each.source, layer.LayerSpec) else None


def _listed(layers: Any) -> list[Any]:
    return list(layers.values()) if isinstance(layers, Mapping) else list(layers)
