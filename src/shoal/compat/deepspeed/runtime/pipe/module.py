"""Pipeline modules under their published names."""

from shoal.compat.deepspeed.runtime.pipe.topology import PipeDataParallelTopology as PipeDataParallelTopology
from shoal.compat.deepspeed.runtime.pipe.topology import PipelineParallelGrid as PipelineParallelGrid
from shoal.errors import PipelineError as PipelineError
from shoal.pipeline.layer import LayerSpec as LayerSpec
from shoal.pipeline.layer import TiedLayerSpec as TiedLayerSpec
from shoal.pipeline.module import PipelineModule as PipelineModule
