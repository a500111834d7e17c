"""Pipeline modules under their published names, with the published methods, attributes and errors."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn

from shoal.compat.deepspeed.runtime.pipe.topology import PipeDataParallelTopology as PipeDataParallelTopology
from shoal.compat.deepspeed.runtime.pipe.topology import PipelineParallelGrid, ProcessTopology
from shoal.errors import NotSupportedYet, PipelineError, UsageError
from shoal.pipeline import layer, module

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
        super().__init__(layers, num_stages, topology, loss_fn, seed_layers, seed_fn, base_seed, partition_method,
                         activation_checkpoint_interval, activation_checkpoint_func, checkpointable_layers, dynamic_shape,
                         **native)
        self.seed_layers, self.seed_fn, self.base_seed = seed_layers, seed_fn, base_seed
        self.activation_checkpoint_interval = activation_checkpoint_interval
        self.activation_checkpoint_func = activation_checkpoint_func
        self.checkpointable_layers = checkpointable_layers
        self.global_rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.stage_id = self.pipeline_rank
        self.micro_offset = 0
        self._layer_specs = _listed(layers)
        self._num_layers = len(self.names)
        given = super().topology()
        self._topo = given if isinstance(given, ProcessTopology) else ProcessTopology(given.axes, given.dims)
        self._grid = PipelineParallelGrid(topology=self._topo)

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
        """The place of each module of this rank in `forward_funcs`, by its name."""
        return {built.name: place for place, built in enumerate(self._built) if built.module is not None}

    @property
    def tied_modules(self) -> nn.ModuleDict:
        """The first module of each key of tied layers that this rank has."""
        found: dict[str, nn.Module] = {}
        for built in self._built:
            spec = self._layer_specs[built.index]
            if isinstance(spec, layer.TiedLayerSpec) and built.module is not None:
                found.setdefault(spec.key, built.module)
        return nn.ModuleDict(found)

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


def _listed(layers: Any) -> list[Any]:
    return list(layers.values()) if isinstance(layers, Mapping) else list(layers)
