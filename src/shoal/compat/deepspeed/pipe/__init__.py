"""Pipeline modules under their published names."""

from shoal.pipeline.layer import LayerSpec as LayerSpec
from shoal.pipeline.layer import TiedLayerSpec as TiedLayerSpec
from shoal.pipeline.module import PipelineModule as PipelineModule
