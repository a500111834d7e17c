"""The bases of published optimizers."""

from shoal.compat.optimizers import DeepSpeedOptimizer as DeepSpeedOptimizer
from shoal.compat.optimizers import ZeROOptimizer as ZeROOptimizer
