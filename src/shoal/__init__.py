"""Shoal trains PyTorch models larger than any one device: one call, one JSON file, no change to the model."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from shoal.version import __version__

if TYPE_CHECKING:
    from shoal import comm, zero
    from shoal.activation import checkpointing
    from shoal.data import RepeatingLoader
    from shoal.engine.build import add_config_arguments, initialize
    from shoal.engine.engine import Engine
    from shoal.engine.mesh_setup import configured_mesh
    from shoal.engine.pipeline_engine import PipelineEngine
    from shoal.errors import ShoalError
    from shoal.mesh.mesh import Mesh
    from shoal.mesh.topology import PipeDataParallelTopology, PipeModelDataParallelTopology, ProcessTopology
    from shoal.optim import register_optimizer
    from shoal.pipeline.layer import LayerSpec, TiedLayerSpec, Unpacked
    from shoal.pipeline.module import PipelineModule
    from shoal.schedule import add_tuning_arguments, register_schedule
    from shoal.transport.process_group import init_distributed
    from shoal.zero.gathered import gathered

__all__ = [
    "Engine",
    "LayerSpec",
    "Mesh",
    "PipeDataParallelTopology",
    "PipeModelDataParallelTopology",
    "PipelineEngine",
    "PipelineModule",
    "ProcessTopology",
    "RepeatingLoader",
    "ShoalError",
    "TiedLayerSpec",
    "Unpacked",
    "__version__",
    "add_config_arguments",
    "add_tuning_arguments",
    "checkpointing",
    "comm",
    "configured_mesh",
    "gathered",
    "init_distributed",
    "initialize",
    "register_optimizer",
    "register_schedule",
    "zero",
]

# Names are imported at their first use, so that the command line and `import shoal` load only the modules that they need.
_HOMES = {
    "Engine": "shoal.engine.engine",
    "LayerSpec": "shoal.pipeline.layer",
    "Mesh": "shoal.mesh.mesh",
    "PipeDataParallelTopology": "shoal.mesh.topology",
    "PipeModelDataParallelTopology": "shoal.mesh.topology",
    "PipelineEngine": "shoal.engine.pipeline_engine",
    "PipelineModule": "shoal.pipeline.module",
    "ProcessTopology": "shoal.mesh.topology",
    "RepeatingLoader": "shoal.data",
    "ShoalError": "shoal.errors",
    "TiedLayerSpec": "shoal.pipeline.layer",
    "Unpacked": "shoal.pipeline.layer",
    "add_config_arguments": "shoal.engine.build",
    "add_tuning_arguments": "shoal.schedule",
    "configured_mesh": "shoal.engine.mesh_setup",
    "gathered": "shoal.zero.gathered",
    "init_distributed": "shoal.transport.process_group",
    "initialize": "shoal.engine.build",
    "register_optimizer": "shoal.optim",
    "register_schedule": "shoal.schedule",
}


def __getattr__(name: str) -> object:
    if name == "checkpointing":
        return import_module("shoal.activation.checkpointing")
    if name in ("comm", "zero"):
        return import_module(f"shoal.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'shoal' has no attribute '{name}'")
    home = import_module(_HOMES[name])
    here = {known: vars(home)[known] for known, place in _HOMES.items() if place == home.__name__}
    globals().update(here)
    return here[name]


def __dir__() -> list[str]:
    return __all__
