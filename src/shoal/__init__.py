"""Shoal trains PyTorch models larger than any one device: one call, one JSON file, no change to the model."""

from shoal import zero
from shoal.distributed import init_distributed
from shoal.engine import Engine
from shoal.errors import ShoalError
from shoal.initialize import add_config_arguments, initialize
from shoal.version import __version__
from shoal.zero.gathered import gathered

__all__ = [
    "Engine",
    "ShoalError",
    "__version__",
    "add_config_arguments",
    "gathered",
    "init_distributed",
    "initialize",
    "zero",
]
