"""The published engine."""

from shoal.engine import Engine as DeepSpeedEngine

__all__ = ["DeepSpeedEngine"]
