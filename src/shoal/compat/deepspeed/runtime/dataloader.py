"""Loaders under their published names."""

from shoal.data import RepeatingLoader as RepeatingLoader
from shoal.data.loader import Loader as DeepSpeedDataLoader

__all__ = ["DeepSpeedDataLoader", "RepeatingLoader"]
