"""The engines that `shoal.initialize` builds around a model. They own optimizer, schedule, counters and checkpoints."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shoal.engine.engine import Engine as Engine
    from shoal.engine.pipeline_engine import PipelineEngine as PipelineEngine

_HOMES = {"Engine": "shoal.engine.engine", "PipelineEngine": "shoal.engine.pipeline_engine"}


def __getattr__(name: str) -> object:
    """Import an engine at its first use: the command line needs the configuration's schema alone."""
    if name not in _HOMES:
        raise AttributeError(f"module 'shoal.engine' has no attribute '{name}'")
    return vars(import_module(_HOMES[name]))[name]
