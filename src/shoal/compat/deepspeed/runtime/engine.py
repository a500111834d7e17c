"""The published engine, and the timer and optimizer names of its module."""

from __future__ import annotations

from shoal.compat.deepspeed.runtime.config import ADAM_OPTIMIZER as ADAM_OPTIMIZER
from shoal.compat.deepspeed.runtime.config import ADAMW_OPTIMIZER as ADAMW_OPTIMIZER
from shoal.compat.deepspeed.runtime.config import DEEPSPEED_OPTIMIZERS as DEEPSPEED_OPTIMIZERS
from shoal.compat.deepspeed.runtime.config import LAMB_OPTIMIZER as LAMB_OPTIMIZER
from shoal.compat.deepspeed.runtime.config import DeepSpeedConfig as DeepSpeedConfig
from shoal.compat.engine import DeepSpeedEngine as DeepSpeedEngine

MEMORY_OPT_ALLREDUCE_SIZE = 500_000_000
FORWARD_MICRO_TIMER, FORWARD_GLOBAL_TIMER = "fwd_microstep", "fwd"
BACKWARD_MICRO_TIMER, BACKWARD_GLOBAL_TIMER = "bwd_microstep", "bwd"
BACKWARD_INNER_MICRO_TIMER, BACKWARD_INNER_GLOBAL_TIMER = "bwd_inner_microstep", "bwd_inner"
BACKWARD_REDUCE_MICRO_TIMER, BACKWARD_REDUCE_GLOBAL_TIMER = "bwd_allreduce_microstep", "bwd_allreduce"
STEP_MICRO_TIMER, STEP_GLOBAL_TIMER = "step_microstep", "step"

