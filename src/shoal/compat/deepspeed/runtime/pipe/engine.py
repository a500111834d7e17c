"""The published pipeline engine."""

from shoal.compat.pipeline_engine import PipelineEngine as PipelineEngine
from shoal.errors import PipelineError as PipelineError

LOG_STAGE = DATA_PARALLEL_ID = -2
