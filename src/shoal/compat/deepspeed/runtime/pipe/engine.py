"""The published pipeline engine."""

from shoal.engine import PipelineEngine as PipelineEngine
