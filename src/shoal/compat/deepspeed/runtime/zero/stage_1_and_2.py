"""The published optimizer of stages 1 and 2, and its memory estimators."""

from shoal.compat.optimizers import DeepSpeedZeroOptimizer as DeepSpeedZeroOptimizer
from shoal.zero import estimate_zero2_model_states_mem_needs_all_cold as estimate_zero2_model_states_mem_needs_all_cold
from shoal.zero import estimate_zero2_model_states_mem_needs_all_live as estimate_zero2_model_states_mem_needs_all_live
