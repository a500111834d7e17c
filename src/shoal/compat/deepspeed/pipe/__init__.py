"""Pipeline modules under their published names."""

from shoal.compat.deepspeed.runtime.pipe.module import LayerSpec as LayerSpec
from shoal.compat.deepspeed.runtime.pipe.module import PipelineModule as PipelineModule
from shoal.compat.deepspeed.runtime.pipe.module import TiedLayerSpec as TiedLayerSpec
