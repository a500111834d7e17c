"""The published pipeline engine."""

from shoal.compat.pipeline_engine import PipelineEngine as PipelineEngine
from shoal.errors import PipelineError as PipelineError

LOG_STAGE = DATA_PARALLEL_ID = -2


def is_even(number: int) -> bool:
    """Whether a number is even."""
    return number % 2 == 0
