"""ZeRO: model state that rests sharded over the data ranks, as one mechanism for every stage."""

from shoal.zero.gathered import gathered
from shoal.zero.gathered import gathered as GatheredParameters
from shoal.zero.init import Init
from shoal.zero.memory_needs import (
    estimate_zero2_model_states_mem_needs,
    estimate_zero2_model_states_mem_needs_all_cold,
    estimate_zero2_model_states_mem_needs_all_live,
    estimate_zero3_model_states_mem_needs,
    estimate_zero3_model_states_mem_needs_all_cold,
    estimate_zero3_model_states_mem_needs_all_live,
)
from shoal.zero.partition import get_leaf_modules, set_leaf_modules

__all__ = [
    "GatheredParameters",
    "Init",
    "estimate_zero2_model_states_mem_needs",
    "estimate_zero2_model_states_mem_needs_all_cold",
    "estimate_zero2_model_states_mem_needs_all_live",
    "estimate_zero3_model_states_mem_needs",
    "estimate_zero3_model_states_mem_needs_all_cold",
    "estimate_zero3_model_states_mem_needs_all_live",
    "gathered",
    "get_leaf_modules",
    "set_leaf_modules",
]
