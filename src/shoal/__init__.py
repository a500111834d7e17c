"""Shoal trains PyTorch models larger than any one device: one call, one JSON file, no change to the model."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from shoal.version import __version__

if TYPE_CHECKING:
    from shoal import comm, zero
    from shoal.arrange import configured_mesh
    from shoal.data import RepeatingLoader
    from shoal.distributed import init_distributed
    from shoal.engine import Engine
    from shoal.entry import add_config_arguments, initialize
    from shoal.errors import ShoalError
    from shoal.mesh import Mesh
    from shoal.optim import register_optimizer
    from shoal.pipeline.module import PipelineModule
    from shoal.pipeline.spec import LayerSpec, TiedLayerSpec, Unpacked
    from shoal.schedule import add_tuning_arguments, register_schedule
    from shoal.topology import PipeDataParallelTopology, PipeModelDataParallelTopology, ProcessTopology
    from shoal.zero.gathered import gathered

__all__ = [
    "Engine",
    "LayerSpec",
    "Mesh",
    "PipeDataParallelTopology",
    "PipeModelDataParallelTopology",
    "PipelineModule",
    "ProcessTopology",
    "RepeatingLoader",
    "ShoalError",
    "TiedLayerSpec",
    "Unpacked",
    "__version__",
    "add_config_arguments",
    "add_tuning_arguments",
    "comm",
    "configured_mesh",
    "gathered",
    "init_distributed",
    "initialize",
    "register_optimizer",
    "register_schedule",
    "zero",
]

# Names are imported at their first use: the command line and `import shoal` pay for nothing that they do not need.
_HOMES = {
    "Engine": "shoal.engine",
    "LayerSpec": "shoal.pipeline.spec",
    "Mesh": "shoal.mesh",
    "PipeDataParallelTopology": "shoal.topology",
    "PipeModelDataParallelTopology": "shoal.topology",
    "PipelineModule": "shoal.pipeline.module",
    "ProcessTopology": "shoal.topology",
    "RepeatingLoader": "shoal.data",
    "ShoalError": "shoal.errors",
    "TiedLayerSpec": "shoal.pipeline.spec",
    "Unpacked": "shoal.pipeline.spec",
    "add_config_arguments": "shoal.entry",
    "add_tuning_arguments": "shoal.schedule",
    "configured_mesh": "shoal.arrange",
    "gathered": "shoal.zero.gathered",
    "init_distributed": "shoal.distributed",
    "initialize": "shoal.entry",
    "register_optimizer": "shoal.optim",
    "register_schedule": "shoal.schedule",
}


def __getattr__(name: str) -> object:
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
